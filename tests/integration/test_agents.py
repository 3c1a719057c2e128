"""Agents: kill -9 of the run and evictions of its workers change no token, observation, reward or weight."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_durability import has_told
from tests.training_process import RunningProcess, learned, quiet_run

RECIPE = """\
[model]
source = "char"
[model.char]
hidden_size = 64
layers = 2
[task]
kind = "environment"
train_size = 40
held_out_size = 8
[env]
name = "guess"
turns = 4
turn_tokens = 3
observation_tokens = 16
[scoring]
rewards = [{ kind = "environment" }, { kind = "regex", pattern = '^\\d', weight = 0.5 }]
[sampling]
max_new_tokens = 12
[engine]
slots = 16
batch_invariant = true
tick_s = 0.02
[batch]
prompts = 4
group_size = 4
[optimizer]
learning_rate = 1e-3
[trainer]
steps = 6
threads = 1
[eval]
every_steps = 3
prompts = 4
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["event"] == name]


@pytest.mark.slow  # tests/unit/controller/test_turns.py kills agents at every write, in virtual time
@pytest.mark.timeout(400)
def test_killed_at_random_moments_and_evicted_a_run_learns_the_same(recipe: Path, tmp_path: Path) -> None:
    quiet, torn, evicted = tmp_path / "quiet", tmp_path / "torn", tmp_path / "evicted"
    quiet_run(recipe, quiet)
    expected = learned(quiet)
    assert expected[0]["optimizer_steps"] > 3  # training changed the weights, otherwise equality would show nothing
    rng = random.Random(0)
    kills = 0
    for wanted in (0, 1, 3, 4):
        run = RunningProcess(recipe, torn)
        kills += run.killed_when(partial(has_told, run, wanted), after_s=rng.uniform(0.0, 0.3))
    assert kills >= 3, "the kills came too late to show anything"
    RunningProcess(recipe, torn).ends(0)
    assert learned(torn) == expected

    quiet_run(
        recipe,
        evicted,
        "--pool.kind=synthetic",
        "--pool.mean_time_to_eviction_s=0.3",
        "--pool.mean_time_to_return_s=0.1",
        "--fleet.seed_window_s=0.1",
    )
    assert len(events(evicted, "lease_end")) > 10
    assert learned(evicted) == expected
