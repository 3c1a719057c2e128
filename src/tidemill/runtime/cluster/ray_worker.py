"""Rollout workers as actors on nodes that may vanish."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill.config.pool import RayConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, WorkerLost
from tidemill.core.protocols import LoopClock, Worker
from tidemill.core.records import GenerateRequest, Lease, Loaded, PolicyVersion, SampleId, WorkerReport
from tidemill.models.codec import load_codec
from tidemill.models.snapshots import DTYPES, uninitialized_model
from tidemill.pool.notices import Notice
from tidemill.rollout.pulled import PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.actors import SIGTERM_GRACE_S, Serving, asked, signals, tell_notices
from tidemill.runtime.cluster.nodes import NodeWatch
from tidemill.runtime.cluster.ray_calls import Remote, blocking
from tidemill.runtime.cluster.wire import ObjectStoreReader, WorkerPlan, decode, encode, read_answer
from tidemill.runtime.compute import ComputeThread, choose_device, require_reserved_gpus
from tidemill.runtime.local import NOTHING_YET
from tidemill.runtime.model_bundle import FrozenModels, ModelBundle
from tidemill.weights.puller import Puller

CALL_S = 60.0
LOAD_S = 600.0
CLOSE_S = 30.0
POLL_S = 5.0
"""How long the actor holds a poll open when it has nothing to say."""


class RayWorker:
    """Implements `core.protocols.Worker` over an actor that is a `Serving`.

    One poll is always under way, whoever waits for it and for how long: nothing that the worker reported is lost when
    a wait ends early, and a worker that is silent is asked once.

    Args:
        owned: the actor is this worker's alone and ends with it; otherwise it serves others too and stays.
    """

    def __init__(self, remote: Remote, *, owned: bool) -> None:
        self._remote, self._owned = remote, owned
        self._reports: deque[WorkerReport] = deque()
        self._poll: asyncio.Future[bytes] | None = None

    @property
    def actor_id(self) -> str:
        """By which Ray knows it."""
        name: str = self._remote.handle._actor_id.hex()
        return name

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        await self._remote.call("submit", encode(requests), kind=type(None), timeout_s=CALL_S)

    async def abort(self, sample_ids: Sequence[SampleId]) -> None:
        await self._remote.call("abort", encode(sample_ids), kind=type(None), timeout_s=CALL_S)

    async def load(self, version: PolicyVersion) -> Loaded:
        return await self._remote.call("load", encode(version), kind=Loaded, timeout_s=LOAD_S)

    async def notice(self, seconds: float) -> None:
        """Its machine goes in so many seconds: its next report says so."""
        await self._remote.call("notice", seconds, kind=type(None), timeout_s=CALL_S)

    async def next_report(self, timeout_s: float) -> WorkerReport | None:
        if not self._reports:
            if self._poll is None:
                self._poll = self._remote.ask("next_reports", POLL_S)
            done, _ = await asyncio.wait({self._poll}, timeout=timeout_s)
            if not done:
                return None
            poll, self._poll = self._poll, None
            try:
                self._reports.extend(read_answer(poll.result(), list[WorkerReport]))
            except RayError as error:
                raise self._remote.end(error) from error
        return self._reports.popleft() if self._reports else None

    async def close(self) -> None:
        try:
            await self._remote.call("close", kind=type(None), timeout_s=CLOSE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        if self._owned:
            self._remote.kill()


class RolloutActor(Serving):
    """One process of it is one worker; it is killed, never restarted."""

    @asked
    async def place(self) -> str:
        """The node it was put on: the first thing it says."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    @asked
    async def start(self, plan: bytes, files: dict[str, bytes], lease: bytes, publisher: Any) -> None:
        """Make the engine; its weights come with the first `load`.

        Args:
            files: configuration and tokenizer of the model.
            publisher: an actor whose `blob` knows the published versions.

        Raises:
            UserError: this node cannot do what the configuration asks for.
        """
        planned, leased = decode(plan, WorkerPlan), decode(lease, Lease)
        engine_compute, weights_compute = ComputeThread(), ComputeThread("tidemill-weights")
        bundle = await engine_compute.run(lambda: _bundle(planned, files))
        reader = ObjectStoreReader(publisher)
        puller, base = (Puller(reader, weights_compute, clock=LoopClock()) for _ in range(2))
        self.worker = EngineWorker(
            bundle.engine_over(bundle.model, NOTHING_YET, prompt_tokens=planned.prompt_tokens),
            engine_compute,
            clock=LoopClock(),
            tick_s=bundle.spec.engine.tick_s,
            worker_id=leased.worker_id,
            lease_id=leased.lease_id,
            heartbeat_s=bundle.spec.fleet.heartbeat_s,
            source=PulledWeights(puller, bundle.model, base=base if bundle.spec.model.lora.enabled else None),
        )
        asyncio.get_running_loop().add_reader(signals(), self._on_signal)
        self._keep(self._end_when_forgotten(planned.orphan_s))
        if planned.cloud_notices:
            self._keep(tell_notices(self._on_notice, sigterm_grace_s=None))

    def _keep(self, job: Any) -> None:
        self.tasks.add(asyncio.create_task(job))

    def _on_signal(self) -> None:
        os.read(signals(), 64)
        self.served().notice(SIGTERM_GRACE_S)

    def _on_notice(self, notice: Notice) -> None:
        self.served().notice(notice.seconds_left)

    async def _end_when_forgotten(self, orphan_s: float) -> None:
        """Without a controller there is nothing to do; a machine that woke from a long sleep has been replaced."""
        while self.forgotten_s < orphan_s:  # noqa: ASYNC110 - what is waited for is that nothing happens
            await asyncio.sleep(orphan_s / 4)
        os._exit(0)


def _bundle(plan: WorkerPlan, files: dict[str, bytes]) -> ModelBundle:
    """As the trainer's, but for the weights."""
    spec = RunSpec.model_validate_json(plan.spec)
    torch.set_num_threads(plan.threads)
    require_reserved_gpus(spec.ray.worker_gpus, "ray.worker_gpus")
    device = choose_device(spec.trainer)
    with tempfile.TemporaryDirectory(prefix="tidemill-model-") as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        model = uninitialized_model(folder, spec.model, device=device, dtype=DTYPES[plan.dtype])
        return ModelBundle(
            spec=spec,
            folder=folder,
            model=model,
            rollout_model=model,
            frozen=FrozenModels(device),
            codec=load_codec(folder),
            device=device,
            autocast=None,
            threads=plan.threads,
        )


PLACE_S = 15.0
"""A node that could ever take the worker has been found by then, and its process begun."""


class RayHost:
    """Implements `core.protocols.WorkerHost`.

    Args:
        files: configuration and tokenizer of the model.
        publisher: the actor whose `blob` knows the published versions.
        preemptible: labels of the nodes that preemptible workers may run on.
        reserved: labels of the nodes of the others.
        start_s: longest start of a worker.
        tells_drains: warn workers whose node is drained (where no provider does).
    """

    def __init__(
        self,
        plan: WorkerPlan,
        config: RayConfig,
        nodes: NodeWatch,
        *,
        files: Mapping[str, bytes],
        publisher: Any,
        preemptible: dict[str, str],
        reserved: dict[str, str],
        start_s: float,
        tells_drains: bool,
    ) -> None:
        self._plan, self._config, self._nodes = encode(plan), config, nodes
        self._files, self._publisher = ray.put(dict(files)), publisher
        self._preemptible, self._reserved, self._start_s = preemptible, reserved, start_s
        self._workers: dict[RayWorker, str] = {}  # started, with their nodes
        self._telling = asyncio.create_task(self._tell_drains(), name="drains") if tells_drains else None

    async def start(self, lease: Lease) -> Worker:
        """Raises WorkerLost: no node takes it, or it does not come up there."""
        selector = self._preemptible if lease.kind == "preemptible" else self._reserved
        node_id = lease.node

        def where() -> str:
            return self._nodes.name(node_id) if node_id else ""

        deadline_s = asyncio.get_running_loop().time() + self._start_s
        making = partial(self._actor, lease, selector)  # asks the cluster's head, which may be gone
        handle = await blocking(making, awaited="a worker's process to be asked for", timeout_s=self._start_s)
        remote = Remote(handle, gone=lost, where=where)
        worker = RayWorker(remote, owned=True)
        try:
            node_id = await self._placed(remote, selector, deadline_s)
            self._workers[worker] = node_id
            left_s = deadline_s - asyncio.get_running_loop().time()
            await remote.call(
                "start", self._plan, self._files, encode(lease), self._publisher, kind=type(None), timeout_s=left_s
            )
        except BaseException as error:
            self._workers.pop(worker, None)
            worker.kill()
            if isinstance(error, TidemillError) and not isinstance(error, WorkerLost):
                raise WorkerLost(f"it does not start: {error}") from error
            raise
        return worker

    async def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _actor(self, lease: Lease, selector: dict[str, str]) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self._config.worker_cpus,
            "num_gpus": self._config.worker_gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if lease.node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(lease.node, soft=False)
        else:
            options["label_selector"] = selector
        return ray.remote(RolloutActor).options(**options).remote()

    async def _placed(self, remote: Remote, selector: dict[str, str], deadline_s: float) -> str:
        """The node it is on, once it is on one. A node may still be on its way, so only a plain impossibility is
        final before the deadline."""
        calling = asyncio.ensure_future(remote.call("place", kind=str, timeout_s=self._start_s))
        try:
            done, _ = await asyncio.wait({calling}, timeout=min(PLACE_S, self._start_s))
            if not done and not self._nodes.fitting(selector):
                raise self._no_place(selector)
            left_s = deadline_s - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({calling}, timeout=max(0.0, left_s))
            if not done:
                raise self._no_place(selector)
            return calling.result()
        finally:
            calling.cancel()

    def _no_place(self, selector: dict[str, str]) -> WorkerLost:
        labels = " and ".join(f"{key}={value}" for key, value in selector.items()) or "any label"
        cpus, gpus = self._config.worker_cpus, self._config.worker_gpus
        wanted = " and ".join(f"{count:g} free {kind}" for count, kind in ((cpus, "CPU"), (gpus, "GPU")) if count)
        return WorkerLost(
            f"no node with label {labels} has {wanted or 'a place'}",
            hint="start nodes with `ray start --labels`, or change pool.selector or [ray]",
        )

    async def _tell_drains(self) -> None:
        told: set[RayWorker] = set()
        while True:
            await self._nodes.changed(timeout_s=60.0)
            for worker, node_id in list(self._workers.items()):
                node = self._nodes.nodes.get(node_id)
                if worker not in told and node is not None and node.drains_unix_s is not None:
                    told.add(worker)
                    try:
                        await worker.notice(max(0.0, node.drains_unix_s - time.time()))
                    except TidemillError:
                        self._workers.pop(worker, None)  # it is gone already


def lost(cause: str, hint: str) -> WorkerLost:
    return WorkerLost(cause, hint=hint)
