"""Starts workers as actors on the nodes they may run on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill.config.pool import RayConfig
from tidemill.core.errors import TidemillError, WorkerLost
from tidemill.core.protocols import Worker
from tidemill.core.records import Lease
from tidemill.runtime.cluster.blocking import blocking
from tidemill.runtime.cluster.nodes import NodeWatch
from tidemill.runtime.cluster.plan import WorkerPlan
from tidemill.runtime.cluster.remote import Remote
from tidemill.runtime.cluster.rollout_actor import RolloutActor
from tidemill.runtime.cluster.wire import encode
from tidemill.runtime.cluster.worker import RayWorker

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
            cure="start nodes with `ray start --labels`, or change pool.selector or [ray]",
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


def lost(cause: str, cure: str) -> WorkerLost:
    return WorkerLost(cause, cure=cure)
