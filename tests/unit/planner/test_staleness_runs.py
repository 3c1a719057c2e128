from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import run_here
from tidemill.core.errors import UserError
from tidemill.planner.staleness import measure_run, measure_runs, slope_of


def write_run(path: Path, lag: int, rewards: list[float], *, train_s: float) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(f"[schedule]\nmax_policy_lag = {lag}\n", encoding="utf-8")
    lines = [
        json.dumps({"step": step, "reward_mean": reward, "time_train_s": train_s, "time_step_s": 2.0})
        for step, reward in enumerate(rewards, 1)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_slope_with_its_error() -> None:
    # x - 1: -1, 0, 1; y - 2: -2, 1, 1; slope 3 / 2; residuals -0.5, 1, -0.5: 1.5 / 1 / 2 = 0.75
    slope, error = slope_of([(0, 0), (1, 3), (2, 3)])
    assert slope == pytest.approx(1.5)
    assert error == pytest.approx(0.75**0.5)


def test_a_run_is_a_row(tmp_path: Path) -> None:
    row = measure_run(write_run(tmp_path / "a", 3, [0.1, 0.2, 0.3, 0.4, 0.5], train_s=1.5))
    assert (row.lag, row.utilisation) == (3, 0.75)
    assert row.reward_per_step == pytest.approx(0.1)
    assert row.uncertainty == pytest.approx(0, abs=1e-9)


def test_the_best_lag_of_runs(tmp_path: Path) -> None:
    # 0.02 a step at half the time against 0.015 at all of it: 0.03
    slow = write_run(tmp_path / "slow", 0, [0.02 * step for step in range(8)], train_s=1.0)
    fast = write_run(tmp_path / "fast", 2, [0.015 * step for step in range(8)], train_s=2.0)
    ran = run_here("plan", "staleness", "--runs", str(slow), "--runs", str(fast), "--json")
    assert ran.code == 0, ran.err
    assert ran.data["best_lag"] == 2
    assert ran.data["lags"][1]["progress"] == pytest.approx(0.03)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run there"):
        measure_run(tmp_path / "none")
    with pytest.raises(UserError, match="2 steps with a reward"):
        measure_run(write_run(tmp_path / "short", 0, [0.1, 0.2], train_s=1.0))
    with pytest.raises(UserError, match="no times"):
        measure_run(write_run(tmp_path / "idle", 0, [0.1] * 6, train_s=0.0))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("\ufeff[schedule]\nmax_policy_lag = 2\n", "config.toml:1: not valid TOML"),
        ("garbage", "config.toml:1: not valid TOML"),
        ("schedule = 3", "schedule: needs a table"),
        ('[schedule]\nmax_policy_lag = "x"', "schedule.max_policy_lag: needs integer"),
    ],
)
def test_a_run_whose_lag_cannot_be_read_is_refused(tmp_path: Path, config: str, says: str) -> None:
    run_dir = write_run(tmp_path / "a", 2, [0.1] * 6, train_s=1.0)
    (run_dir / "config.toml").write_text(config, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        measure_run(run_dir)
    assert says in str(caught.value)


def test_a_run_given_twice_is_no_repeat(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 0, [0.1] * 6, train_s=1.0)
    with pytest.raises(UserError, match="given twice"):
        measure_runs([run_dir, tmp_path / "b" / ".." / "a"])


def test_lines_of_one_step_are_one_step(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", 0, [0.1] * 6, train_s=1.0)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n' * 9, encoding="utf-8")
    with pytest.raises(UserError, match="1 step with a reward"):
        measure_run(run_dir)
