from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_run import FabricatedRun
from tidemill.core.errors import UserError
from tidemill.telemetry.comparison import (
    axes_of,
    changed_keys,
    check_number,
    comparison_json,
    final_figures,
    labels,
    paired_figures,
)
from tidemill.telemetry.run_data import RunData


def write_run(path: Path, *, steps: int = 3, config: str = "", events: list[dict[str, Any]] | None = None) -> RunData:
    """A run with a reward of step / 10 and ten tokens a step, each of which takes an hour."""
    (path / "samples").mkdir(parents=True)
    (path / "config.toml").write_text(config)
    lines = [
        {"step": step, "session": 1, "elapsed_s": 3600.0 * step, "reward_mean": step / 10, "tokens_generated": 10}
        for step in range(1, steps + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = {"event": "session_start", "session": 1, "elapsed_s": 0.0}
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [first, *(events or [])]))
    return RunData.read(path)


def write_evaluation(run: RunData, step: int, rewards: dict[str, float | None], name: str = "held_out") -> None:
    lines = [
        {"prompt_id": prompt, "prompt": prompt, "reward": reward, "valid": reward is not None}
        for prompt, reward in rewards.items()
    ]
    path = run.run.samples / f"step_{step:06d}.eval-{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_dollars_add_up_the_reserved_side_and_the_part_of_each_lease_that_has_passed(tmp_path: Path) -> None:
    config = "[fleet]\nreserved_usd_per_hour = 2.0\n"
    lease = {"session": 1, "lease": "a", "worker": "spot-0", "kind": "preemptible"}
    events = [
        {**lease, "event": "lease", "elapsed_s": 3600.0, "price_usd_per_hour": 1.0},
        {**lease, "event": "lease_end", "elapsed_s": 3 * 3600.0, "held_s": 7200.0, "cost_usd": 2.0},
    ]
    axes = axes_of(write_run(tmp_path / "a", config=config, events=events))
    assert axes == {
        "step": [1, 2, 3],
        "tokens": [10, 20, 30],
        "seconds": [3600, 7200, 10800],
        "dollars": [2.0, 4.0 + 1.0, 6.0 + 2.0],
    }
    assert "dollars" not in axes_of(write_run(tmp_path / "free"))


def test_the_axes_of_a_resumed_run_rise_and_end_at_its_summary(tmp_path: Path) -> None:
    run = RunData.read(FabricatedFleet(tmp_path).make().path)
    axes = axes_of(run)
    for values in axes.values():
        assert values == sorted(values)
    assert axes["tokens"][-1] == run.summary["tokens_generated"]
    assert axes["dollars"][-1] == pytest.approx(run.summary["cost_usd"], rel=0.02)


def test_a_curve_is_there_for_each_run_that_measured_the_metric(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", steps=2)
    text = (other.run.metrics.read_text()).replace("reward_mean", "my_reward")
    other.run.metrics.write_text(text)
    found = comparison_json([one, RunData.read(tmp_path / "other")])
    charts = {chart["metric"]: chart["series"] for chart in found["charts"]}
    assert [series["values"] for series in charts["reward_mean"]] == [[0.1, 0.2, 0.3], [None, None]]
    assert [series["values"] for series in charts["my_reward"]] == [[None, None, None], [0.1, 0.2]]
    assert ("Tokens of the batch: generated", 10.0) in found["constant"]


def test_long_runs_are_thinned_and_keep_their_last_step(tmp_path: Path) -> None:
    found = comparison_json([write_run(tmp_path / "long", steps=2000), write_run(tmp_path / "short")])
    steps = found["runs"][0]["axes"]["step"]
    assert len(steps) <= 601 and steps[0] == 1 and steps[-1] == 2000
    assert found["runs"][1]["axes"]["step"] == [1, 2, 3]


def test_rewards_are_paired_over_the_prompts_that_both_runs_have(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("base", "new", "elsewhere")]
    write_evaluation(runs[0], 1, {"p1": 9.0})  # not the last
    write_evaluation(runs[0], 3, {"p1": 0.0, "p2": 1.0, "p3": 0.0, "p4": None, "p5": 1.0})
    write_evaluation(runs[1], 3, {"p1": 1.0, "p2": 1.0, "p3": 1.0, "p4": 1.0, "p6": 0.0})
    write_evaluation(runs[2], 3, {"q1": 1.0})
    write_evaluation(runs[2], 3, {"q1": 1.0}, name="extra")
    ((name, run, pair),) = paired_figures(runs)
    assert (name, run, pair.n) == ("held_out", 1, 3)
    assert (pair.before, pair.after, pair.better, pair.worse) == (1 / 3, 1.0, 2, 0)
    assert pair.difference.value == pytest.approx(2 / 3)


def test_only_the_keys_that_differ_are_shown(tmp_path: Path) -> None:
    same = '[run]\nname = "x"\n[trainer]\nsteps = 3\n'
    one = write_run(tmp_path / "one", config=f"{same}learning_rate = 0.1\n")
    other = write_run(tmp_path / "other", config=f"{same}learning_rate = 0.2\n[pool]\nkind = 'static'\n")
    assert changed_keys([one, other]) == [("pool.kind", ["–", "static"]), ("trainer.learning_rate", ["0.1", "0.2"])]


def test_the_final_figures_have_intervals(tmp_path: Path) -> None:
    full = RunData.read(FabricatedRun(tmp_path / "full").make().path)
    bare = write_run(tmp_path / "bare")
    rows = dict(final_figures([full, bare]))
    assert rows["Steps"] == ["20 / 20", "3"] and rows["State"] == ["finished", "unknown"]
    after = rows["held-out accuracy, after"]
    assert " to " in after[0] and after[1] == "–"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    config = '[run]\nname = "run"\n'
    runs = [write_run(tmp_path / parent / "run", config=config) for parent in ("a", "b")]
    assert labels(runs) == ["a/run", "b/run"]


def test_a_comparison_needs_two_to_eight_different_runs(tmp_path: Path) -> None:
    paths = [tmp_path / str(at) for at in range(9)]
    for few_or_many in (paths[:1], paths):
        with pytest.raises(UserError, match=f"{len(few_or_many)} runs"):
            check_number(few_or_many)
    paths[0].mkdir()
    with pytest.raises(UserError, match="twice"):
        check_number([paths[0], paths[1], paths[0] / "." / ".." / "0"])
    shutil.rmtree(paths[0])
    check_number(paths[:8])
