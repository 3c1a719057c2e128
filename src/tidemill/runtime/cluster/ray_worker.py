"""Rollout workers as actors on nodes that may be taken away, and the notices of their cloud."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill.config.processes import Processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, WorkerLost
from tidemill.core.protocols import LoopClock, WeightSource, Worker
from tidemill.core.records import Lease, Loaded, PolicyVersion, Record, WorkerReport
from tidemill.hardware.gpu_health import gpu_reader
from tidemill.pool.notices import DETECTED_S, watch_cloud_notices
from tidemill.rollout.weight_sources import PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.connection import NodeWatch
from tidemill.runtime.cluster.lane import SEND_S, LanePlan, LaneSender, open_lane
from tidemill.runtime.cluster.ray_calls import (
    EngineActor,
    Remote,
    blocking,
    require_reserved_gpus,
    resources_text,
    trainer_lost,
)
from tidemill.runtime.cluster.ray_internals import SIGTERM_GRACE_S, signal_fd
from tidemill.runtime.cluster.weight_transports import open_puller, open_readers
from tidemill.runtime.cluster.wire import Caller, calls, invoke, read_answer, served
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.open_engine import Opened, open_engine
from tidemill.weights.node_folder import forget_snapshots

CALL_S = 60.0
LOAD_S = 600.0
CLOSE_S = 30.0
POLL_S = 5.0
"""How long the actor waits for a report before it answers a poll."""


class WorkerPlan(Record):
    """How a worker generates, on any node."""

    spec: str  # a RunSpec as JSON
    prompt_tokens: int  # length of the longest prompt
    dtype: str  # of the published weights
    threads: int  # inside one operation, in each rank
    session: str  # the same for all workers of this run, and for no others
    share_memory: bool  # workers of a machine share a snapshot
    cloud_notices: bool  # ask the cloud's metadata service for termination notices
    orphan_s: float = 60.0  # a worker without any call for this long ends itself


class RayWorker:
    """Implements `core.protocols.Worker` with an `EngineActor`.

    At most one poll is in flight. A poll outlives the wait for it, so that no report is lost when a wait ends early.

    Args:
        owned: `kill` and `close` end the actor; otherwise it also serves others, and continues.
        sender: the trainer, which sends it each version; None: it pulls them.
    """

    def __init__(self, remote: Remote, *, owned: bool, sender: Caller | None = None) -> None:
        self._remote, self._owned, self._sender = remote, owned, sender
        self._reports: deque[WorkerReport] = deque()
        self._poll: asyncio.Future[bytes] | None = None

    reports: Any = list[WorkerReport]
    """What the actor's `next_reports` returns."""
    submit = calls(Worker.submit, timeout_s=CALL_S)
    abort = calls(Worker.abort, timeout_s=CALL_S)

    run_probe = calls(Worker.run_probe, timeout_s=CALL_S)

    async def notice(self, seconds: float) -> None:
        """Make its next report announce that its machine ends in `seconds`."""
        await invoke(self._remote, CALL_S, EngineActor.notice, seconds)

    async def load(self, version: PolicyVersion) -> Loaded:
        """Raises WeightsError: the trainer has another version, or the engine does not get all of it."""
        loading = invoke(self._remote, LOAD_S, Worker.load, version)
        if self._sender is None:
            return await loading
        loaded, _ = await asyncio.gather(loading, invoke(self._sender, SEND_S, LaneSender.send_weights, version))
        return loaded

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports:
            if self._poll is None:
                self._poll = self._remote.ask("next_reports", POLL_S)
            done, _ = await asyncio.wait({self._poll}, timeout=timeout_s)
            if not done:
                return None
            poll, self._poll = self._poll, None
            try:
                self._reports.extend(read_answer(poll.result(), self.reports))
            except RayError as error:
                raise self._remote.end(error) from error
        return self._reports.popleft() if self._reports else None

    async def close(self) -> None:
        try:
            await invoke(self._remote, CLOSE_S, EngineActor.close)
        finally:
            self.kill()

    def kill(self) -> None:
        if self._owned:
            self._remote.kill()


class RolloutActor(EngineActor):
    """One worker process; it is killed, never restarted."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[asyncio.Task[None]] = set()
        self._without_notices: asyncio.Future[str] = asyncio.Future()

    @served
    async def place(self) -> str:
        """Id of the node it was placed on; the first call to a new actor."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    @served
    async def start(
        self,
        plan: WorkerPlan,
        files: dict[str, bytes],
        lease: Lease,
        publishers: Sequence[Any],
        lane: LanePlan | None = None,
    ) -> None:
        """Create the engine; its weights come with the first `load`.

        Args:
            files: configuration and tokenizer of the model.
            publishers: the actors that own the published versions, one for each shard.
            lane: by which versions come instead; None: they are pulled.

        Raises:
            UserError: this node cannot run the configuration.
        """
        engine_compute, weights_compute = ComputeThread(), ComputeThread("tidemill-weights")
        spec = RunSpec.model_validate_json(plan.spec)
        watches = spec.guard.machines.action != "off"
        self._model_files = tempfile.TemporaryDirectory(prefix="tidemill-model-")  # deleted with the process
        folder = Path(self._model_files.name)
        for name, content in files.items():
            (folder / name).write_bytes(content)

        def opened() -> Opened:
            torch.set_num_threads(plan.threads)
            require_reserved_gpus(worker_process(spec).gpus, "ray.worker_gpus")
            check_memory(spec, "worker", folder=folder, note=lambda _: None, alone=False)
            return open_engine(spec, folder, prompt_tokens=plan.prompt_tokens, dtype=plan.dtype)

        engine, user = await engine_compute.run(opened)
        if lane is not None:
            device = user.device_type
            source: WeightSource = await open_lane(lane, user, engine_compute, device=device, dtype=plan.dtype)
        else:
            readers = await open_readers(spec.weights, publishers)
            new_puller = partial(
                open_puller,
                spec.weights,
                readers,
                weights_compute,
                session=plan.session,
                shares=plan.share_memory,
            )
            source = PulledWeights(new_puller(), user, base=new_puller() if spec.model.lora.enabled else None)
        self.worker = EngineWorker(
            engine,
            engine_compute,
            clock=LoopClock(),
            tick_s=spec.engine.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            heartbeat_s=spec.fleet.heartbeat_s,
            source=source,
            check=source if isinstance(source, PulledWeights) and watches else None,
            gpu=gpu_reader(_gpu_uuids(user.device_type) if watches else ()),
        )
        asyncio.get_running_loop().add_reader(signal_fd(), self._on_sigterm)
        self._start_task(self.exit_when_orphaned(plan.orphan_s))
        if plan.cloud_notices:
            notified = self.part("worker").notice
            watching = watch_cloud_notices(
                lambda notice: notified(notice.seconds_left), self._without_notices.set_result
            )
            self._start_task(watching)

    @served
    async def without_notices(self) -> str:
        """Why no cloud announces the end of this machine; empty if one does. Waits until it is known."""
        return await asyncio.shield(self._without_notices)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(coroutine))

    def _on_sigterm(self) -> None:
        os.read(signal_fd(), 64)
        self.part("worker").notice(SIGTERM_GRACE_S)


def _gpu_uuids(device_type: str) -> list[str]:
    """Of all GPUs that this worker computes on."""
    count = torch.cuda.device_count() if device_type == "cuda" else 0
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


PLACE_S = 15.0
"""Time within which Ray places a worker if a node has room for it."""


@dataclass(kw_only=True, eq=False)
class ActorHost:
    """Implements `core.protocols.WorkerHost` with one actor for each worker."""

    process: Processes  # one worker
    nodes: NodeWatch
    preemptible: dict[str, str]  # labels of the nodes for preemptible workers
    reserved: dict[str, str]  # labels of the nodes for other workers
    start_s: float  # deadline for starting a worker
    notify_drains: bool  # send notices to workers on draining nodes (if no provider does)

    def __post_init__(self) -> None:
        self._workers: dict[RayWorker, str] = {}  # node ids of started workers
        self._notifying = asyncio.create_task(self._notify_drains(), name="drains") if self.notify_drains else None

    async def start(self, lease: Lease) -> Worker:
        """Raises WorkerLost: no node has room for it, or it fails to start. The reserved engine raises TrainerLost."""
        selector = self.preemptible if lease.kind == "preemptible" else self.reserved
        node_id = lease.node

        def node_name() -> str:
            return self.nodes.name(node_id) if node_id else ""

        deadline_s = asyncio.get_running_loop().time() + self.start_s
        create = partial(self._create_actor, lease, selector)  # blocks if the cluster's head is gone
        handle = await blocking(create, awaited="Ray to create a worker's process", timeout_s=self.start_s)
        reserved = lease.kind == "reserved"
        lost = partial(trainer_lost, role="reserved engine") if reserved else WorkerLost
        remote = Remote(handle, lost=lost, node_name=node_name)
        worker = self._handle_of(remote, lease)
        try:
            node_id = await self._wait_for_place(remote, selector, deadline_s)
            self._workers[worker] = node_id
            left_s = deadline_s - asyncio.get_running_loop().time()
            await self._begin(remote, lease, left_s)
        except BaseException as error:
            self._workers.pop(worker, None)
            worker.kill()
            if isinstance(error, TidemillError) and not isinstance(error, WorkerLost) and not reserved:
                raise WorkerLost(f"it does not start: {error}") from error
            raise
        return worker

    async def close(self) -> None:
        if self._notifying is not None:
            self._notifying.cancel()
            await asyncio.gather(self._notifying, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _actor(self) -> type:
        """The class of the actors; its method `place` returns the id of its node."""
        raise NotImplementedError

    def _handle_of(self, remote: Remote, lease: Lease) -> RayWorker:
        raise NotImplementedError

    async def _begin(self, remote: Remote, lease: Lease, timeout_s: float) -> None:
        """Start the worker in its actor."""
        raise NotImplementedError

    def _create_actor(self, lease: Lease, selector: dict[str, str]) -> Any:
        node = NodeAffinitySchedulingStrategy(lease.node, soft=False) if lease.node else None
        place = {"label_selector": selector} if node is None else {"scheduling_strategy": node}
        resources = {"num_cpus": self.process.cpus, "num_gpus": self.process.gpus}
        return ray.remote(self._actor()).options(max_restarts=0, max_task_retries=0, **resources, **place).remote()

    async def _wait_for_place(self, remote: Remote, selector: dict[str, str], deadline_s: float) -> str:
        """The id of the node that Ray places the worker on.

        Raises:
            WorkerLost: no live node matches after `PLACE_S`, or none has room by the deadline (one may be joining).
        """
        calling = asyncio.ensure_future(invoke(remote, self.start_s, RolloutActor.place))
        try:
            done, _ = await asyncio.wait({calling}, timeout=min(PLACE_S, self.start_s))
            if not done and not self.nodes.fitting(selector):
                raise self._no_place(selector)
            left_s = deadline_s - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({calling}, timeout=max(0.0, left_s))
            if not done:
                raise self._no_place(selector)
            return calling.result()
        finally:
            calling.cancel()

    def _no_place(self, selector: dict[str, str]) -> WorkerLost:
        resources = {"CPU": self.process.cpus, "GPU": self.process.gpus}
        labels, wanted = resources_text(resources, selector)
        return WorkerLost(
            f"no node with label {labels} has {wanted or 'a place'}",
            hint="start nodes with `ray start --labels`, or change pool.selector or [ray]",
        )

    async def _notify_drains(self) -> None:
        notified: set[RayWorker] = set()
        while True:
            await self.nodes.changed(timeout_s=60.0)
            for worker, node_id in list(self._workers.items()):
                node = self.nodes.nodes.get(node_id)
                if worker not in notified and node is not None and node.drains_unix_s is not None:
                    notified.add(worker)
                    try:
                        await worker.notice(max(0.0, node.drains_unix_s - time.time()))
                    except TidemillError:
                        self._workers.pop(worker, None)  # it is gone already


@dataclass(kw_only=True, eq=False)
class RayHost(ActorHost):
    """Workers that generate."""

    plan: WorkerPlan
    files: Mapping[str, bytes]  # configuration and tokenizer of the model
    publishers: Sequence[Any]  # the actors that own the published versions, one for each shard
    warn: Callable[[str], None]
    lane: LanePlan | None = None  # brings versions to the reserved engine
    sender: Caller | None = None  # the trainer at the other end of the lane

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent_files = ray.put(dict(self.files))
        self._asking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await super().close()
        if self.plan.share_memory:
            await forget_snapshots(self.plan.session)

    def _actor(self) -> type:
        return RolloutActor

    def _handle_of(self, remote: Remote, lease: Lease) -> RayWorker:
        return RayWorker(remote, owned=True, sender=self.sender if lease.kind == "reserved" else None)

    async def _begin(self, remote: Remote, lease: Lease, timeout_s: float) -> None:
        lane, files = self.lane if lease.kind == "reserved" else None, self._sent_files
        await invoke(remote, timeout_s, RolloutActor.start, self.plan, files, lease, self.publishers, lane)
        if self.plan.cloud_notices and lease.kind == "preemptible" and self._asking is None:
            self._asking = asyncio.create_task(self._ask_for_notices(remote), name="cloud notices")

    async def _ask_for_notices(self, remote: Remote) -> None:
        """Report once in a run that no cloud announces evictions; a worker that is lost meanwhile is not replaced."""
        with suppress(TidemillError):
            if why := await invoke(remote, DETECTED_S, RolloutActor.without_notices):
                self.warn(f"evictions are announced by draining nodes only: {why}")
