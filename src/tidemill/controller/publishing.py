"""Publishing new weights: the local worker loads them at once, the others pull them when they can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tidemill.controller.in_flight import LOCAL
from tidemill.controller.waiting import Timeouts, Wait, wait_with_deadline
from tidemill.controller.worker_state import FleetEventLog, WorkerCommand, WorkerState, probe_difference
from tidemill.core.errors import UserError, WeightsError, WorkerLost
from tidemill.core.protocols import Clock, MachineGuard, Publisher, Telemetry, Worker
from tidemill.core.records import Loaded, PolicyVersion, WeightManifest
from tidemill.telemetry.events import PUBLISH, QUARANTINE, span

T = TypeVar("T")


class Quarantined(WorkerLost):
    """A worker's logprobs of the probe differ from the trainer's."""


class LogprobsMissing(UserError):
    """The engine returns no logprobs, and the algorithm needs them; ends the run, whichever worker it is."""


@dataclass(kw_only=True, eq=False)
class Publishing:
    """Publishes versions and tracks which worker has which."""

    publisher: Publisher | None  # makes weights available to preemptible workers; None without any
    workers: Mapping[str, WorkerState]  # the current ones by lease, a live view
    needs_logprobs: Sequence[str]  # settings that need logprobs of sampled tokens; an engine without them is refused
    probe_tolerance: float  # greatest accepted difference from the publisher's logprobs of the probe, in nats
    event_log: FleetEventLog
    clock: Clock
    telemetry: Telemetry
    timeouts: Timeouts
    on_ready: Callable[[], None]  # called when a worker has loaded a version and may take its samples
    machines: MachineGuard | None = None
    version: PolicyVersion | None = field(default=None, init=False)  # the newest
    manifest: WeightManifest | None = field(default=None, init=False)
    first_published: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def publish(self, version: PolicyVersion, *, finishing: Callable[[], Collection[str]] = tuple) -> None:
        """Publish the trainer's weights, and let every worker load them.

        Args:
            finishing: returns the leases whose workers first finish their samples under the older weights. Called when
                the version is available, because a worker that became idle before would never load it.
        """
        with span(self.telemetry, self.clock, PUBLISH, version=version.number, digest=version.digest) as fields:
            if self.publisher is not None:
                manifest = await self.wait_for(
                    self.publisher.publish(version), f"version {version.number} to be published", "the weights' store"
                )
                fields["nbytes"] = manifest.nbytes
                if manifest.delta is not None:
                    fields["delta_nbytes"] = manifest.delta.nbytes
                self.manifest = manifest
                self.first_published.set()
                leases = finishing()
                for worker in self.workers.values():
                    if worker.preemptible and worker.joined:
                        worker.load_when_idle = True
                        if worker.lease.lease_id not in leases:
                            self.queue_load(worker)
            self.version = version
            local = self.workers.get(LOCAL)
            if local is None or local.handle is None:
                return
            if LOCAL in finishing():
                local.load_when_idle = True
            else:
                await self.wait_for(
                    self._load_local(local, local.handle),
                    f"the worker to load version {version.number}",
                    "the worker and its engine",
                )

    def queue_load(self, worker: WorkerState) -> None:
        """Let a worker load the newest version after the commands it already has."""
        worker.load_when_idle = False
        load = self._load_local if worker.lease.lease_id == LOCAL else self.catch_up
        worker.commands.put_nowait(WorkerCommand(partial(load, worker), "take weights"))

    async def catch_up(self, worker: WorkerState, handle: Worker) -> None:
        """Pull the newest version, repeatedly if newer ones are published meanwhile; waits for the first publish.

        Raises:
            Quarantined: the worker's logprobs of the probe differ from the publisher's.
            LogprobsMissing: its engine returns no logprobs.
        """
        await self.first_published.wait()
        while self.manifest is not None and worker.version != self.manifest.version:
            manifest, started_s = self.manifest, self.clock.now()
            try:
                loaded = await handle.load(manifest.version)
            except WeightsError:
                if self.manifest is manifest:
                    raise
                continue  # the version may have been deleted when newer ones were published
            self._check_logprobs(loaded)
            worker.reported_s = self.clock.now()
            self.event_log.pulled(worker, loaded, worker.reported_s - started_s)
            self._check_probe(worker, loaded, manifest)
            worker.version = loaded.version
            if self.machines is not None:
                self.machines.loaded(worker.lease, loaded, self.clock.now())
        self.on_ready()

    def queue_probe(self, worker: WorkerState) -> None:
        """Let a worker compute the probe after the commands it already has; `machines` judges it."""
        worker.commands.put_nowait(WorkerCommand(partial(self._probe, worker), "compute the probe"))

    async def _probe(self, worker: WorkerState, handle: Worker) -> None:
        manifest = self.manifest
        if self.machines is None or manifest is None or not manifest.probe_ids or worker.version != manifest.version:
            return
        computed = Loaded(version=manifest.version, probe_logprobs=await handle.run_probe(manifest.probe_ids))
        limit = self.probe_tolerance + manifest.probe_slack
        self.machines.probed(worker.lease, probe_difference(computed, manifest), limit, self.clock.now())

    async def _load_local(self, worker: WorkerState, handle: Worker) -> None:
        assert self.version is not None, "nothing was published"
        loaded = await handle.load(self.version)
        self._check_logprobs(loaded)
        if self.manifest is not None and loaded.probe_logprobs:  # an engine over the trainer's parameters has none
            try:
                self._check_probe(worker, loaded, self.manifest)
            except Quarantined as error:
                raise WeightsError(
                    f"the reserved engine does not compute with the trainer's weights: {error}"
                ) from error
        worker.version = loaded.version
        self.on_ready()

    def _check_probe(self, worker: WorkerState, loaded: Loaded, manifest: WeightManifest) -> None:
        """Raises Quarantined."""
        difference, limit = probe_difference(loaded, manifest), self.probe_tolerance + manifest.probe_slack
        if difference > limit:
            # JSON has no infinity.
            self.event_log.log(QUARANTINE, worker, difference=min(difference, 1e9), limit=limit)
            if self.machines is not None and worker.preemptible:
                self.machines.probed(worker.lease, difference, limit, self.clock.now())
            raise Quarantined(
                f"logprobs of the probe differ from the trainer's by {difference:.3g} nats on average; limit "
                f"{limit:.3g}"
            )

    def _check_logprobs(self, loaded: Loaded) -> None:
        if self.needs_logprobs and not loaded.rollout_logprobs:
            raise LogprobsMissing(
                f"the engine returns no logprobs of sampled tokens, which {self.needs_logprobs[0]} needs",
                where="algorithm",
                hint='use an engine that returns logprobs, or set algorithm.correction.kind = "none", '
                'algorithm.proximal = "recomputed" and algorithm.kl_in = "loss"',
            )

    async def wait_for(self, call: Coroutine[Any, Any, T], awaited: str, look_at: str) -> T:
        """Await the publisher or a worker, with "waiting" events and the deadline of loading weights."""
        wait = Wait(awaited=awaited, look_at=look_at, deadline_s=self.timeouts.load_s)
        return await wait_with_deadline(
            call, wait, notice_s=self.timeouts.notice_s, telemetry=self.telemetry, clock=self.clock
        )
