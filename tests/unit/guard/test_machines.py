"""Findings about workers, and what follows from them. The limits are those of `Limits`, in hand-made reports."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.doubles.samples import make_id
from tidemill.core.evidence import MachineHealth
from tidemill.core.records import (
    GpuStatus,
    Lease,
    Loaded,
    PolicyVersion,
    StepMetrics,
    TokenDelta,
    WeightsSum,
    WorkerReport,
    WorkerStatus,
    pack_logprobs,
    pack_tokens,
)
from tidemill.guard.machines import Limits, MachineWatch

SUMS = tuple(range(100, 116))
V3 = PolicyVersion(number=3, digest="three")
SICK = 0


def lease_of(machine: int, number: int = 1) -> Lease:
    return Lease(
        lease_id=f"lease-{machine}-{number}",
        worker_id=f"spot-{machine}",
        kind="preemptible",
        price_usd_per_hour=0.0,
        start_s=0.0,
    )


def report_of(lease: Lease, *, tokens: int = 1, logprob: float = -1.0, **status: object) -> WorkerReport:
    usual = WorkerStatus(
        worker_id=lease.worker_id, version=3, running=4, queued=0, free_slots=0, tokens_per_s=1.0, engine="fake"
    )
    delta = TokenDelta(
        sample_id=make_id("p"),
        lease_id=lease.lease_id,
        attempt=1,
        start=0,
        token_ids=pack_tokens([5] * tokens),
        logprobs=pack_logprobs([logprob] * tokens),
        version=V3,
    )
    return WorkerReport(
        lease_id=lease.lease_id,
        deltas=(delta,),
        status=msgspec.structs.replace(usual, **status),
    )


def part_sum(part: int, *, off: int = 0, version: int = 3) -> WeightsSum:
    return WeightsSum(version=version, part=part, total=SUMS[part] + off)


class Stage:
    """Eight machines that have loaded version 3, of which number 0 is sick."""

    def __init__(self, *, machines: int = 8, acts: bool = True) -> None:
        self.watch, self.now_s = MachineWatch(acts=acts), 0.0
        self.leases = [lease_of(at) for at in range(machines)]
        for lease in self.leases:
            self.join(lease)
        self.watch.reported(self.leases[-1], report_of(self.leases[-1], weights=part_sum(0)), 1.0)

    def join(self, lease: Lease) -> None:
        self.watch.loaded(lease, Loaded(version=V3, part_sums=SUMS), self.now_s)
        self.watch.joined(lease, self.now_s)

    def after(self, seconds: float, **report: object) -> list[MachineHealth]:
        """What follows from one report of the sick machine."""
        self.now_s += seconds
        self.watch.reported(self.leases[SICK], report_of(self.leases[SICK], **report), self.now_s)  # type: ignore[arg-type]
        return self.watch.take_changes()

    def trained(self, rates: dict[int, float]) -> list[MachineHealth]:
        """A batch of 1,000 tokens per machine with a mismatch of 1e-3, or of `rates`."""
        mismatch = {f"lease-{at}-1": (1000 * rates.get(at, 1e-3), 1000.0) for at in range(len(self.leases))}
        self.now_s += 60.0
        metrics = StepMetrics(step=1, version=V3, optimizer_steps=1, values={}, mismatch=mismatch)
        self.watch.trained(metrics, self.now_s)
        return self.watch.take_changes()


def test_a_part_of_the_weights_that_differs_is_found_at_its_report() -> None:
    stage = Stage()
    assert [stage.after(10.0, weights=part_sum(part)) for part in range(16)] == [[]] * 16
    assert stage.after(10.0, weights=part_sum(0)) == []
    (found,) = stage.after(10.0, weights=part_sum(1, off=1 << 40))
    assert (found.state, found.wrong, found.machine, found.away_s) == ("quarantined", True, "spot-0", 1800.0)
    assert found.since_s == 20.0  # part 1 was right in the second report
    assert stage.after(10.0, weights=part_sum(1, off=1 << 40)) == []  # said once


def test_weights_are_checked_when_the_next_version_replaces_them() -> None:
    stage = Stage()
    wrong = tuple(total + (part == 9) for part, total in enumerate(SUMS))
    version = PolicyVersion(number=4, digest="four")
    stage.watch.loaded(stage.leases[0], Loaded(version=version, part_sums=SUMS[::-1], last_sums=wrong), 50.0)
    assert [(each.state, each.since_s) for each in stage.watch.take_changes()] == [("quarantined", 0.0)]


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([{"weights": part_sum(2, off=1, version=2)}], id="a late report of the version before"),
        pytest.param([{"version": 2}] * 2, id="two late reports"),
        pytest.param([{"gpu": GpuStatus(temperature_c=50, uncorrected_errors=7)}], id="old memory errors"),
        pytest.param([{"gpu": GpuStatus(temperature_c=99, hot=True)}], id="a hot GPU that is as fast as before"),
    ],
)
def test_no_finding(reports: list[dict[str, object]]) -> None:
    stage = Stage()
    assert [stage.after(3.0, **report) for report in reports] == [[]] * len(reports)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([{"logprob": float("nan")}], "not numbers"),
        ([{"logprob": float("-inf")}], "not numbers"),
        ([{"version": 2}] * 3, "computes with version 2 although it loaded 3"),
        ([{"gpu": GpuStatus(temperature_c=50, uncorrected_errors=each)} for each in (7, 8)], "1 uncorrected memory"),
    ],
)
def test_exact_findings(reports: list[dict[str, object]], said: str) -> None:
    stage = Stage()
    found = [stage.after(6.0, **report) for report in reports]
    assert found[:-1] == [[]] * (len(reports) - 1)
    assert [(each.state, each.wrong) for each in found[-1]] == [("quarantined", True)]
    assert said in found[-1][0].cause


def test_logprobs_that_a_small_fleet_or_an_engine_does_not_have_are_no_finding() -> None:
    assert Stage(machines=3).after(1.0, logprob=float("nan")) == []
    stage = Stage()
    stage.watch.loaded(stage.leases[0], Loaded(version=V3, rollout_logprobs=False), 0.0)
    assert stage.after(1.0, logprob=float("nan")) == []


def test_sums_that_were_never_right_are_not_a_fault_of_one_machine() -> None:
    watch, lease = MachineWatch(), lease_of(0)
    watch.loaded(lease, Loaded(version=V3, part_sums=SUMS), 0.0)
    watch.reported(lease, report_of(lease, weights=part_sum(0, off=1)), 1.0)
    assert watch.take_changes() == []


def test_a_probe_that_differs_is_a_finding() -> None:
    stage = Stage()
    stage.watch.probed(stage.leases[0], 0.01, 0.05, 40.0)
    stage.watch.probed(stage.leases[0], 0.06, 0.05, 80.0)
    (found,) = stage.watch.take_changes()
    assert (found.state, found.wrong, found.since_s, found.value) == ("quarantined", True, 40.0, 0.06)


def test_mismatch_is_compared_with_the_cohort_and_has_to_last() -> None:
    stage = Stage()
    assert stage.trained({0: 2e-3}) == []  # 2 times the median of the others
    assert stage.trained(dict.fromkeys(range(8), 0.1)) == []  # the whole fleet: a stale policy
    (first,) = stage.trained({0: 9e-3})
    assert (first.state, first.wrong) == ("suspect", False)
    assert stage.watch.wants_probe(stage.leases[0], stage.now_s, idle_s=0.0)
    (second,) = stage.trained({0: 9e-3})
    assert (second.state, second.wrong, second.since_s) == ("quarantined", True, 120.0)  # the second batch was right


def drive(stage: Stage, *, seconds: int, slow: dict[int, float], seed: int = 0) -> list[MachineHealth]:
    """Reports once per second: 40 tokens/s for 4 samples with 5 % noise, and less by the factors `slow`."""
    rng = random.Random(seed)
    for _ in range(seconds):
        stage.now_s += 1.0
        for at, lease in enumerate(stage.leases):
            tokens = max(1, round(400 / slow.get(at, 1.0) * rng.gauss(1.0, 0.05)))
            stage.watch.reported(lease, report_of(lease, tokens=tokens), stage.now_s)
    return stage.watch.take_changes()


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_a_worker_that_becomes_slow_is_drained(factor: float) -> None:
    stage = Stage()
    assert drive(stage, seconds=150, slow={}) == []
    # A window of 5 s; the median of 6 windows moves after 4, and must stay for 6: (4 + 6) * 5 s.
    found = drive(stage, seconds=60, slow={0: factor}, seed=1)
    assert [(each.machine, each.state, each.wrong) for each in found] == [
        ("spot-0", "suspect", False),
        ("spot-0", "draining", False),
    ]
    assert found[1].value == pytest.approx(factor, rel=0.05)
    stage.watch.ended(stage.leases[0], stage.now_s)
    assert [each.state for each in stage.watch.take_changes()] == ["quarantined"]


@pytest.mark.parametrize(
    ("before", "then"),
    [
        pytest.param({}, dict.fromkeys(range(8), 1.5), id="the whole fleet becomes slower"),
        pytest.param({0: 1.5}, {0: 1.5}, id="a slower machine from the start"),
        pytest.param({}, {0: 1.1}, id="a little slower"),
    ],
)
def test_speed_that_is_no_finding(before: dict[int, float], then: dict[int, float]) -> None:
    stage = Stage()
    assert drive(stage, seconds=150, slow=before) + drive(stage, seconds=120, slow=then, seed=1) == []


def test_a_machine_on_which_workers_do_not_start() -> None:
    stage = Stage()
    for number in range(2, 4):
        stage.watch.join_failed(lease_of(0, number), "no driver", 10.0)
    assert stage.watch.take_changes() == []
    stage.watch.join_failed(lease_of(0, 4), "no driver", 20.0)
    (found,) = stage.watch.take_changes()
    assert (found.state, found.wrong, found.lease_id) == ("quarantined", False, "lease-0-4")


def test_a_quarter_of_the_machines_is_withheld_and_more_are_only_restarted() -> None:
    stage = Stage()
    for lease in stage.leases[:4]:
        stage.watch.reported(lease, report_of(lease, weights=part_sum(0, off=1)), 5.0)
    found = stage.watch.take_changes()
    assert [each.state for each in found] == ["quarantined"] * 4  # every lease ends
    assert [each.away_s > 0 for each in found] == [True, True, False, False]
    later = 5.0 + Limits().away_s  # both are back
    stage.watch.reported(stage.leases[5], report_of(stage.leases[5], weights=part_sum(0, off=1)), later)
    assert [each.away_s > 0 for each in stage.watch.take_changes()] == [True]


def test_probation_and_a_second_quarantine_of_twice_the_time() -> None:
    stage = Stage()
    assert [each.away_s for each in stage.after(5.0, weights=part_sum(0, off=1))] == [1800.0]
    stage.now_s += 1800.0
    stage.leases[0] = lease_of(0, 2)
    stage.join(stage.leases[0])
    assert [each.state for each in stage.watch.take_changes()] == ["probation"]
    assert [each.away_s for each in stage.after(5.0, weights=part_sum(0, off=1))] == [3600.0]
    stage.now_s += 3600.0
    stage.leases[0] = lease_of(0, 3)
    stage.join(stage.leases[0])
    stage.watch.take_changes()
    assert stage.after(599.0) == []
    assert [each.state for each in stage.after(1.0)] == ["healthy"]


def test_without_action_everything_is_a_message() -> None:
    stage = Stage(acts=False)
    found = [each for lease in stage.leases for each in _wrong(stage, lease)]
    assert [(each.state, each.acts, each.away_s) for each in found] == [("suspect", False, 0.0)] * 8


def _wrong(stage: Stage, lease: Lease) -> list[MachineHealth]:
    for at_s in (5.0, 6.0):
        stage.watch.reported(lease, report_of(lease, weights=part_sum(0, off=1)), at_s)
    return stage.watch.take_changes()


def test_idle_workers_are_probed_from_time_to_time() -> None:
    stage = Stage()
    lease = stage.leases[0]
    asked = [at for at in range(0, 400, 10) if stage.watch.wants_probe(lease, float(at), idle_s=float(at))]
    assert asked == [120, 240, 360]
    assert not stage.watch.wants_probe(lease, 500.0, idle_s=0.0)


@pytest.mark.parametrize(
    ("figure", "value", "batches"), [("cpu_s", 1.4, 3), ("mismatch_kl", 0.02, 3), ("grad_norm", float("nan"), 1)]
)
def test_a_rank_that_leaves_its_cohort_is_named(figure: str, value: float, batches: int) -> None:
    watch, usual = MachineWatch(), {"cpu_s": 1.0, "grad_norm": 3.0, "mismatch_kl": 1e-3}

    def trained(of_second: dict[str, float]) -> list[MachineHealth]:
        ranks = {"rank 0": usual, "rank 1": {**usual, **of_second}, "rank 2": {**usual, "grad_norm": 9.0}}
        watch.trained(StepMetrics(step=1, version=V3, optimizer_steps=1, values={}, ranks=ranks), 0.0)
        return watch.take_changes()

    assert [trained({}) for _ in range(5)] == [[]] * 5
    found = [trained({figure: value}) for _ in range(batches)]
    assert found[:-1] == [[]] * (batches - 1)
    assert [(each.worker_id, each.acts) for each in found[-1]] == [("rank 1", False)]
    assert figure in found[-1][0].cause
