"""Finds machines that compute wrongly or slowly, and decides when not to use them.

```
 sums of weights, probe, NaN, ECC ── exact ─────────────────────────────▶ quarantined ──(away_s)──▶ probation
 mismatch, speed, joins ── statistical ──▶ suspect ──still──▶ draining ──▶ quarantined                  │
                                             │ ▲                                                        │
                                        quiet for a while ──▶ healthy ◀─────────────────────────────────┘
```
An *exact* finding needs one report: a sum of the weights in memory differs from the published one, or a logprob is not
a number. A *statistical* finding compares a worker with the other workers at the same time, so that a change of the
whole fleet (longer contexts, a stale policy) is none, and has to be confirmed by later measurements. At most a quarter
of the machines are withheld at once; a worker beyond that with wrong weights is only restarted, which loads them again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from tidemill.core.evidence import MachineHealth, MachineState
from tidemill.core.records import (
    ITEM_BYTES,
    GpuStatus,
    Lease,
    Loaded,
    Record,
    StepMetrics,
    WeightsSum,
    WorkerReport,
)

RANK_RATIOS = {"cpu_s": 1.3, "grad_norm": 10.0, "mismatch_kl": 8.0}
RANK_PAST, RANK_BATCHES = 5, 3
"""Of a rank: batches before a comparison, and batches in a row in which a figure is too large by these factors."""
SIGMA = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""


class Limits(Record):
    """When a finding counts. Fixed with seeds that `benchmarks.sick_machines` leaves out."""

    withheld: float = 0.25  # greatest share of the machines in draining or quarantine
    quiet_s: float = 600.0  # without a finding until a suspect, or a machine on probation, is healthy
    away_s: float = 1800.0  # of the first quarantine; doubles each time
    longest_away_s: float = 86400.0
    idle_probe_s: float = 120.0  # between probes of an idle worker
    suspect_probe_s: float = 20.0
    cohort: int = 3  # other workers that a comparison needs
    mismatch_ratio: float = 8.0  # to the median of the others
    mismatch_floor: float = 1e-5  # nats per token; kernels in full precision differ by less
    mismatch_tokens: float = 128.0  # of a worker in a batch, for a comparison
    window_s: float = 5.0  # of one measurement of speed
    windows: int = 6  # whose median is compared
    past: int = 12  # earlier measurements of the machine that a comparison needs
    slower: float = 0.18  # log of the ratio to its own past, in time per token
    sigmas: float = 3.0  # and in standard deviations of its past
    failed_joins: int = 3  # of the last five
    stale_reports: int = 3  # in a row with older weights than it had loaded
    stale_s: float = 5.0  # after loading; earlier reports may have been on their way


@dataclass(eq=False)
class _Machine:
    """What outlives a lease."""

    name: str
    state: MachineState = "healthy"
    found_s: float = -math.inf  # the last finding
    quarantines: int = 0
    back_s: float = -math.inf  # end of its quarantine
    joins: deque[bool] = field(default_factory=lambda: deque(maxlen=5))
    past: deque[float] = field(default_factory=lambda: deque(maxlen=256))  # log of its time per token by the others'

    def is_withheld(self, now_s: float) -> bool:
        return self.state == "draining" or (self.state == "quarantined" and now_s < self.back_s)


@dataclass(eq=False)
class _Worker:
    lease: Lease
    machine: _Machine
    version: int = -1  # that it loaded last
    loaded_s: float = -math.inf
    expected: tuple[int, ...] = ()
    verified_s: list[float] = field(default_factory=list)  # by part: when its sum was last right
    has_logprobs: bool = True
    stale: int = 0
    mismatched: int = 0  # batches in a row
    matched_s: float = -math.inf  # last batch that was not
    probed_s: float = -math.inf  # the probe was asked for
    probe_right_s: float = -math.inf
    gpu: GpuStatus = field(default_factory=GpuStatus)
    seen_s: float = -math.inf  # of the last report while samples ran
    window: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # seconds, sample seconds, tokens
    recent: deque[float] = field(default_factory=deque)
    slow: int = 0  # measurements in a row
    rejected: bool = False  # no more findings


class MachineWatch:
    """Implements `core.protocols.MachineGuard`; a function of its calls.

    Args:
        acts: False: changes are messages only, and no machine is withheld.
        compares_speed: False where workers share a thread.
    """

    def __init__(self, *, acts: bool = True, compares_speed: bool = True, limits: Limits | None = None) -> None:
        self._acts, self._compares_speed, self.limits = acts, compares_speed, limits or Limits()
        self._machines: dict[str, _Machine] = {}
        self._workers: dict[str, _Worker] = {}  # of current leases
        self._changes: list[MachineHealth] = []
        self._sums_agree = False
        self._rates: dict[int, deque[tuple[str, float]]] = {}  # by half octave of samples: lease, log time per token
        self._ranks: dict[tuple[str, str], deque[float]] = {}  # ratios to the other ranks, by rank and figure
        self._outlying = Counter[tuple[str, str]]()  # batches in a row

    def joined(self, lease: Lease, now_s: float) -> None:
        worker = self._worker(lease)
        machine, worker.matched_s = worker.machine, now_s
        machine.joins.append(True)
        if machine.state == "quarantined":
            machine.found_s = now_s
            self._change(machine, lease, "probation", "its quarantine ended")

    def join_failed(self, lease: Lease, cause: str, now_s: float) -> None:
        machine, limit = self._worker(lease).machine, self.limits.failed_joins
        del self._workers[lease.lease_id]
        machine.joins.append(False)
        failed = machine.joins.count(False)
        others = any(any(each.joins) for each in self._machines.values() if each is not machine)
        if failed >= limit and others and not machine.is_withheld(now_s):
            cause = f"{failed} of {len(machine.joins)} workers did not start on it, the last because {cause}"
            self._withhold(machine, lease, "quarantined", cause, now_s, value=failed, limit=limit)

    def loaded(self, lease: Lease, loaded: Loaded, now_s: float) -> None:
        worker = self._worker(lease)
        for part, total in enumerate(loaded.last_sums[: len(worker.expected)]):
            self._check_sum(worker, WeightsSum(version=worker.version, part=part, total=total), now_s)
        worker.version, worker.loaded_s, worker.stale = loaded.version.number, now_s, 0
        worker.expected, worker.has_logprobs = loaded.part_sums, loaded.rollout_logprobs
        worker.verified_s = [now_s] * len(loaded.part_sums)
        worker.probed_s = worker.probe_right_s = now_s  # a load ends with the probe

    def reported(self, lease: Lease, report: WorkerReport, now_s: float) -> None:
        worker, limits, status = self._worker(lease), self.limits, report.status
        if worker.rejected:
            return
        if worker.machine.state in ("suspect", "probation") and now_s - worker.machine.found_s >= limits.quiet_s:
            self._change(worker.machine, lease, "healthy", f"nothing was found for {limits.quiet_s:.0f} s")
        if status.weights is not None:
            self._check_sum(worker, status.weights, now_s)
        if worker.has_logprobs and report.deltas:
            self._check_logprobs(worker, b"".join(delta.logprobs for delta in report.deltas), now_s)
        is_late = now_s - worker.loaded_s > limits.stale_s and status.version < worker.version
        worker.stale = worker.stale + 1 if is_late else 0
        if worker.stale == limits.stale_reports:
            cause = f"it computes with version {status.version} although it loaded {worker.version}"
            self._exact(worker, cause, now_s, since_s=worker.loaded_s)
        if status.gpu is not None:
            self._check_gpu(worker, status.gpu, now_s)
        if self._compares_speed:
            self._check_speed(worker, report, now_s)

    def _check_sum(self, worker: _Worker, found: WeightsSum, now_s: float) -> None:
        if found.version != worker.version or found.part >= len(worker.expected):
            return
        if found.total == worker.expected[found.part]:
            worker.verified_s[found.part] = now_s
            self._sums_agree = True
        elif self._sums_agree:  # if no sum was ever right, it is not a fault of this machine
            cause = f"part {found.part} of its weights differs from version {found.version} as published"
            self._exact(worker, cause, now_s, since_s=worker.verified_s[found.part])

    def _check_logprobs(self, worker: _Worker, packed: bytes, now_s: float) -> None:
        wrong = int(np.count_nonzero(~np.isfinite(np.frombuffer(packed, np.float32, len(packed) // ITEM_BYTES))))
        if wrong and len(self._workers) > self.limits.cohort and not self._is_full(worker.machine, now_s):
            cause = f"{wrong} of the logprobs in a report are not numbers"
            self._exact(worker, cause, now_s, since_s=now_s)  # else it may be the policy, whose gradients are checked

    def _check_gpu(self, worker: _Worker, gpu: GpuStatus, now_s: float) -> None:
        before, worker.gpu = worker.gpu, gpu
        errors = gpu.uncorrected_errors - before.uncorrected_errors
        if before.temperature_c and errors > 0:  # those before the first reading belong to somebody else's job
            self._exact(worker, f"{errors} uncorrected memory errors of its GPU", now_s, since_s=worker.loaded_s)
        elif gpu.error and not before.error:
            self._suspect(worker, f"its GPU does not answer: {gpu.error}", now_s)

    def _check_speed(self, worker: _Worker, report: WorkerReport, now_s: float) -> None:
        """Compare the time per token at this number of samples with the others', and the ratio with its own past."""
        limits, running, window = self.limits, report.status.running, worker.window
        since_s, worker.seen_s = worker.seen_s, now_s if running else -math.inf
        if not running:
            worker.window = [0.0, 0.0, 0.0]
        if not running or since_s == -math.inf or now_s <= since_s:
            return
        window[0] += now_s - since_s
        window[1] += (now_s - since_s) * running
        window[2] += sum(len(delta.token_ids) for delta in report.deltas) / ITEM_BYTES
        if window[0] < limits.window_s:
            return
        worker.window = [0.0, 0.0, 0.0]
        if not window[2]:
            return
        log_s = math.log(window[1] / window[2])
        rates = self._rates.setdefault(round(2 * math.log2(window[1] / window[0])), deque(maxlen=64))
        others = {name: rate for name, rate in rates if name != worker.lease.lease_id}  # the newest of each
        rates.append((worker.lease.lease_id, log_s))
        if len(others) < limits.cohort:
            return
        worker.recent.append(log_s - median(others.values()))
        if len(worker.recent) <= limits.windows:
            return
        past, oldest = worker.machine.past, worker.recent.popleft()
        if not worker.slow:  # else it would get used to being slow
            past.append(oldest)
        if len(past) < limits.past:
            return
        usual = median(past)
        spread = SIGMA * median(abs(each - usual) for each in past)
        excess, limit = median(worker.recent) - usual, max(limits.slower, limits.sigmas * spread)
        worker.slow = worker.slow + 1 if excess > limit else 0
        if worker.slow == 1 or (worker.slow and worker.slow % limits.windows == 0):
            hot = ", and its GPU lowers its clock because of heat or power" if worker.gpu.hot else ""
            cause = f"it needs {math.exp(excess):.2f} times its usual time per token{hot}"
            value, confirmed = math.exp(excess), worker.slow >= limits.windows
            self._suspect(worker, cause, now_s, confirmed=confirmed, value=value, limit=math.exp(limit))

    def probed(self, lease: Lease, difference: float, limit: float, now_s: float) -> None:
        worker = self._worker(lease)
        if difference <= limit:
            worker.probe_right_s = now_s
            return
        cause = "its logprobs of the probe differ from the trainer's"
        self._exact(worker, cause, now_s, since_s=worker.probe_right_s, value=difference, limit=limit)

    def trained(self, metrics: StepMetrics, now_s: float) -> None:
        self._check_ranks(metrics.ranks)
        limits = self.limits
        rates = {lease: kl / n for lease, (kl, n) in metrics.mismatch.items() if n >= limits.mismatch_tokens}
        for lease_id, rate in rates.items():
            worker = self._workers.get(lease_id)
            others = [each for name, each in rates.items() if name != lease_id and math.isfinite(each)]
            if worker is None or len(others) < limits.cohort:
                continue
            limit = max(limits.mismatch_floor, limits.mismatch_ratio * median(others))
            if rate <= limit:
                worker.mismatched, worker.matched_s = 0, now_s
                continue
            worker.mismatched += 1
            cause = "its logprobs differ more from the trainer's than those of the other workers"
            confirmed = worker.mismatched > 1 or worker.machine.state == "probation"
            since_s = worker.matched_s
            self._suspect(
                worker, cause, now_s, confirmed=confirmed, wrong=True, value=rate, limit=limit, since_s=since_s
            )

    def _check_ranks(self, ranks: Mapping[str, Mapping[str, float]]) -> None:
        """Name a rank of the trainer of which a figure, relative to the other ranks, leaves its own past."""
        for name, figure in product(ranks, RANK_RATIOS):
            value, usual = ranks[name][figure], median(own[figure] for each, own in ranks.items() if each != name)
            past = self._ranks.setdefault((name, figure), deque(maxlen=32))
            ratio = value / usual if usual else 1.0
            limit = RANK_RATIOS[figure] * (median(past) if len(past) >= RANK_PAST else math.inf)
            if math.isfinite(value) and ratio <= limit:
                past.append(ratio)
                self._outlying[name, figure] = 0
                continue
            self._outlying[name, figure] = self._outlying[name, figure] + 1 if math.isfinite(value) else RANK_BATCHES
            if self._outlying[name, figure] == RANK_BATCHES:
                rank = Lease(
                    lease_id="trainer", worker_id=name, kind="reserved", price_usd_per_hour=0.0, start_s=0.0, node=name
                )
                cause = f"its {figure} is {ratio:.3g} times that of the other ranks"
                self._change(_Machine(name), rank, "suspect", cause, acts=False, value=ratio, limit=limit)

    def ended(self, lease: Lease, now_s: float) -> None:
        worker = self._workers.pop(lease.lease_id, None)
        if worker is not None and worker.machine.state == "draining" and worker.rejected:
            self._quarantine(worker.machine, lease, "its samples were handed back", now_s)

    def wants_probe(self, lease: Lease, now_s: float, *, idle_s: float) -> bool:
        worker, limits = self._worker(lease), self.limits
        is_suspect = worker.machine.state != "healthy"
        pause_s = limits.suspect_probe_s if is_suspect else limits.idle_probe_s
        due = now_s - worker.probed_s >= pause_s and (is_suspect or idle_s >= pause_s)
        if worker.rejected or worker.version < 0 or not due:
            return False
        worker.probed_s = now_s
        return True

    def take_changes(self) -> list[MachineHealth]:
        changes, self._changes = self._changes, []
        return changes

    # States.

    def _worker(self, lease: Lease) -> _Worker:
        if (worker := self._workers.get(lease.lease_id)) is None:
            machine = self._machines.setdefault(lease.machine, _Machine(lease.machine))
            worker = self._workers[lease.lease_id] = _Worker(lease, machine)
        return worker

    def _exact(self, worker: _Worker, cause: str, now_s: float, **figures: Any) -> None:
        """It computed wrongly, without doubt."""
        if not worker.rejected:
            worker.rejected = True
            self._withhold(worker.machine, worker.lease, "quarantined", cause, now_s, wrong=True, **figures)

    def _suspect(
        self,
        worker: _Worker,
        cause: str,
        now_s: float,
        *,
        confirmed: bool = False,
        wrong: bool = False,
        **figures: Any,
    ) -> None:
        """It differs from the others."""
        machine = worker.machine
        if worker.rejected:
            return
        machine.found_s = now_s
        if confirmed:
            worker.rejected = True
            state: MachineState = "quarantined" if wrong else "draining"
            self._withhold(machine, worker.lease, state, cause, now_s, wrong=wrong, **figures)
        elif machine.state == "healthy":
            self._change(machine, worker.lease, "suspect", cause, **figures)
            worker.probed_s = -math.inf  # ask for it at once

    def _withhold(
        self, machine: _Machine, lease: Lease, state: MachineState, cause: str, now_s: float, **figures: Any
    ) -> None:
        """Stop using a machine, unless too many are withheld: then only a worker that computed wrongly is restarted."""
        machine.found_s = now_s
        if not self._acts:
            self._change(machine, lease, "suspect", cause, **figures)
        elif self._is_full(machine, now_s):
            if (worker := self._workers.get(lease.lease_id)) is not None:
                worker.rejected = False  # until there is room
            if figures.get("wrong") or machine.state == "healthy":
                cause += "; it stays in use because as many machines as allowed are withheld"
                self._change(machine, lease, "quarantined" if figures.get("wrong") else "suspect", cause, **figures)
        elif state == "quarantined":
            self._quarantine(machine, lease, cause, now_s, **figures)
        else:
            self._change(machine, lease, state, cause, **figures)

    def _is_full(self, machine: _Machine, now_s: float) -> bool:
        """Whether as many other machines are withheld as may be."""
        others = {name for name, each in self._machines.items() if each is not machine and each.is_withheld(now_s)}
        fleet = {worker.machine.name for worker in self._workers.values()} | others | {machine.name}
        return len(others) >= max(1, int(self.limits.withheld * len(fleet)))

    def _quarantine(self, machine: _Machine, lease: Lease, cause: str, now_s: float, **figures: Any) -> None:
        away_s = min(self.limits.longest_away_s, self.limits.away_s * 2.0**machine.quarantines)
        machine.quarantines += 1
        machine.back_s = now_s + away_s
        machine.joins.clear()
        self._change(machine, lease, "quarantined", cause, away_s=away_s, **figures)

    def _change(
        self, machine: _Machine, lease: Lease, state: MachineState, cause: str, *, acts: bool = True, **figures: Any
    ) -> None:
        machine.state = state
        self._changes.append(
            MachineHealth(
                lease_id=lease.lease_id,
                worker_id=lease.worker_id,
                machine=lease.machine,
                state=state,
                cause=cause,
                acts=acts and self._acts,
                **figures,
            )
        )
