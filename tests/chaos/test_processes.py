"""A run with preemptible workers is killed, interrupted and runs out of disk space, and gives the same weights."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.training_process import RECIPE, RunningProcess, last_step, learned, quiet_run, summary

STEPS = 30
SETTINGS = (
    *("--trainer.steps", str(STEPS), "--model.char.hidden_size", "32", "--engine.slots", "4"),
    *("--batch.minibatches", "1", "--eval.every_steps", "8", "--checkpoint.every_steps", "5"),
)
POOL = """
[pool]
kind = "synthetic"
workers = 3
mean_time_to_eviction_s = 0.6
mean_time_to_return_s = 0.1
noticed = 0.4
notice_s = 0.2
[fleet]
seed_window_s = 0.1
drain_margin_s = 0.1
queue_limit = 1
"""


def killed(run: RunningProcess, rng: random.Random) -> None:
    run.wait_for(rng.choice(["join", "pull", "eviction", "notice", "publish", "checkpoint"]))
    time.sleep(rng.uniform(0.0, 0.5))
    run.signal(signal.SIGKILL)
    run.ends(-signal.SIGKILL)


def interrupted(run: RunningProcess, rng: random.Random) -> None:
    run.wait_for("eviction", rng.randint(1, 2))
    run.wait_until(lambda: last_step(run.run) > 0, "a step")  # before the first step there is nothing to checkpoint
    run.signal(signal.SIGINT)
    run.ends(130)
    said = summary(run.run)
    assert said["interrupted"] is True
    assert (run.run / "checkpoints" / f"step_{said['steps']}").is_dir()


def out_of_room(run: RunningProcess, rng: random.Random) -> None:
    said = run.ends(2)
    (error,) = re.findall(r"^error: .*", said, re.MULTILINE)
    assert "the ledger cannot be written" in error
    assert "run the same command again" in said
    assert "Traceback" not in said


DEATHS = (killed, interrupted, killed, out_of_room)


@pytest.mark.slow  # test_durability.py kills and interrupts runs; test_faults.py fills the disk in virtual time
@pytest.mark.timeout(1500)
def test_a_run_killed_repeatedly_gives_the_same_weights(tmp_path: Path, chaos_rounds: int) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    quiet_run(recipe, tmp_path / "quiet", *SETTINGS)
    expected = learned(tmp_path / "quiet")
    assert (
        expected[0]["optimizer_steps"] > STEPS / 2
    )  # training changed the weights, otherwise equality would show nothing
    recipe.write_text(RECIPE + POOL)
    for each in range(chaos_rounds):
        rng, run = random.Random(each), tmp_path / f"torn-{each}"
        for death in rng.sample(DEATHS, len(DEATHS)):
            limit = rng.randint(20_000, 200_000) if death is out_of_room else None
            death(RunningProcess(recipe, run, SETTINGS, file_bytes=limit), rng)
        RunningProcess(recipe, run, SETTINGS).ends(0)

        assert learned(run) == expected
        assert summary(run)["evictions"] > 3
        assert not list((run / "checkpoints").glob(".*"))
