"""New weights for every worker: the local engine is waited for, the others pull in their own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tidemill.controller.fleet_events import FleetEventLog
from tidemill.controller.in_flight import LOCAL
from tidemill.controller.waiting import Timeouts, Wait, wait_with_deadline
from tidemill.controller.worker_state import WorkerCommand, WorkerPhase, WorkerState, probe_difference
from tidemill.core.errors import UserError, WeightsError, WorkerLost
from tidemill.core.protocols import Clock, Publisher, Telemetry, Worker
from tidemill.core.records import Loaded, PolicyVersion, WeightManifest
from tidemill.telemetry.events import PUBLISH, span

T = TypeVar("T")


class Quarantined(WorkerLost):
    """A worker computes something else than the trainer."""


class LogprobsMissing(UserError):
    """An engine does not return what the algorithm needs of it: a fault of the run, whichever worker it is."""


PROBE_TOLERANCE = 0.1
"""Maximum mean difference between a worker's and the publisher's logprobs of the probe, in nats."""


class Publishing:
    """What was published last, and who has it.

    Args:
        publisher: gives weights to workers elsewhere; None where there are none.
        members: the workers there are, by lease; read at every publish.
        needs_logprobs: settings that need the logprobs of sampled tokens; an engine that returns none is refused then.
        news: called when a worker can take samples of a version that it could not before.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        members: Mapping[str, WorkerState],
        *,
        needs_logprobs: Sequence[str],
        event_log: FleetEventLog,
        clock: Clock,
        telemetry: Telemetry,
        timeouts: Timeouts,
        news: Callable[[], None],
    ) -> None:
        self._publisher, self._members = publisher, members
        self._event_log, self._clock, self._telemetry, self._timeouts = event_log, clock, telemetry, timeouts
        self._news, self._needs_logprobs = news, needs_logprobs
        self._version: PolicyVersion | None = None  # the newest
        self._manifest: WeightManifest | None = None
        self._published = asyncio.Event()

    async def publish(self, version: PolicyVersion, *, finishing: Callable[[], Collection[str]] = tuple) -> None:
        """Make the trainer's weights everybody's.

        Args:
            finishing: asks which leases' workers first finish what they have, and load when they are noted as idle;
                asked when they are told, for who finishes before that is noted as idle in vain.
        """
        with span(self._telemetry, self._clock, PUBLISH, version=version.number, digest=version.digest) as fields:
            if self._publisher is not None:
                wait = self._wait(f"version {version.number} to be published", "the weights' store")
                manifest = await self._patiently(self._publisher.publish(version), wait)
                fields |= _sizes(manifest)
                self._announce(manifest, finishing())
            self._version = version
            local = self._members.get(LOCAL)
            if local is None or local.worker is None:
                return
            if LOCAL in finishing():
                local.behind = True
            else:
                wait = self._wait(f"the worker to load version {version.number}", "the worker and its engine")
                await self._patiently(self._load_local(local, local.worker), wait)

    def let_load(self, member: WorkerState) -> None:
        """Tell a worker that is behind to catch up, after what it was told before."""
        member.behind = False
        load = self._load_local if member.lease.lease_id == LOCAL else self.catch_up
        member.orders.put_nowait(WorkerCommand(partial(load, member), "take weights"))

    async def catch_up(self, member: WorkerState, worker: Worker) -> None:
        """Pull the newest version, and again if a newer one was published meanwhile; waits for the first one.

        Raises:
            Quarantined: what the worker then computes is not what the publisher computes.
            LogprobsMissing: its engine cannot be used in this run.
        """
        await self._published.wait()
        while self._manifest is not None and member.version != self._manifest.version:
            manifest, began_s = self._manifest, self._clock.now()
            try:
                loaded = await worker.load(manifest.version)
            except WeightsError:
                if self._manifest is manifest:
                    raise
                continue  # newer ones came meanwhile, and those it was pulling may be gone
            self._check_logprobs(loaded)
            member.heard_s = self._clock.now()
            self._event_log.pulled(member, loaded, member.heard_s - began_s)
            difference = probe_difference(loaded, manifest)
            if difference > PROBE_TOLERANCE:
                self._event_log.quarantined(member, difference, PROBE_TOLERANCE)
                raise Quarantined(f"its logprobs of the probe are {difference:.3g} nats from the trainer's on average")
            member.version = loaded.version
        self._news()

    def _announce(self, manifest: WeightManifest, finishing: Collection[str]) -> None:
        self._manifest = manifest
        self._published.set()
        for member in self._members.values():
            if member.preemptible and member.state in (WorkerPhase.SERVING, WorkerPhase.LEAVING):
                member.behind = True
                if member.lease.lease_id not in finishing:
                    self.let_load(member)

    async def _load_local(self, member: WorkerState, worker: Worker) -> None:
        assert self._version is not None, "nothing was published"
        loaded = await worker.load(self._version)
        self._check_logprobs(loaded)
        member.version = loaded.version
        self._news()

    def _check_logprobs(self, loaded: Loaded) -> None:
        if self._needs_logprobs and not loaded.rollout_logprobs:
            raise LogprobsMissing(
                f"the engine returns no logprobs of the tokens it samples, and {self._needs_logprobs[0]} needs them",
                where="algorithm",
                hint='take an engine that does, or set algorithm.correction.kind = "none", algorithm.proximal = '
                '"recomputed" and algorithm.kl_in = "loss"',
            )

    def _wait(self, awaited: str, look_at: str) -> Wait:
        return Wait(awaited=awaited, look_at=look_at, deadline_s=self._timeouts.load_s)

    async def _patiently(self, call: Coroutine[Any, Any, T], wait: Wait) -> T:
        return await wait_with_deadline(
            call, wait, notice_s=self._timeouts.notice_s, telemetry=self._telemetry, clock=self._clock
        )


def _sizes(manifest: WeightManifest) -> dict[str, int]:
    """What the event log says of a published version."""
    sizes = {"nbytes": manifest.nbytes}
    return sizes if manifest.delta is None else sizes | {"delta_nbytes": manifest.delta.nbytes}
