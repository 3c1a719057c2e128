"""What crosses between processes: records as msgpack, errors as records, weights in Ray's object store."""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, TrainerLost, UserError, WeightsError, WorkerLost
from tidemill.core.records import PolicyVersion, Record, StepMetrics, TokenBuffer
from tidemill.weights.snapshot import Blob, Missing

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class RemoteError(TidemillError):
    """Something nobody foresaw went wrong in another process; its traceback is in the notes."""


class RemoteFailure(Record):
    """An exception, as far as it matters elsewhere."""

    kind: str  # a key of `_KINDS`, or "" for any other
    words: tuple[str, ...]
    traceback: str = ""  # of what nobody foresaw


class Answer(Record):
    """What a remote call came to."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    fault: RemoteFailure | None = None


def _user(what: str, where: str, hint: str) -> UserError:
    return UserError(what, where=where, hint=hint)


def _lost(cause: str, hint: str) -> WorkerLost:
    return WorkerLost(cause, hint=hint)


_KINDS: dict[str, Callable[..., TidemillError]] = {
    "user": _user,
    "lost": _lost,
    "trainer": TrainerLost,
    "weights": WeightsError,
}


def decode(blob: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(blob, type=kind)


def answering(method: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[bytes]]:
    """Make an actor's coroutine return an encoded `Answer`, also when it raises."""

    @functools.wraps(method)
    async def answer(*args: Any) -> bytes:
        try:
            return encode(Answer(value=msgspec.Raw(encode(await method(*args)))))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, in another process
            return encode(Answer(fault=_fault(error)))

    return answer


def answered(method: Callable[..., object]) -> Callable[..., bytes]:
    """The same of a plain method: Ray calls those one at a time, in the order in which one process asks."""

    @functools.wraps(method)
    def answer(*args: Any) -> bytes:
        try:
            return encode(Answer(value=msgspec.Raw(encode(method(*args)))))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, in another process
            return encode(Answer(fault=_fault(error)))

    return answer


def read_answer(blob: bytes, kind: type[T]) -> T:
    """Raises what the remote call raised: those of `_KINDS` as themselves, others in words."""
    answer = decode(blob, Answer)
    if answer.fault is None:
        return decode(bytes(answer.value), kind)
    raise _rebuilt(answer.fault)


def _rebuilt(fault: RemoteFailure) -> TidemillError:
    if fault.traceback:
        error = RemoteError(*fault.words)
        error.add_note(fault.traceback)
        return error
    return _KINDS.get(fault.kind, TidemillError)(*fault.words)


def _fault(error: Exception) -> RemoteFailure:
    if isinstance(error, UserError):
        return RemoteFailure(kind="user", words=(error.what, error.where, error.hint))
    if isinstance(error, WorkerLost):
        return RemoteFailure(kind="lost", words=(error.cause, error.hint))
    if isinstance(error, TrainerLost):
        return RemoteFailure(kind="trainer", words=(str(error),))
    if isinstance(error, WeightsError):
        return RemoteFailure(kind="weights", words=(str(error),))
    if isinstance(error, RemoteError):  # met on the way here from a third process
        return RemoteFailure(kind="", words=(str(error),), traceback="\n".join(error.__notes__))
    if isinstance(error, TidemillError):
        return RemoteFailure(kind="", words=(str(error),))
    what = f"{type(error).__name__}: {error}"
    return RemoteFailure(kind="", words=(what,), traceback="".join(traceback.format_exception(error)))


class ObjectStoreTransport:
    """Implements `weights.transport.Transport` on the publisher's side; its process owns the objects, and knows their
    names."""

    zero_copy = False
    """On the publisher's own node a read copies nothing, elsewhere it is a transfer."""

    def __init__(self) -> None:
        self._refs: dict[str, ray.ObjectRef[Blob]] = {}

    async def put(self, name: str, blob: Blob) -> None:
        try:
            self._refs[name] = await asyncio.to_thread(ray.put, blob)
        except RayError as error:
            raise WeightsError(f"{name} does not fit into the object store: {error}") from error

    async def get(self, name: str) -> Blob:
        return await _fetched(name, self.refs(name))

    def refs(self, name: str) -> list[ray.ObjectRef[Blob]]:
        """The object of that name, in a list: bare, Ray would pass the object itself. Empty when there is none."""
        ref = self._refs.get(name)
        return [] if ref is None else [ref]

    async def delete(self, name: str) -> None:
        self._refs.pop(name, None)

    async def close(self) -> None:
        self._refs.clear()


class ObjectStoreReader:
    """Implements `weights.transport.Transport` for those who only read.

    Args:
        owner: an actor with a method `blob(name)` that returns what `ObjectStoreTransport.refs` does.
    """

    zero_copy = False

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    async def get(self, name: str) -> Blob:
        try:
            refs = await self._owner.blob.remote(name)
        except RayError as error:
            raise WeightsError(f"{name}: the publisher does not answer ({type(error).__name__})") from error
        return await _fetched(name, refs)

    async def put(self, name: str, blob: Blob) -> None:
        raise TypeError("a reader publishes nothing")

    async def delete(self, name: str) -> None:
        raise TypeError("a reader deletes nothing")

    async def close(self) -> None:
        """Nothing here is the reader's to delete."""


async def _fetched(name: str, refs: list[ray.ObjectRef[Blob]]) -> Blob:
    if not refs:
        raise Missing(f"there is no {name}")
    try:
        blob: Blob = await refs[0]
    except RayError as error:
        raise WeightsError(f"{name} cannot be read from the object store ({type(error).__name__})") from error
    return blob


class WorkerPlan(Record):
    """How a worker generates, wherever it runs."""

    spec: str  # a RunSpec as JSON
    prompt_tokens: int  # the longest prompt
    dtype: str  # of the published weights
    threads: int  # inside one operation
    cloud_notices: bool  # ask the cloud's metadata service whether this machine is about to go
    orphan_s: float = 60.0  # a worker that nobody has asked for anything for so long ends itself


class TrainerPlan(Record):
    """What is trained and where it is kept."""

    spec: str  # a RunSpec as JSON
    checkpoints: str  # a folder
    prompt_tokens: int  # the longest prompt
    probe_ids: TokenBuffer  # int32 [N], published with every version; empty where nobody pulls any


class CriticPlan(Record):
    """What a critic in a process of its own learns with."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    seen: str  # a file that the trainer has just made where checkpoints are written


class ReaderPlan(Record):
    """What a reward model or the reference reads with, in a process of its own."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    reward_model: str = ""  # its folder; empty for the reference


class Started(Record):
    """What a trainer said when it was ready."""

    version: PolicyVersion
    device: str
    threads: int
    autocast: str
    dtype: str  # of published weights
    critic_device: str  # of a critic in a process of its own, else empty


class Committed(Record):
    """A batch was learned from."""

    metrics: StepMetrics
    version: PolicyVersion


class Restored(Record):
    """Which checkpoint the trainer goes on from; 0 for none."""

    step: int
    version: PolicyVersion
    warnings: tuple[str, ...]


def spec_to_send(spec: RunSpec, folder: Path) -> str:
    """The configuration for a process that runs in another folder.

    Args:
        folder: the model's, as found here.
    """
    model, critic = spec.model, spec.critic
    if Path(model.source).expanduser().exists():
        model = model.model_copy(update={"source": str(folder.resolve())})
    if critic.source is not None and (given := Path(critic.source).expanduser()).exists():
        critic = critic.model_copy(update={"source": str(given.resolve())})
    return spec.model_copy(update={"model": model, "critic": critic}).model_dump_json()
