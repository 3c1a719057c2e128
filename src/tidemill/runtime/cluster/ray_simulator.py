"""Simulators as actors on nodes that may be taken away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tidemill.config.pool import RayPool
from tidemill.config.processes import worker_process
from tidemill.config.schema import RunSpec
from tidemill.controller.chunks import WeightBlobs
from tidemill.core.chunks import ChunkJob, ChunkReport
from tidemill.core.protocols import Clock, Provider, WorkerHost
from tidemill.core.records import Lease, Loaded, PolicyVersion
from tidemill.robots.program import Beginning
from tidemill.robots.setup import SimulationSetup
from tidemill.runtime.backend import scheduled_provider, session_number
from tidemill.runtime.cluster.connection import connected, reserved_selector, selector_of
from tidemill.runtime.cluster.ray_backend import RayProvider
from tidemill.runtime.cluster.ray_calls import Remote
from tidemill.runtime.cluster.ray_worker import CALL_S, ActorHost, RayWorker
from tidemill.runtime.cluster.simulator_actor import SimulatorActor
from tidemill.runtime.cluster.wire import invoke
from tidemill.runtime.simulators import Note, SentWeights
from tidemill.telemetry.run_dir import RunDirectory

OBJECT_BYTES = 1 << 26
"""What the object stores of a local cluster have room for, four times: weights and answers on their way."""


class RaySimulator(RayWorker):
    """Implements `core.chunks.Simulator` with a `SimulatorActor`."""

    reports = list[ChunkReport]

    def __init__(self, remote: Remote, weights: SentWeights) -> None:
        super().__init__(remote, owned=True)
        self._weights = weights

    async def load(self, version: PolicyVersion) -> Loaded:
        return Loaded(version=version, nbytes=await self._send(version.number, again=True))

    async def submit(self, job: ChunkJob) -> None:  # type: ignore[override]
        await self._send(job.version)
        await invoke(self._remote, CALL_S, SimulatorActor.submit, job)

    async def close(self) -> None:
        self.kill()

    async def _send(self, number: int, *, again: bool = False) -> int:
        """Send weights that it lacks; returns their bytes."""
        sent = self._weights.missing(number, again=again)
        for weights in sent:
            await invoke(self._remote, CALL_S, SimulatorActor.take_weights, weights)
        return sum(len(weights.blob) for weights in sent)


@dataclass(kw_only=True, eq=False)
class RaySimulatorHost(ActorHost):
    setups: tuple[SimulationSetup, ...]
    blobs: WeightBlobs
    heartbeat_s: float

    def _actor(self) -> type:
        return SimulatorActor

    def _handle_of(self, remote: Remote, lease: Lease) -> RayWorker:
        return RaySimulator(remote, SentWeights(self.blobs))

    async def _begin(self, remote: Remote, lease: Lease, timeout_s: float) -> None:
        names = {"lease_id": lease.lease_id, "worker_id": lease.worker_id}
        beginning = Beginning(setups=self.setups, heartbeat_s=self.heartbeat_s, **names)
        await invoke(remote, timeout_s, SimulatorActor.start, beginning)


@asynccontextmanager
async def simulators_on_ray(
    spec: RunSpec,
    setups: Sequence[SimulationSetup],
    blobs: WeightBlobs,
    *,
    run: RunDirectory | None,
    clock: Clock,
    log: Note,
) -> AsyncIterator[tuple[Provider | None, WorkerHost]]:
    """The provider and host of simulators on a cluster, which is started here if the run has none.

    Raises:
        UserError: the pool or the cluster cannot be used.
    """
    provider: Provider | None = scheduled_provider(spec, run, clock, log=log)
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(connected(spec, model_bytes=OBJECT_BYTES, log=log))
        selector = selector_of(spec.pool)
        places: dict[str, Any] = {"preemptible": selector, "reserved": reserved_selector(spec.ray, selector)}
        host = RaySimulatorHost(
            process=worker_process(spec),
            nodes=nodes,
            start_s=spec.fleet.join_timeout_s,
            notify_drains=provider is not None,
            setups=tuple(setups),
            blobs=blobs,
            heartbeat_s=spec.fleet.heartbeat_s,
            **places,
        )
        stack.push_async_callback(host.close)
        if isinstance(spec.pool, RayPool):
            price = spec.fleet.preemptible_usd_per_hour
            session = session_number(run)
            provider = RayProvider(
                spec.pool, worker_process(spec), nodes, clock=clock, session=session, price_usd_per_hour=price
            )
            stack.push_async_callback(provider.close)
        yield provider, host
