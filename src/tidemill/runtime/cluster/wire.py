"""What crosses between processes: msgpack of records, and faults as records rather than pickled exceptions."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from tidemill.core.errors import TidemillError, TrainerLost, UserError, WeightsError, WorkerLost
from tidemill.core.records import Record

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class RemoteError(TidemillError):
    """Something nobody foresaw went wrong in another process; its traceback is in the notes."""


class Fault(Record):
    """An exception, as far as it matters elsewhere."""

    kind: str  # a key of `_KINDS`, or "" for any other
    words: tuple[str, ...]
    traceback: str = ""  # of what nobody foresaw


class Answer(Record):
    """What a remote call came to."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    fault: Fault | None = None


def _user(what: str, where: str, cure: str) -> UserError:
    return UserError(what, where=where, cure=cure)


def _lost(cause: str, cure: str) -> WorkerLost:
    return WorkerLost(cause, cure=cure)


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


def _rebuilt(fault: Fault) -> TidemillError:
    if fault.traceback:
        error = RemoteError(*fault.words)
        error.add_note(fault.traceback)
        return error
    return _KINDS.get(fault.kind, TidemillError)(*fault.words)


def _fault(error: Exception) -> Fault:
    if isinstance(error, UserError):
        return Fault(kind="user", words=(error.what, error.where, error.cure))
    if isinstance(error, WorkerLost):
        return Fault(kind="lost", words=(error.cause, error.cure))
    if isinstance(error, TrainerLost):
        return Fault(kind="trainer", words=(str(error),))
    if isinstance(error, WeightsError):
        return Fault(kind="weights", words=(str(error),))
    if isinstance(error, RemoteError):  # met on the way here from a third process
        return Fault(kind="", words=(str(error),), traceback="\n".join(error.__notes__))
    if isinstance(error, TidemillError):
        return Fault(kind="", words=(str(error),))
    what = f"{type(error).__name__}: {error}"
    return Fault(kind="", words=(what,), traceback="".join(traceback.format_exception(error)))
