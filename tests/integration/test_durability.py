"""kill -9 at any time: the resumed run gives the same weights as an uninterrupted one."""

from __future__ import annotations

import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.training_process import RECIPE, RunningProcess, last_step, learned, quiet_run, summary

WITH_ADAPTER = """
[model.lora]
rank = 4
[algorithm]
kl_beta = 0.01
"""
AHEAD = """
[schedule]
max_policy_lag = 2
unfinished = "wait"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="whole"),
        # test_lora.py resumes adapters, and test_kill_and_resume.py runs ahead in virtual time.
        *(
            pytest.param(more, id=name, marks=pytest.mark.slow)
            for more, name in ((WITH_ADAPTER, "adapter"), (AHEAD, "ahead"))
        ),
    ],
)
def test_killed_at_random_moments_and_inside_a_checkpoint(more: str, recipe: Path, tmp_path: Path) -> None:
    text = RECIPE + more
    if more == AHEAD:  # samples so long that they span publishes
        text = text.replace("max_new_tokens = 12", "max_new_tokens = 48")
    recipe.write_text(text)
    quiet, torn = tmp_path / "quiet", tmp_path / "torn"
    quiet_run(recipe, quiet)
    expected = learned(quiet)
    assert expected[0]["optimizer_steps"] > 8  # training changed the weights, otherwise equality would show nothing
    rng = random.Random(0)
    kills = 0
    for wanted in (0, 2, 5):
        run = RunningProcess(recipe, torn)
        due = partial(has_told, run, wanted)
        kills += run.killed_when(due, after_s=rng.uniform(0.0, 0.15))
    assert kills >= 2, "the kills came too late to show anything"
    checkpoints = torn / "checkpoints"
    # The checkpoint of a small model takes milliseconds: the kill may miss it and then changes nothing.
    RunningProcess(recipe, torn).killed_when(lambda: any(checkpoints.glob(".writing-*")))
    RunningProcess(recipe, torn).ends(0)
    assert learned(torn) == expected
    assert summary(torn)["tokens_generated"] == summary(quiet)["tokens_generated"]
    assert not list(checkpoints.glob(".*"))


def has_told(run: RunningProcess, step: int) -> bool:
    """Whether this process has started and the run has reached a step."""
    return run.told("session_start") > 0 and last_step(run.run) >= step


@pytest.mark.timeout(200)
def test_a_run_is_interrupted_resumed_and_then_already_finished(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = RunningProcess(recipe, run)
    first.wait_until(lambda: last_step(run) >= 2, "step 2")
    first.signal(signal.SIGINT)
    first.ends(130)
    stopped = summary(run)
    assert stopped["interrupted"] is True
    assert 2 <= stopped["steps"] < 8
    assert (run / "checkpoints" / f"step_{stopped['steps']}").is_dir()
    RunningProcess(recipe, run).ends(0)
    assert summary(run)["steps"] == 8
    assert "already finished" in RunningProcess(recipe, run).ends(0)
    assert summary(run)["steps"] == 8


@pytest.mark.timeout(200)
def test_a_run_ends_after_its_hours_with_a_checkpoint_and_can_be_resumed(recipe: Path, tmp_path: Path) -> None:
    run, long = tmp_path / "run", ("--trainer.steps", "4000")
    out = RunningProcess(recipe, run, (*long, "--trainer.hours", "0.001")).ends(0)
    steps = summary(run)["steps"]
    assert "trainer.hours are over" in out
    assert 0 < steps < 4000
    assert (run / "checkpoints" / f"step_{steps}").is_dir()
    RunningProcess(recipe, run, ("--trainer.steps", str(steps + 2))).ends(0)
    assert summary(run)["steps"] == steps + 2


@pytest.mark.timeout(100)
def test_a_run_directory_belongs_to_one_configuration(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    quiet_run(recipe, run)
    before = (run / "metrics.jsonl").read_bytes()
    assert "batch.prompts = 8, the run has 4" in RunningProcess(recipe, run, ("--batch.prompts", "8")).ends(2)
    assert (run / "metrics.jsonl").read_bytes() == before
