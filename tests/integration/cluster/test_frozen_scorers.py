"""Reward model and reference in actors give the same run as in one process, also when both are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster.test_critics import reward_folder
from tests.integration.cluster.test_train import all_gone, start, wait_for
from tests.integration.test_critics import run
from tests.integration.test_reward_model_rl import CHAR
from tests.processes import command_lines, processes_below
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.telemetry.metrics import MetricLine, read_metrics

pytestmark = pytest.mark.xdist_group("ray")

STEPS = 10
ON_ACTORS = ("--runtime=ray", "--placement.reward_model=actor", "--placement.reference=actor")


def spec_of(directory: Path, reward: Path) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"dir": directory},
            "model": {"source": "char", "char": CHAR},
            "task": {"kind": "arithmetic", "shots": 0},
            "sampling": {"max_new_tokens": 14},
            "engine": {"batch_invariant": True, "slots": 8, "tick_s": 1e-3},
            "scoring": {"rewards": [{"kind": "model", "model": str(reward)}]},
            "batch": {"prompts": 2, "group_size": 4},
            "algorithm": {"kl_beta": 0.1},
            "optimizer": {"learning_rate": 1e-3},
            "reading": {"ahead": True, "chunk_tokens": 4},
            "trainer": {"steps": STEPS, "threads": 1},
            "eval": {"prompts": 1, "every_steps": 0},
            "checkpoint": {"every_steps": 1},
            "telemetry": {"live": False},
        }
    )


def learned(lines: list[MetricLine]) -> list[tuple[Any, ...]]:
    names = ("reward_mean", "reward_std", "kl_ref", "loss", "grad_norm")
    return [(line.step, line.weights_digest, *(line.values[name] for name in names)) for line in lines if line.step]


@pytest.mark.slow  # tests/unit/runtime/cluster/test_frozen_scorer*.py, without Ray
def test_frozen_models_in_actors_give_the_same_run_and_are_restarted_when_they_die(tmp_path: Path) -> None:
    reward = reward_folder(tmp_path / "reward", CHAR)
    recipe, directory = tmp_path / "recipe.toml", tmp_path / "ray"
    recipe.write_text(to_toml(spec_of(directory, reward)))
    process = start(recipe, directory, *ON_ACTORS)
    wait_for(process, directory, "checkpoint", session=1)
    names = command_lines(processes_below(process.pid))
    actors = [pid for pid, name in names.items() if "ray::FrozenScorerActor" in name]
    assert len(actors) == 2
    for actor in actors:
        os.kill(actor, signal.SIGKILL)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, (out, err)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    restarts = {event["who"]: event["cause"] for event in events if event["event"] == "reader_restart"}
    assert set(restarts) == {"reward model", "reference"}
    assert all("its process was killed" in cause for cause in restarts.values())
    all_gone(list(names), within_s=5)

    there = read_metrics(directory / "metrics.jsonl")
    assert sum(line.values["tokens_read_ahead"] for line in there if line.step) > 0
    assert learned(there) == learned(run(spec_of(tmp_path / "inprocess", reward)))
