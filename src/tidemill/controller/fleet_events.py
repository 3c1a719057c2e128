"""What the event log says of the fleet: one method per thing that happens to a worker.

What a step's metrics say of the same things is counted here too, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tidemill.controller.samples import Sample
from tidemill.controller.waiting import LeaseOutcome
from tidemill.controller.worker_state import WorkerState
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import Loaded
from tidemill.telemetry.events import (
    CRASH,
    DECODE,
    DRAIN,
    EVICTION,
    JOIN_FAILED,
    LEASE,
    LEASE_END,
    MIGRATION,
    NOTICE,
    PULL,
    QUARANTINE,
    REBALANCE,
    WORKER_RELEASED,
)

_ROUND = 6


@dataclass(slots=True)
class FleetCounters:
    """What happened to the fleet since the last metrics line, whatever was being generated; keys of docs/metrics.md."""

    evictions: int = 0
    crashes: int = 0  # workers that raised
    migrations: int = 0  # samples
    tokens_lost: int = 0  # estimated


class FleetEventLog:
    """Writes events, and counts what a step's metrics say of them."""

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        self._telemetry, self._clock = telemetry, clock
        self._workers: dict[str, str] = {}  # by lease, the ended ones too: their samples go on later
        self.happened = FleetCounters()

    def take_figures(self) -> dict[str, float]:
        """What happened since the last call."""
        happened, self.happened = self.happened, FleetCounters()
        return {name: float(count) for name, count in asdict(happened).items()}

    def knows(self, lease_id: str) -> bool:
        """Whether the lease began, be it over or not."""
        return lease_id in self._workers

    def granted(self, member: WorkerState) -> None:
        lease = member.lease
        self._workers[lease.lease_id] = lease.worker_id
        self._tell(LEASE, member, kind=lease.kind, price_usd_per_hour=lease.price_usd_per_hour)

    def join_failed(self, member: WorkerState, cause: str) -> None:
        self._tell(JOIN_FAILED, member, cause=cause)

    def pulled(self, member: WorkerState, loaded: Loaded, duration_s: float) -> None:
        self._tell(
            PULL,
            member,
            version=loaded.version.number,
            nbytes=loaded.nbytes,
            full=loaded.full,
            duration_s=round(duration_s, _ROUND),
            swap_s=round(loaded.swap_s, _ROUND),
            retries=loaded.retries,
        )

    def quarantined(self, member: WorkerState, difference: float, limit: float) -> None:
        # JSON has no infinity: a worker that says no numbers at all differs by the largest one.
        self._tell(QUARANTINE, member, difference=min(difference, 1e9), limit=limit)

    def noticed(self, member: WorkerState, grace_s: float, cause: str) -> None:
        self._tell(NOTICE, member, grace_s=round(grace_s, 3), cause=cause)

    def asked_back(self, member: WorkerState, samples: int) -> None:
        """It is about to go; what of its samples really comes back is told when they go on elsewhere."""
        self._tell(DRAIN, member, samples=samples)

    def migrated(self, source: str, target: WorkerState, samples: Sequence[Sample]) -> None:
        """Samples that the lease `source` had go on at another worker, from the tokens they have."""
        self.happened.migrations += len(samples)
        self._telemetry.event(
            MIGRATION,
            lease=source,
            worker=self._workers.get(source, source),
            to_worker=target.lease.worker_id,
            samples=len(samples),
            tokens_kept=sum(sample.length for sample in samples),
        )

    def busy(self, member: WorkerState, samples: int, *, step: int, purpose: str) -> None:
        """It was given samples."""
        if member.busy_since_s is None:
            member.busy_since_s, member.busy_tokens, member.busy_samples = self._clock.now(), 0, 0
            member.busy_step, member.busy_purpose = step, purpose
        member.busy_samples += samples

    def idle(self, member: WorkerState) -> None:
        """It has no samples left, or they are taken from it."""
        if member.busy_since_s is None:
            return
        member.idle_since_s = self._clock.now()
        self._tell(
            DECODE,
            member,
            kind=member.lease.kind,
            step=member.busy_step,
            purpose=member.busy_purpose,
            tokens=member.busy_tokens,
            samples=member.busy_samples,
            work=member.work.take(),
            duration_s=round(member.idle_since_s - member.busy_since_s, _ROUND),
        )
        member.busy_since_s = None

    def rebalanced(self, source: WorkerState, target: WorkerState, samples: int) -> None:
        self._telemetry.event(
            REBALANCE, from_worker=source.lease.worker_id, to_worker=target.lease.worker_id, samples=samples
        )

    def vacated(self, member: WorkerState, samples: int) -> None:
        """The last samples of a batch are gathered on others."""
        self._tell(WORKER_RELEASED, member, samples=samples)

    def ended(self, ended: LeaseOutcome, samples: Sequence[Sample]) -> None:
        """A worker that served is gone: evicted, or it crashed. One that was given back is only told of as such."""
        if not (ended.evicted or ended.crashed):
            return
        lost = ended.tokens_lost if samples else 0
        self.happened.evictions += ended.evicted
        self.happened.crashes += ended.crashed
        self.happened.tokens_lost += lost
        self._telemetry.event(
            EVICTION if ended.evicted else CRASH,
            lease=ended.lease_id,
            worker=ended.worker_id,
            cause=ended.cause,
            noticed=ended.noticed,
            samples=len(samples),
            tokens_kept=sum(sample.length for sample in samples),
            tokens_lost=lost,
        )

    def lease_ended(self, member: WorkerState, cause: str, *, evicted: bool) -> None:
        now_s, lease = self._clock.now(), member.lease
        self._tell(
            LEASE_END,
            member,
            kind=lease.kind,
            cause=cause,
            evicted=evicted,
            held_s=round(now_s - lease.start_s, 3),
            cost_usd=round(member.cost_usd(now_s), 9),
            tokens=member.tokens,
        )

    def _tell(self, name: str, member: WorkerState, **fields: object) -> None:
        self._telemetry.event(name, lease=member.lease.lease_id, worker=member.lease.worker_id, **fields)
