from __future__ import annotations

import json
from pathlib import Path

from tests.fabricated_run import HELD_OUT, FabricatedRun
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.report.pages import facts, findings
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import read_samples


def test_a_run_killed_and_resumed_counts_each_step_once(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    summary = run.read_summary()
    files = [path for _, purpose, path in run.sample_files() if purpose == "train"]
    tokens = sum(sample.length for path in files for sample in read_samples(path))
    assert len(files) == 20
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (tokens, tokens)
    assert (summary["steps"], summary["optimizer_steps"], summary["policy_version"]) == (20, 20, 20)
    assert (summary["outcome"], summary["finished"], summary["interrupted"]) == ("finished", True, False)
    assert (summary["model"], summary["seed"], summary["sessions"]) == ("smollm2-135m", 0, 2)


def test_wall_time_is_over_all_sessions_without_the_hours_between(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path)
    run = fabricated.make()
    # The whole fake time without the 3600 s in which no process ran.
    assert abs(run.read_summary()["wall_s"] - (fabricated.clock.now_s - 3600.0)) < 0.01


def test_training_time_leaves_evaluation_and_checkpoints_out(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    summary = run.read_summary()
    # In the fabricated run a step is nothing but rollout and training.
    assert abs(summary["training_s"] - summary["time"]["rollout_s"] - summary["time"]["train_s"]) < 0.01


def test_accuracy_before_after_and_best(tmp_path: Path) -> None:
    run = FabricatedRun(tmp_path).make()
    measured = {}
    for step, purpose, path in run.sample_files():
        if purpose == "eval-held_out":
            measured[step] = sum(sample.reward or 0.0 for sample in read_samples(path)) / HELD_OUT
    found = run.read_summary()["eval"]
    for when, step in (("before", 0), ("after", 20)):
        assert (found[when]["step"], found[when]["n"]) == (step, HELD_OUT)
        assert found[when]["greedy_accuracy"] == found[when]["reward_mean"] == measured[step]
    assert found["best"]["reward_mean"] == max(measured.values())
    assert found["n"] == HELD_OUT


def test_the_peak_is_the_largest_of_all_sessions(tmp_path: Path) -> None:
    data = RunData.load(FabricatedRun(tmp_path, steps=2).make())
    for own, largest in ((1, 2_900_000_000), (10**10, 10**10)):
        summary = data.summarize(outcome="finished", total_steps=2, peak_rss_bytes=own)
        assert summary["peak_rss_bytes"] == largest


def test_a_run_without_a_step_has_a_summary_too(tmp_path: Path) -> None:
    summary = RunData.load(RunDirectory(tmp_path / "demo")).summarize(outcome="interrupted", total_steps=20)
    assert (summary["run"], summary["steps"], summary["interrupted"]) == ("demo", 0, True)
    nothing = dict.fromkeys(("step", "reward_mean", "reward_stderr", "greedy_accuracy", "n"))
    assert summary["eval"] == {
        "before": nothing,
        "after": nothing,
        "best": nothing,
        "n": 0,
    }
    assert summary["tokens_per_s"] is None and summary["wall_s"] == 0.0


def test_an_evaluation_before_the_first_step_is_not_one_after(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text('{"step":0,"eval/reward_mean":0.25,"eval/n":8}\n')
    found = RunData.load(run).summarize(outcome="running", total_steps=20)["eval"]
    assert found["before"]["reward_mean"] == 0.25 and found["after"]["reward_mean"] is None
    assert found["before"]["greedy_accuracy"] is None
    assert found["n"] == 8 and len(read_metrics(run.metrics)) == 1


def test_the_share_of_time_the_trainer_was_idle(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = [(1, 4.0, 3.0), (2, 2.0, 0.5), (3, 2.0, 0.0)]
    run.metrics.write_text(
        "".join(f'{{"step":{step},"time_step_s":{s},"time_trainer_idle_s":{idle}}}\n' for step, s, idle in lines)
    )
    # 3.5 of 8 s
    assert RunData.load(run).summarize(outcome="finished", total_steps=3)["trainer_idle_share"] == 0.4375
    run.metrics.write_text('{"step":1,"time_step_s":4.0}\n')  # a supervised run
    assert RunData.load(run).summarize(outcome="finished", total_steps=1)["trainer_idle_share"] is None


def test_the_rows_of_the_newest_session_are_in_the_summary_and_the_report(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    old, new = (
        json.dumps({"event": "data", "session": 1, "training": rows, "held_out": 2, "left_out": {"repeated": 3},
                    "rows": 9, "missing": {"rubric": 4}, "warnings": ["4 of 9 rows have no `rubric`"]})
        for rows in (3, 4)
    )  # fmt: skip
    run.events.write_text(f"{old}\n{new}\n")
    data = RunData.load(run)
    assert data.summary["data"] == {
        "training": 4, "held_out": 2, "left_out": {"repeated": 3}, "rows": 9, "missing": {"rubric": 4},
    }  # fmt: skip
    assert dict(facts(data))["Data"].startswith("4 training rows, 2 held out; left out: 3 repeated;")
    assert [found.text for found in findings(data)] == ["4 of 9 rows have no `rubric`."]
