"""Steps to a target, intervals over seeds, and what is kept from one call to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks import addition_runs
from benchmarks.addition_runs import (
    AdditionRun,
    check_distinct,
    check_start,
    earlier_runs,
    interval,
    mean_accuracy,
    mean_binned,
    measured,
    reached_at,
    spread,
    told_seeds,
)
from benchmarks.staleness import case_of, check_lags, steps_ratio


def made(case: str = "a", seed: int = 0, **changes: object) -> AdditionRun:
    plain = AdditionRun(
        case=case,
        seed=seed,
        steps=10,
        learning_rate=1e-4,
        optimizer_steps=20,
        accuracy={0: 0.5, 10: 0.75},
        n=4,
        steps_to_target=None,
        seconds_to_target=None,
        step_s=0.5,
        cpu_s=4.0,
        means={"reward_mean": 0.5},
        binned={"reward_mean": [0.25, 0.5]},
    )
    return msgspec.structs.replace(plain, **changes)


def test_the_target_is_reached_on_the_line_between_two_evaluations() -> None:
    # From 0.6 at step 5 to 1.0 at step 10: 0.9 is three quarters of the way, 5 + 0.75 * 5.
    assert reached_at({0: 0.5, 5: 0.6, 10: 1.0, 15: 0.8}, 0.9) == pytest.approx(8.75)
    assert reached_at({10: 0.95, 0: 0.9}, 0.9) == 0.0
    assert reached_at({0: 0.1, 5: 0.89}, 0.9) is None
    # It fell back and came again: the first time counts.
    assert reached_at({0: 0.8, 5: 0.9, 10: 0.7, 15: 0.9}, 0.9) == pytest.approx(5.0)


def test_an_interval_is_students() -> None:
    # Of 1, 2, 3: mean 2, deviation 1, t of two degrees of freedom 4.303, half width 4.303 / sqrt(3).
    found = interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.high - 2.0 == pytest.approx(4.303 / math.sqrt(3))
    assert 2.0 - found.low == pytest.approx(4.303 / math.sqrt(3))
    assert interval([0.7]) == (0.7, 0.7, 0.7)
    with pytest.raises(ValueError, match="0 values"):
        interval([])


def test_curves_are_means_over_seeds_where_all_have_a_value() -> None:
    runs = [made(), made(seed=1, accuracy={0: 0.7, 5: 0.9, 10: 0.25}, binned={"reward_mean": [0.75, 1.0]})]
    assert {step: point.value for step, point in mean_accuracy(runs).items()} == pytest.approx({0: 0.6, 10: 0.5})
    # Bins of ten steps stand at their middles.
    assert {x: point.value for x, point in mean_binned(runs, "reward_mean").items()} == {5.0: 0.5, 15.0: 0.75}


def test_the_ratio_of_steps_is_taken_seed_by_seed() -> None:
    baseline = [made(steps_to_target=10.0), made(seed=1, steps_to_target=40.0), made(seed=2, steps_to_target=5.0)]
    stale = [made(steps_to_target=12.0), made(seed=1, steps_to_target=40.0)]
    ratio = steps_ratio(stale, baseline)
    assert ratio is not None
    assert ratio["value"] == pytest.approx((12 / 10 + 40 / 40) / 2)
    assert steps_ratio([*stale, made(seed=2)], baseline) is None  # one never arrived
    assert steps_ratio([made(seed=7, steps_to_target=1.0)], baseline) is None


def test_words_for_tables_and_titles() -> None:
    assert spread([1.0, None, 2.0], 1) == "1.5 (1.0-2.0)"
    assert spread([None], 1) == "-"
    assert told_seeds([1, 1]) == "1 seed"
    assert told_seeds([3, 1]) == "means of 1 to 3 seeds, bands 95 %"
    assert told_seeds([5, 5]) == "means of 5 seeds, bands 95 %"


Write = Callable[[Sequence[AdditionRun]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a results file of its own, with the settings {"steps": 10}."""
    monkeypatch.setattr(addition_runs, "RESULTS", tmp_path)
    monkeypatch.setattr(addition_runs, "sft_start", lambda: tmp_path)

    def write(runs: Sequence[AdditionRun]) -> None:
        content = {"settings": {"steps": 10}, "runs": [msgspec.to_builtins(run, str_keys=True) for run in runs]}
        (tmp_path / "trial.json").write_bytes(msgspec.json.encode(content))

    return write


def test_only_missing_runs_are_run(write: Write) -> None:
    ran: list[tuple[str, int]] = []

    def run(start: Path, case: str, seed: int) -> AdditionRun:
        ran.append((case, seed))
        return made(case, seed, cpu_s=float(len(ran)))

    def go(wanted: Sequence[tuple[str, int]], *, again: bool = False) -> list[AdditionRun]:
        return measured("trial", {"steps": 10}, wanted, again=again, run=run, write=write)

    go([("a", 0)])
    found = go([("a", 0), ("b", 0)])
    assert ran == [("a", 0), ("b", 0)]
    assert [(one.case, one.cpu_s) for one in found] == [("a", 1.0), ("b", 2.0)]
    assert earlier_runs("trial", {"steps": 10}) == found  # everything comes back as it was, whole steps as keys too
    go([("a", 0)], again=True)
    assert ran[2:] == [("a", 0)]
    assert [one.cpu_s for one in earlier_runs("trial", {"steps": 10})] == [3.0, 2.0]


def test_runs_of_other_settings_are_not_taken(write: Write) -> None:
    write([made()])
    assert len(earlier_runs("trial", {"steps": 10})) == 1
    assert earlier_runs("trial", {"steps": 20}) == []
    assert earlier_runs("absent", {"steps": 10}) == []


def test_runs_from_different_starts_or_with_nothing_to_learn_fail() -> None:
    check_start([made(), made(seed=1)])
    with pytest.raises(RuntimeError, match="no runs"):
        check_start([])
    with pytest.raises(RuntimeError, match="different accuracies before the first step"):
        check_start([made(), made("b", accuracy={0: 0.6, 10: 0.75})])
    with pytest.raises(RuntimeError, match="nothing is left to learn"):
        check_start([made(accuracy={0: 0.9, 10: 0.95})])


@pytest.mark.parametrize(("lag", "mean"), [(0, 0.5), (3, 0.0), (3, 1.4), (3, 3.5)])
def test_tokens_that_are_not_as_old_as_the_lag_fail(lag: int, mean: float) -> None:
    def run(lag: int, mean: float) -> AdditionRun:
        return made(case_of(lag, "default"), means={"policy_lag_mean": mean})

    check_lags([run(0, 0.0), run(3, 2.9)])
    with pytest.raises(RuntimeError, match=f"lag {lag}, default, seed 0: trained tokens were {mean:g} versions old"):
        check_lags([run(lag, mean)])


def test_cases_that_learn_in_the_same_way_fail() -> None:
    other = made("b", accuracy={0: 0.5, 10: 0.5})
    check_distinct([made("a"), other, made("a", seed=1)])
    with pytest.raises(RuntimeError, match="a, seed 0 and c, seed 0 have the same curves"):
        check_distinct([made("a"), other, made("c")])
