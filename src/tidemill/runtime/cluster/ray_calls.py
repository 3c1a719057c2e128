"""Start actors, and call them with deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
from tidemill.core.errors import TidemillError, TrainerLost, UserError
from tidemill.core.protocols import Worker, with_deadline
from tidemill.core.records import WorkerReport
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.wire import AsyncActor, read_answer, served, serves

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
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future


Lost = Callable[[str, str], TidemillError]
"""Builds the error for a lost actor from cause and hint."""


def trainer_lost(cause: str, hint: str, *, role: str = "trainer") -> TrainerLost:
    return TrainerLost(lost_message(role, cause, hint))


def lost_message(role: str, cause: str, hint: str) -> str:
    advice = f"{hint}; then {RESUME_HINT}" if hint else RESUME_HINT
    return f"the {role} died: {cause}\n  {advice}"


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
async def placed(
    actor: type, role: str, resources: ActorResources, selector: Mapping[str, str], *, size: int = 1
) -> AsyncIterator[list[Any]]:
    """Start actors in a placement group, on as few nodes as possible, and yield their handles; they end with the block.

    Args:
        role: for messages.
        selector: labels of the nodes they may run on.

    Raises:
        UserError: no nodes have the free resources.
    """
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
        UserError: it cannot, and would compute on the CPU; or they are of different kinds.
    """
    if gpus and not torch.cuda.is_available():
        raise UserError(
            "torch cannot use the GPU that is reserved for this process",
            where=key,
            hint="install a CUDA build of torch on that node, or set it to 0 to compute on the CPU",
        )
    if gpus > 1:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if len(names) < gpus or len(set(names)) > 1:
            raise UserError(
                f"this process needs {gpus:g} GPUs of one kind, and its node gives it {', '.join(names)}",
                where=key,
                hint="use nodes whose GPUs are all of one kind, or fewer ranks",
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


MAX_REPORTS = 64
"""Reports in one answer."""


class EngineActor(AsyncActor):
    """Base of actors that generate."""

    worker: EngineWorker | None = None
    submit = serves(Worker.submit, "worker")
    abort = serves(Worker.abort, "worker")
    load = serves(Worker.load, "worker")
    run_probe = serves(Worker.run_probe, "worker")

    @served
    async def notice(self, seconds: float) -> None:
        self.part("worker").notice(seconds)

    @served
    async def next_reports(self, timeout_s: float) -> list[WorkerReport]:
        """All pending reports, after waiting up to `timeout_s` for the first.

        Raises:
            Exception: what the engine raised, once its last reports are delivered.
        """
        worker: EngineWorker = self.part("worker")
        first = await worker.next_report(timeout_s)
        reports = [] if first is None else [first]
        with suppress(Exception):  # raised again by the next call
            while reports and len(reports) < MAX_REPORTS:
                report = await worker.next_report(0.0)
                if report is None:
                    break
                reports.append(report)
        return reports

    @served
    async def close(self) -> None:
        if self.worker is not None:
            await self.worker.close()
