"""State of one worker, and the events and counters of the fleet."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from msgspec.structs import fields

from tidemill.controller.samples import Sample
from tidemill.controller.waiting import LeaseOutcome
from tidemill.core.protocols import Clock, Telemetry, Worker
from tidemill.core.records import (
    EngineWork,
    FleetRow,
    Lease,
    Loaded,
    PolicyVersion,
    WeightManifest,
    WorkerStatus,
    unpack_logprobs,
)
from tidemill.telemetry.events import (
    CRASH,
    DECODE,
    EVICTION,
    HAND_BACK,
    JOIN_FAILED,
    LEASE,
    LEASE_END,
    MIGRATION,
    NOTICE,
    PULL,
    QUARANTINE,
    REBALANCE,
    VACATED,
)

NAMES = tuple(field.name for field in fields(EngineWork))
_COUNTS: Callable[[EngineWork], tuple[float, ...]] = attrgetter(*NAMES)
_ROUND = 6


class WorkBySize:
    """Sums over a worker's reports: a row for each octave of samples drawn from in a pass, so that what a pass takes
    can be told from what a sample takes."""

    def __init__(self) -> None:
        self._seen = EngineWork()  # an engine counts from when it started
        self._rows: dict[int, tuple[float, ...]] = {}

    def observe(self, work: EngineWork) -> None:
        """The worker's next report."""
        before, self._seen = self._seen, work
        if (passes := work.passes - before.passes) > 0:
            size = math.floor(math.log2(max(1.0, (work.drawn - before.drawn) / passes)))
            row = self._rows.get(size, (0.0,) * len(NAMES))
            self._rows[size] = tuple(
                sum_ + now - then for sum_, now, then in zip(row, _COUNTS(work), _COUNTS(before), strict=True)
            )

    def take(self) -> list[dict[str, float]]:
        """The rows since the last call, sizes rising; keys as of `EngineWork`."""
        rows, self._rows = self._rows, {}
        return [
            {name: round(value, _ROUND) for name, value in zip(NAMES, row, strict=True)}
            for _, row in sorted(rows.items())
        ]


class WorkerPhase(enum.Enum):
    """Where a worker stands; the names are shown to people."""

    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    LEAVING = "leaving"  # warned: it takes no new samples
    GONE = "gone"  # the fleet has forgotten it


SERVING = WorkerPhase.SERVING
"""For whoever looks at all members: before Python 3.12 naming a state costs more than the rest of the look."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """One call to make on a worker, in its turn."""

    call: Callable[[Worker], Coroutine[Any, Any, object]]
    what: str  # "take samples"


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """How one sample got on in a worker's tick, beside the others it had."""

    tokens_per_s: float
    tokens: float  # in the whole tick


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """What the controller knows of a worker. Orders are carried out one after another; no worker waits for another."""

    lease: Lease
    slots: int  # samples it decodes at once
    state: WorkerPhase = WorkerPhase.STARTING
    worker: Worker | None = None
    version: PolicyVersion | None = None
    status: WorkerStatus | None = None
    heard_s: float = 0.0  # when it last said anything
    heard_tokens: int = 0  # in its last report
    noticed: bool = False
    behind: bool = False  # newer weights are there, for when it has finished what it has
    tokens: int = 0  # accepted of it
    busy_since_s: float | None = None  # since when it has samples of the open batch
    busy_tokens: int = 0  # accepted of it since then
    busy_samples: int = 0  # given to it since then
    busy_step: int = 0
    busy_purpose: str = ""
    work: WorkBySize = field(default_factory=WorkBySize)
    idle_since_s: float = 0.0
    orders: asyncio.Queue[WorkerCommand] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    @property
    def preemptible(self) -> bool:
        return self.lease.kind == "preemptible"

    def tokens_since(self, now_s: float, *, usual: DecodeRate | None) -> int:
        """About how many tokens it has made since it was last heard: a tick's at most, or it would have said so.

        Args:
            usual: of the fleet, for a worker that has not told of its first tick; None when nobody has told of any.
        """
        if self.status is not None and self.status.running:
            return min(self.heard_tokens, round(self.status.tokens_per_s * max(0.0, now_s - self.heard_s)))
        if self.busy_since_s is None or usual is None:
            return 0
        each = min(usual.tokens, usual.tokens_per_s * (now_s - self.busy_since_s))
        return round(each * min(self.busy_samples, self.slots))

    def cost_usd(self, now_s: float) -> float:
        return self.lease.price_usd_per_hour * (now_s - self.lease.start_s) / 3600

    def row(self, now_s: float) -> FleetRow:
        status = self.status
        return FleetRow(
            lease_id=self.lease.lease_id,
            worker_id=self.lease.worker_id,
            kind=self.lease.kind,
            state=self.state.value,
            version=self.version.number if self.version else None,
            running=status.running if status else 0,
            queued=status.queued if status else 0,
            tokens_per_s=status.tokens_per_s if status and status.running else 0.0,
            price_usd_per_hour=self.lease.price_usd_per_hour,
            age_s=now_s - self.lease.start_s,
        )


def probe_difference(loaded: Loaded, manifest: WeightManifest) -> float:
    """Mean absolute difference between a worker's logprobs of the probe and the publisher's, in nats.

    Infinite when the worker says something else than numbers for every token; 0 when there was nothing to compare.
    """
    expected, said = unpack_logprobs(manifest.probe_logprobs), unpack_logprobs(loaded.probe_logprobs)
    if not expected:
        return 0.0
    if len(said) != len(expected) or not all(map(math.isfinite, said)):
        return math.inf
    return sum(abs(a - b) for a, b in zip(said, expected, strict=True)) / len(expected)


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
        self._tell(HAND_BACK, member, samples=samples)

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
        self._tell(VACATED, member, samples=samples)

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
