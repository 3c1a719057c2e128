"""State of one worker, and the fleet's events and counters."""

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
from tidemill.telemetry.events import CRASH, DECODE, EVICTION, LEASE, LEASE_END, MIGRATION, PULL, REBALANCE

WORK_FIELDS = tuple(field.name for field in fields(EngineWork))
_VALUES: Callable[[EngineWork], tuple[float, ...]] = attrgetter(*WORK_FIELDS)
_DIGITS = 6


class WorkBySize:
    """Sums of an engine's work, one row per octave of samples drawn from in a forward pass.

    The rows separate the cost of a forward pass from the cost of a sample in it.
    """

    def __init__(self) -> None:
        self._last = EngineWork()  # an engine reports totals since its start
        self._rows: dict[int, tuple[float, ...]] = {}

    def observe(self, work: EngineWork) -> None:
        """Add the difference from the last report."""
        before, self._last = self._last, work
        if (passes := work.passes - before.passes) > 0:
            size = math.floor(math.log2(max(1.0, (work.drawn - before.drawn) / passes)))
            row = self._rows.get(size, (0.0,) * len(WORK_FIELDS))
            self._rows[size] = tuple(
                total + now - then for total, now, then in zip(row, _VALUES(work), _VALUES(before), strict=True)
            )

    def take(self) -> list[dict[str, float]]:
        """Rows since the last call, by ascending size; keys are the fields of `EngineWork`."""
        rows, self._rows = self._rows, {}
        return [
            {name: round(value, _DIGITS) for name, value in zip(WORK_FIELDS, row, strict=True)}
            for _, row in sorted(rows.items())
        ]


class WorkerPhase(enum.Enum):
    """Phase of a worker; the values are shown in the live view."""

    STARTING = "starting"
    LOADING = "loading"
    SERVING = "serving"
    LEAVING = "leaving"  # noticed: takes no new samples
    GONE = "gone"  # removed from the fleet


SERVING = WorkerPhase.SERVING
"""For loops over all workers: looking up an enum member is slow before Python 3.12."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """One call to a worker."""

    call: Callable[[Worker], Coroutine[Any, Any, object]]
    description: str  # completes "waiting for the worker to ...": "take samples"


@dataclass(frozen=True, slots=True)
class DecodeRate:
    """Decode rate per sample in one report interval."""

    tokens_per_s: float
    tokens: float  # in the interval


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """State of one worker. Its commands run in order; no worker waits for another."""

    lease: Lease
    slots: int  # samples it decodes concurrently
    phase: WorkerPhase = WorkerPhase.STARTING
    handle: Worker | None = None
    version: PolicyVersion | None = None
    status: WorkerStatus | None = None
    joined_s: float = 0.0
    drained_s: float = math.inf  # when it was asked to return its samples
    reported_s: float = 0.0  # time of its last report
    reported_tokens: int = 0  # in its last report
    noticed: bool = False
    rejected: str = ""  # why its machine is not used any more; the lease ends when its samples are handed back
    load_when_idle: bool = False  # newer weights are published; load them when its samples are finished
    tokens: int = 0  # reported in total
    busy_since_s: float | None = None  # None while it has no samples
    busy_tokens: int = 0  # reported since then
    busy_samples: int = 0  # submitted since then
    busy_step: int = 0
    busy_purpose: str = ""
    work: WorkBySize = field(default_factory=WorkBySize)
    idle_since_s: float = 0.0
    commands: asyncio.Queue[WorkerCommand] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    @property
    def preemptible(self) -> bool:
        return self.lease.kind == "preemptible"

    @property
    def joined(self) -> bool:
        return self.phase in (WorkerPhase.SERVING, WorkerPhase.LEAVING)

    @property
    def executing(self) -> int:
        """Samples that it executes; its slots until it reports some, and fewer if its cache has no room for more."""
        return self.status.running if self.status is not None and self.status.running else self.slots

    def served_s(self, now_s: float) -> float:
        """Time in which it could generate, since it joined."""
        return min(now_s, self.drained_s) - self.joined_s

    def unreported_tokens(self, now_s: float, *, fleet_rate: DecodeRate | None) -> int:
        """Estimated tokens generated since the last report, at most those of one report interval.

        Args:
            fleet_rate: latest rate of any worker, used before this worker's first report; None if there is none.
        """
        if self.status is not None and self.status.running:
            return min(self.reported_tokens, round(self.status.tokens_per_s * max(0.0, now_s - self.reported_s)))
        if self.busy_since_s is None or fleet_rate is None:
            return 0
        per_sample = min(fleet_rate.tokens, fleet_rate.tokens_per_s * (now_s - self.busy_since_s))
        return round(per_sample * min(self.busy_samples, self.slots))

    def row(self, now_s: float) -> FleetRow:
        status = self.status
        return FleetRow(
            lease_id=self.lease.lease_id,
            worker_id=self.lease.worker_id,
            kind=self.lease.kind,
            state=self.phase.value,
            version=self.version.number if self.version else None,
            running=status.running if status else 0,
            queued=status.queued if status else 0,
            tokens_per_s=status.tokens_per_s if status and status.running else 0.0,
            price_usd_per_hour=self.lease.price_usd_per_hour,
            age_s=now_s - self.lease.start_s,
        )


def probe_difference(loaded: Loaded, manifest: WeightManifest) -> float:
    """Mean absolute difference between a worker's logprobs of the probe and the publisher's, in nats.

    Infinite if the worker's logprobs are not one finite number per token; 0 if the publisher has no probe.
    """
    expected = unpack_logprobs(manifest.probe_logprobs)
    measured = unpack_logprobs(loaded.probe_logprobs)
    if not expected:
        return 0.0
    if len(measured) != len(expected) or not all(map(math.isfinite, measured)):
        return math.inf
    return sum(abs(a - b) for a, b in zip(measured, expected, strict=True)) / len(expected)


@dataclass(slots=True)
class FleetCounters:
    """Counts since the last metrics line; the names are those of docs/reference/metrics.md."""

    evictions: int = 0
    crashes: int = 0
    migrations: int = 0  # samples
    tokens_lost: int = 0  # estimate


class FleetEventLog:
    """Logs the fleet's events, and counts those that are also metrics of a step."""

    def __init__(self, telemetry: Telemetry, clock: Clock) -> None:
        self._telemetry, self._clock = telemetry, clock
        self._worker_ids: dict[str, str] = {}  # by lease, including ended leases
        self.counters = FleetCounters()

    def take_figures(self) -> dict[str, float]:
        """Counts since the last call."""
        counters, self.counters = self.counters, FleetCounters()
        return {name: float(count) for name, count in asdict(counters).items()}

    def has_logged(self, lease_id: str) -> bool:
        """Whether the lease was granted before, even if it has ended."""
        return lease_id in self._worker_ids

    def log(self, name: str, worker: WorkerState, **fields: object) -> None:
        """Log an event with the worker's lease and name."""
        self._telemetry.event(name, lease=worker.lease.lease_id, worker=worker.lease.worker_id, **fields)

    def granted(self, worker: WorkerState) -> None:
        lease = worker.lease
        self._worker_ids[lease.lease_id] = lease.worker_id
        self.log(LEASE, worker, kind=lease.kind, price_usd_per_hour=lease.price_usd_per_hour)

    def pulled(self, worker: WorkerState, loaded: Loaded, duration_s: float) -> None:
        self.log(
            PULL,
            worker,
            version=loaded.version.number,
            nbytes=loaded.nbytes,
            full=loaded.full,
            duration_s=round(duration_s, _DIGITS),
            swap_s=round(loaded.swap_s, _DIGITS),
            retries=loaded.retries,
        )

    def migrated(self, source: str, target: WorkerState, samples: Sequence[Sample]) -> None:
        """Samples of the lease `source` continue on another worker."""
        self.counters.migrations += len(samples)
        self._telemetry.event(
            MIGRATION,
            lease=source,
            worker=self._worker_ids.get(source, source),
            to_worker=target.lease.worker_id,
            samples=len(samples),
            tokens_kept=sum(sample.length for sample in samples),
        )

    def busy(self, worker: WorkerState, samples: int, *, step: int, purpose: str) -> None:
        """The worker was given samples."""
        if worker.busy_since_s is None:
            worker.busy_since_s = self._clock.now()
            worker.busy_tokens = 0
            worker.busy_samples = 0
            worker.busy_step, worker.busy_purpose = step, purpose
        worker.busy_samples += samples

    def idle(self, worker: WorkerState) -> None:
        """The worker has no samples any more."""
        if worker.busy_since_s is None:
            return
        worker.idle_since_s = self._clock.now()
        self.log(
            DECODE,
            worker,
            kind=worker.lease.kind,
            step=worker.busy_step,
            purpose=worker.busy_purpose,
            tokens=worker.busy_tokens,
            samples=worker.busy_samples,
            work=worker.work.take(),
            duration_s=round(worker.idle_since_s - worker.busy_since_s, _DIGITS),
        )
        worker.busy_since_s = None

    def rebalanced(self, source: WorkerState, target: WorkerState, samples: int) -> None:
        self._telemetry.event(
            REBALANCE, from_worker=source.lease.worker_id, to_worker=target.lease.worker_id, samples=samples
        )

    def ended(
        self, outcome: LeaseOutcome, samples: Sequence[Sample], *, most_lost: int = 0, chunks: int | None = None
    ) -> None:
        """Log an eviction or a crash of a worker that had joined.

        Args:
            chunks: that others compute now, of a simulator.
            most_lost: tokens that its samples still lacked, a limit of the estimate.
        """
        if not (outcome.evicted or outcome.crashed):
            return
        lost = min(outcome.tokens_lost, most_lost)
        self.counters.evictions += outcome.evicted
        self.counters.crashes += outcome.crashed
        self.counters.tokens_lost += lost
        self._telemetry.event(
            EVICTION if outcome.evicted else CRASH,
            lease=outcome.lease_id,
            worker=outcome.worker_id,
            cause=outcome.cause,
            noticed=outcome.noticed,
            samples=len(samples),
            tokens_kept=sum(sample.length for sample in samples),
            tokens_lost=lost,
            **({} if chunks is None else {"chunks": chunks}),
        )

    def lease_ended(self, worker: WorkerState, cause: str, *, evicted: bool) -> None:
        lease = worker.lease
        held_s = self._clock.now() - lease.start_s
        self.log(
            LEASE_END,
            worker,
            kind=lease.kind,
            cause=cause,
            evicted=evicted,
            held_s=round(held_s, 3),
            cost_usd=round(lease.price_usd_per_hour * held_s / 3600, 9),
            tokens=worker.tokens,
        )
