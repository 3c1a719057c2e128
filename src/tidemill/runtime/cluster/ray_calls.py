"""Start actors, call them with deadlines, and serve calls inside them: encoded arguments, results and errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec
import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill.config.schema import RunSpec
from tidemill.core.errors import GuardStop, TidemillError, TrainerLost, UserError, WeightsError, WorkerLost
from tidemill.core.protocols import with_deadline
from tidemill.core.records import GenerateRequest, Loaded, PolicyVersion, Record, SampleId, WorkerReport
from tidemill.rollout.worker import EngineWorker

T = TypeVar("T")
P = ParamSpec("P")

CLEAN_UP_S = 5.0
"""Deadline of clean-up calls; a cluster that is gone never answers them."""
RESUME_HINT = "run the same command again to resume from the last checkpoint and the stored samples"


async def blocking(function: Callable[[], T], *, awaited: str, timeout_s: float) -> T:
    """Call `function` in a new daemon thread.

    Raises:
        DeadlineError: it did not return in time; its thread keeps running.
    """
    waiting = asyncio.shield(asyncio.wrap_future(in_thread(function, name=awaited)))
    return await with_deadline(waiting, timeout_s=timeout_s, awaited=awaited, look_at="the load of this machine")


async def clean_up(function: Callable[[], object], *, awaited: str) -> None:
    """Call `function` in a thread; ignore errors and calls that take longer than `CLEAN_UP_S`."""
    with suppress(Exception):
        await blocking(function, awaited=awaited, timeout_s=CLEAN_UP_S)


def in_thread(function: Callable[[], T], *, name: str) -> Future[T]:
    """Call `function` in a new daemon thread."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def decode(blob: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(blob, type=kind)


class RemoteError(TidemillError):
    """An unexpected exception in another process; its traceback is in the notes."""


class RemoteFailure(Record):
    """An exception as it crosses processes."""

    kind: str  # a key of `_ERRORS`, or "" for any other
    arguments: tuple[str, ...]
    traceback: str = ""  # of an unexpected exception


class Answer(Record):
    """Result of a remote call."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    failure: RemoteFailure | None = None


_ERRORS: dict[str, Callable[..., TidemillError]] = {
    "guard": GuardStop,
    "user": lambda what, where, hint: UserError(what, where=where, hint=hint),
    "worker": lambda cause, hint: WorkerLost(cause, hint=hint),
    "trainer": TrainerLost,
    "weights": WeightsError,
}


def answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method or coroutine of an actor return an encoded `Answer`, also when it raises.

    Ray runs plain methods one at a time, in the order in which a process calls them; coroutines run concurrently.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def answer_async(*args: Any) -> bytes:
            try:
                return encode(Answer(value=msgspec.Raw(encode(await method(*args)))))
            except Exception as error:  # noqa: BLE001 - raised in the calling process
                return encode(Answer(failure=_failure(error)))

        return answer_async

    @functools.wraps(method)
    def answer(*args: Any) -> bytes:
        try:
            return encode(Answer(value=msgspec.Raw(encode(method(*args)))))
        except Exception as error:  # noqa: BLE001 - raised in the calling process
            return encode(Answer(failure=_failure(error)))

    return answer


def read_answer(blob: bytes, kind: type[T]) -> T:
    """Raises what the remote call raised: a type of `_ERRORS`, else TidemillError, or RemoteError for a bug."""
    answer = decode(blob, Answer)
    failure = answer.failure
    if failure is None:
        return decode(bytes(answer.value), kind)
    if failure.traceback:
        error = RemoteError(*failure.arguments)
        error.add_note(failure.traceback)
        raise error
    raise _ERRORS.get(failure.kind, TidemillError)(*failure.arguments)


def _failure(error: Exception) -> RemoteFailure:
    if isinstance(error, UserError):
        return RemoteFailure(kind="user", arguments=(error.what, error.where, error.hint))
    if isinstance(error, GuardStop):
        return RemoteFailure(kind="guard", arguments=(str(error),))
    if isinstance(error, WorkerLost):
        return RemoteFailure(kind="worker", arguments=(error.cause, error.hint))
    if isinstance(error, TrainerLost):
        return RemoteFailure(kind="trainer", arguments=(str(error),))
    if isinstance(error, WeightsError):
        return RemoteFailure(kind="weights", arguments=(str(error),))
    if isinstance(error, RemoteError):  # received from a third process
        return RemoteFailure(kind="", arguments=(str(error),), traceback="\n".join(error.__notes__))
    if isinstance(error, TidemillError):
        return RemoteFailure(kind="", arguments=(str(error),))
    what = f"{type(error).__name__}: {error}"
    return RemoteFailure(kind="", arguments=(what,), traceback="".join(traceback.format_exception(error)))


Lost = Callable[[str, str], TidemillError]
"""Builds the error for a lost actor from cause and hint."""


def worker_lost(cause: str, hint: str) -> WorkerLost:
    return WorkerLost(cause, hint=hint)


def trainer_lost(cause: str, hint: str, *, role: str = "trainer") -> TrainerLost:
    return TrainerLost(lost_message(role, cause, hint))


def lost_message(role: str, cause: str, hint: str) -> str:
    advice = f"{hint}; then {RESUME_HINT}" if hint else RESUME_HINT
    return f"the {role} died: {cause}\n  {advice}"


class Caller(Protocol):
    """Calls on the trainer's actor, or on all of them."""

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T: ...


class Remote:
    """Calls on one actor.

    Args:
        lost: builds the error for an actor that died or does not answer.
        node_name: returns the name of the actor's node, for the message when that has died.
    """

    def __init__(self, handle: Any, *, lost: Lost, node_name: Callable[[], str] = lambda: "") -> None:
        self.handle, self._lost, self._node_name = handle, lost, node_name
        self._ended: TidemillError | None = None

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        """The decoded result.

        Raises:
            TidemillError: what the method raised, or the `lost` error of an actor that died or did not answer in time.
        """
        if self._ended is not None:
            raise self._ended
        future = self.ask(method, *args)
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            raise self._lost(f"no answer to `{method}` within {timeout_s:.0f} s", "check its machine and its log")
        try:
            blob = future.result()
        except RayError as error:
            raise self.end(error) from error
        return read_answer(blob, kind)

    def ask(self, method: str, *args: object) -> asyncio.Future[bytes]:
        """Start a call. Cancelling the task that awaits it does not cancel the call."""
        future: asyncio.Future[bytes] = asyncio.wrap_future(getattr(self.handle, method).remote(*args).future())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark an exception as retrieved
        return future

    def kill(self) -> None:
        """End the process now, without restart; every later call raises."""
        self._ended = self._ended or self._lost("it was ended", "")

        def kill() -> None:
            if ray.is_initialized():  # otherwise Ray would start a new cluster for the call
                ray.kill(self.handle, no_restart=True)

        in_thread(kill, name="the end of an actor")  # not awaited: the actor or the cluster may be gone

    def end(self, error: RayError) -> TidemillError:
        """Remember that the actor has died; returns the `lost` error."""
        self._ended = self._ended or self._lost(*describe_ray_error(error, self._node_name()))
        return self._ended


_OUT_OF_MEMORY = "give it more memory, or lower engine.slots or the microbatch"


def describe_ray_error(error: RayError, node: str) -> tuple[str, str]:
    """Cause and hint of an actor's death.

    Args:
        node: name of its node; empty if unknown.
    """
    text = str(error).strip()
    last_line = text.splitlines()[-1] if text else "no reason given"
    its_node = f"its node {node}" if node else "its node"
    if isinstance(error, ActorUnschedulableError):
        return "no node has the resources it requests", "add a node, or lower the resources in [ray]"
    if isinstance(error, OutOfMemoryError):
        return "its node ran out of memory and Ray killed it", _OUT_OF_MEMORY
    if isinstance(error, ActorUnavailableError):
        return f"its process cannot be reached; {its_node} may be gone", ""
    if not isinstance(error, RayActorError):
        return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}", ""
    if getattr(error, "preempted", False):
        return f"{its_node} was taken away, as announced", ""
    if "node has died" in text or "node was terminated" in text or "node is dead" in text:
        return f"{its_node} died", "check that machine, unless its provider took it away"
    if "killed by `ray.kill`" in text:
        return "it was ended", ""
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        return f"it could not be created: {last_line}", "check the Python environment of its node"
    if "setup hook" in text or "RuntimeEnvSetupError" in text:
        return "its process could not be set up", "install the same Tidemill with its extra `cluster` on every node"
    if "worker process has died" in text or "unexpectedly" in text:
        return "its process was killed (SIGKILL or out of memory)", _OUT_OF_MEMORY
    return f"it died: {last_line}", ""


PLACE_S = 60.0


def resources_text(resources: Mapping[str, float], selector: Mapping[str, str]) -> tuple[str, str]:
    """Requested labels and resources, for messages."""
    labels = " and ".join(f"{key}={value}" for key, value in selector.items()) or "any label"
    return labels, " and ".join(f"{amount:g} free {kind}" for kind, amount in resources.items() if amount)


class ActorResources(NamedTuple):
    cpus: float
    gpus: float
    key: str  # `key`_cpus and `key`_gpus are their configuration keys


@asynccontextmanager
async def placed(actor: type, role: str, resources: ActorResources, selector: Mapping[str, str]) -> AsyncIterator[Any]:
    """Start an actor in a placement group, and yield its handle; both end with the block.

    Args:
        role: for messages.
        selector: labels of the nodes it may run on.

    Raises:
        UserError: no node has the free resources.
    """
    async with placed_group(actor, role, resources, selector, size=1) as handles:
        yield handles[0]


@asynccontextmanager
async def placed_group(
    actor: type, role: str, resources: ActorResources, selector: Mapping[str, str], *, size: int
) -> AsyncIterator[list[Any]]:
    """Like `placed`, for `size` actors with one bundle each, on as few nodes as possible."""
    need = {"CPU": resources.cpus, "GPU": resources.gpus}
    bundle = {kind: amount for kind, amount in need.items() if amount} or {"CPU": 0.001}
    group = placement_group([bundle] * size, strategy="PACK", bundle_label_selector=[dict(selector)] * size)
    try:
        found = await blocking(lambda: group.wait(PLACE_S), awaited=f"a place for the {role}", timeout_s=PLACE_S + 10)
        if not found:
            labels, wanted = resources_text(bundle, selector)
            whom = f"the {role}" if size == 1 else f"each of {size} {role}s"
            raise UserError(
                f"no node with label {labels} has {wanted} for {whom}",
                where=resources.key.partition(".")[0],
                hint=f"lower {resources.key}_cpus or {resources.key}_gpus, change ray.reserved_selector, or add a node",
            )
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        places = [
            PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            for index in range(size)
        ]
        handles = [
            ray.remote(actor).options(scheduling_strategy=place, max_task_retries=0, **options).remote()
            for place in places
        ]
        try:
            yield handles
        finally:
            for handle in handles:
                await clean_up(partial(ray.kill, handle, no_restart=True), awaited=f"the end of the {role}")
    finally:
        await clean_up(lambda: remove_placement_group(group), awaited=f"the removal of the {role}'s placement group")


def require_reserved_gpus(gpus: float, key: str) -> None:
    """Check, inside an actor, that torch can use the GPUs reserved for it.

    Raises:
        UserError: it cannot, and would compute on the CPU.
    """
    if gpus and not torch.cuda.is_available():
        raise UserError(
            "torch cannot use the GPU that is reserved for this process",
            where=key,
            hint="install a CUDA build of torch on that node, or set it to 0 to compute on the CPU",
        )


def spec_to_send(spec: RunSpec, folder: Path) -> str:
    """The configuration as JSON for a process with another working directory: local model paths made absolute.

    Args:
        folder: the resolved folder of the model.
    """
    model, critic = spec.model, spec.critic
    if Path(model.source).expanduser().exists():
        model = model.model_copy(update={"source": str(folder.resolve())})
    if critic.source is not None and (given := Path(critic.source).expanduser()).exists():
        critic = critic.model_copy(update={"source": str(given.resolve())})
    return spec.model_copy(update={"model": model, "critic": critic}).model_dump_json()


S = TypeVar("S", bound="AsyncActor")


def served(
    method: Callable[Concatenate[S, P], Awaitable[object]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, bytes]]:
    """Like `answering`, for coroutines of an `AsyncActor`: a call also shows that the caller is alive."""
    answer = answering(method)

    @functools.wraps(method)
    async def call(self: S, *args: P.args, **kwargs: P.kwargs) -> bytes:
        self.calls_in_flight += 1
        try:
            encoded: bytes = await answer(self, *args, **kwargs)
            return encoded
        finally:
            self.calls_in_flight -= 1
            self.last_call_s = time.monotonic()

    return call  # type: ignore[return-value]  # wraps keeps the first argument's name, which no caller uses


class AsyncActor:
    """Base of actors whose methods are coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_in_flight = 0
        self.last_call_s = time.monotonic()  # when the last call ended

    @property
    def idle_s(self) -> float:
        """Seconds without any call."""
        return 0.0 if self.calls_in_flight else time.monotonic() - self.last_call_s


MAX_REPORTS = 64
"""Reports in one answer."""


class EngineActor(AsyncActor):
    """Base of actors that generate."""

    def __init__(self) -> None:
        super().__init__()
        self.worker: EngineWorker | None = None

    def started_worker(self) -> EngineWorker:
        if self.worker is None:
            raise TidemillError("this actor has not been started")
        return self.worker

    @served
    async def submit(self, requests: bytes) -> None:
        await self.started_worker().submit(decode(requests, list[GenerateRequest]))

    @served
    async def abort(self, sample_ids: bytes) -> None:
        await self.started_worker().abort(decode(sample_ids, list[SampleId]))

    @served
    async def load(self, version: bytes) -> Loaded:
        return await self.started_worker().load(decode(version, PolicyVersion))

    @served
    async def notice(self, seconds: float) -> None:
        self.started_worker().notice(seconds)

    @served
    async def next_reports(self, timeout_s: float) -> list[WorkerReport]:
        """All pending reports, after waiting up to `timeout_s` for the first.

        Raises:
            Exception: what the engine raised, once its last reports are delivered.
        """
        first = await self.started_worker().next_report(timeout_s)
        reports = [] if first is None else [first]
        with suppress(Exception):  # raised again by the next call
            while reports and len(reports) < MAX_REPORTS:
                report = await self.started_worker().next_report(0.0)
                if report is None:
                    break
                reports.append(report)
        return reports

    @served
    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
