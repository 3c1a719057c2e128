"""The simulator's benchmarks fail if machines, faults or differences that they are about were not there."""

from __future__ import annotations

import math
from types import SimpleNamespace

import msgspec
import pytest

from benchmarks.simulator import planted_defects
from benchmarks.simulator.calibration import Steady
from benchmarks.simulator.faults import check_outcomes
from benchmarks.simulator.fleet_size import check_row
from benchmarks.simulator.ours import PUBLISHED, check_variations
from benchmarks.simulator.ourselves import PAIRS, spec_of
from benchmarks.simulator.ourselves import check_evictions as check_run
from benchmarks.simulator.published import check_killed
from benchmarks.simulator.scale import check_hour
from benchmarks.simulator.segments import Total, check_evictions
from benchmarks.simulator.tail import SHARES, WAIT, Figures, batching, check_same_samples, relative, system
from benchmarks.simulator.windows import check_unmoved, wrong_window_s
from tests.fault_simulation.seed_run import Outcome

TOTAL = Total(
    tokens_per_s=12_000.0,
    tokens_per_usd=390_000.0,
    workers=5.0,
    trainer_idle=0.2,
    workers_idle=0.3,
    evictions=32,
    recomputed_share=0.1,
    by_segment={"A": 12_000.0},
)


def test_a_system_whose_instances_were_never_evicted_fails() -> None:
    still = msgspec.structs.replace(TOTAL, evictions=0)
    check_evictions({"14B published": TOTAL, "14B colocated": still})
    with pytest.raises(RuntimeError, match="14B published: no evictions"):
        check_evictions({"14B published": still})


def test_a_variation_that_changes_nothing_fails() -> None:
    ours = msgspec.structs.replace(TOTAL, tokens_per_s=12_100.0)
    without = msgspec.structs.replace(TOTAL, tokens_per_s=11_900.0)
    systems = {PUBLISHED: TOTAL, "ours, lag 0": ours, "without delta weights, lag 0": without}
    check_variations(systems)
    with pytest.raises(RuntimeError, match="without delta weights, lag 0: the same as ours, lag 0"):
        check_variations(systems | {"without delta weights, lag 0": ours})


FIGURES = Figures(
    tokens=1000,
    tokens_per_usd=100.0,
    hours=1.0,
    trainer_idle=0.1,
    workers_idle=0.2,
    workers=5.0,
    evictions=9,
    discarded=0.0,
)


def test_schedules_that_train_other_tokens_or_discard_none_fail() -> None:
    tail = msgspec.structs.replace(FIGURES, tokens_per_usd=125.0, discarded=0.3)
    found = {PUBLISHED: FIGURES, batching(1.25): tail}
    check_same_samples(found)
    assert relative({"A": found, "B": found}, batching(1.25)) == pytest.approx(1.25)  # 20 dollars, 16 dollars
    with pytest.raises(RuntimeError, match="different tokens"):
        check_same_samples(found | {"wait": msgspec.structs.replace(FIGURES, tokens=999)})
    for name, figures in {"wait": tail, batching(1.1): FIGURES}.items():
        with pytest.raises(RuntimeError, match="unexpected discarded tokens"):
            check_same_samples(found | {name: figures})


def test_the_nominal_slots_are_a_share_of_those_of_the_machines() -> None:
    slots = {share: system(batching(1.1, share), 900.4).spec.nominal_slots for share in SHARES}
    assert list(slots.values()) == [900, 450, 1801, 0]
    assert system(WAIT, 900.4).spec.schedule.tail == "wait"


def test_other_evictions_than_the_planned_ones_fail() -> None:
    check_killed(3, 100.0)
    check_killed(0, math.inf)
    for evictions, killed_s in ((0, 100.0), (3, math.inf)):
        with pytest.raises(RuntimeError, match=f"{evictions} machines were evicted"):
            check_killed(evictions, killed_s)


def test_a_real_run_on_an_evicting_pool_without_an_eviction_fails() -> None:
    check_run("inprocess", spec_of(PAIRS["inprocess"][1]), {"evictions": 0})
    check_run("ray", spec_of(PAIRS["ray"][1]), {"evictions": 6})
    with pytest.raises(RuntimeError, match="ray: no evictions"):
        check_run("ray", spec_of(PAIRS["ray"][1]), {"evictions": 0})


@pytest.mark.parametrize("name", ["steps", "tokens_accepted", "evictions"])
def test_an_hour_in_which_nothing_happened_fails(name: str) -> None:
    hour = {"steps": 16, "tokens_accepted": 10**9, "evictions": 565}
    check_hour(hour)
    with pytest.raises(RuntimeError, match=f"the hour: no {name.replace('_', ' ')}"):
        check_hour(hour | {name: 0})


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"workers_mean": 400.0}, "only 400.0 were held"),
        ({"learning_share": 0.0}, "no learning"),
        ({"workers_idle_share": 1.0}, "no decoding"),
    ],
)
def test_a_fleet_that_is_not_there_or_idle_fails(broken: dict[str, float], why: str) -> None:
    row = {"workers": 1000, "workers_mean": 944.0, "learning_share": 0.9, "workers_idle_share": 0.8}
    check_row(row)
    with pytest.raises(RuntimeError, match=f"1000 workers: {why}"):
        check_row(row | broken)


def test_a_window_that_moved_fails() -> None:
    steady = Steady(tokens_per_s=1.0, window_s=wrong_window_s(3, -50.0), step_s=1.0, train_s=1.0, trainer_wait_s=1.0)
    check_unmoved({(3, -50.0): steady})
    with pytest.raises(RuntimeError, match="3 instances: a window off by 50 s moved"):
        check_unmoved({(3, 50.0): steady})


@pytest.mark.parametrize(("broken", "why"), [({"lives": 1}, "no restarts"), ({"looks": 0}, "no checks")])
def test_seeds_without_faults_or_checks_fail(broken: dict[str, int], why: str) -> None:
    outcome = Outcome(seed=0, violation="", lives=2, looks=54, virtual_s=1.0, events=1, digest="")
    check_outcomes([outcome])
    with pytest.raises(RuntimeError, match=f"faults: {why}"):
        check_outcomes([msgspec.structs.replace(outcome, **broken)])


def test_a_violation_without_the_defect_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_defects, "simulate_faults", lambda seed: SimpleNamespace(violation="always"))
    with pytest.raises(RuntimeError, match="seed 0 has a violation without a defect: always"):
        planted_defects.found(planted_defects.DEFECTS["counts a token twice"], range(1))
