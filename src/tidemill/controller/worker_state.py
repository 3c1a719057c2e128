"""One worker of the fleet from its lease to its end, and the work of its engine."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from msgspec.structs import fields

from tidemill.core.protocols import Worker
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
