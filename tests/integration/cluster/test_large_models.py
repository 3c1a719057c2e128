"""PPO on Ray with two trainer ranks, two ranks of a critic, a reference and a reward model, each on actors."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.contract.engine.engines import HAS_VLLM
from tests.integration.cluster import test_train
from tests.integration.cluster.test_critics import reward_folder
from tests.integration.cluster.test_train import all_gone, start, wait_for
from tests.processes import command_lines, processes_below
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.telemetry.metrics import read_metrics

pytestmark = pytest.mark.xdist_group("ray")

CHAR = {"hidden_size": 128, "layers": 2, "heads": 2, "context": 32}  # vLLM has no kernels for narrower heads


def spec_of(directory: Path, reward: Path, *, steps: int, vllm: bool = False) -> RunSpec:
    vllm_scores = {"scoring_engine": "vllm", "actor_tensor_parallel": 2, "reward_model": "driver"}
    return RunSpec.model_validate(
        {
            "runtime": "ray",
            "run": {"dir": directory},
            "model": {"source": "char", "char": CHAR},
            "task": {"kind": "arithmetic", "shots": 0},
            "sampling": {"max_new_tokens": 8},
            "engine": {"slots": 8, "tick_s": 1e-3},
            "scoring": {"rewards": [{"kind": "model", "model": str(reward)}]},
            "batch": {"prompts": 4, "group_size": 2, "microbatch_tokens": 32},
            "algorithm": {"name": "ppo", "kl_beta": 0.1},
            "critic": {"kind": "own", "learning_rate": 1e-3},
            "optimizer": {"learning_rate": 1e-3},
            "placement": {"critic": "actor", "reference": "actor", "reward_model": "actor"}
            | (vllm_scores if vllm else {}),
            "reading": {"ahead": not vllm, "chunk_tokens": 4},
            "trainer": {"steps": steps, "threads": 1, "shards": 2},
            "eval": {"prompts": 1, "every_steps": 0},
            "checkpoint": {"every_steps": 1},
            "telemetry": {"live": False},
        }
    )


@pytest.fixture(autouse=True)
def more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven actors start on two cores."""
    monkeypatch.setattr(test_train, "DEADLINE_S", 240.0)


@pytest.mark.slow  # tests/integration/trainer/test_large_models.py, without Ray
@pytest.mark.timeout(600)
def test_a_run_with_four_models_whose_critic_loses_a_rank_is_resumed(tmp_path: Path) -> None:
    reward, directory, recipe = reward_folder(tmp_path / "reward", CHAR), tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(to_toml(spec_of(directory, reward, steps=1000)))
    process = start(recipe, directory)
    wait_for(process, directory, "checkpoint", session=1)
    names = command_lines(processes_below(process.pid))
    for actor in ("TrainerActor", "CriticActor", "FrozenScorerActor"):
        assert sum(f"ray::{actor}" in name for name in names.values()) == 2, names
    os.kill(max(pid for pid, name in names.items() if "ray::CriticActor" in name), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    error = json.loads(out)["error"]
    assert error["kind"] == "lost"
    assert "died: its process was killed (SIGKILL or out of memory)" in error["message"]
    assert "the critic's rank " in error["message"]
    all_gone(list(names), within_s=5)

    reached = read_metrics(directory / "metrics.jsonl")[-1].step
    recipe.write_text(to_toml(spec_of(directory, reward, steps=reached + 1)))
    second = start(recipe, directory)
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, (out, err)
    (*_, last) = read_metrics(directory / "metrics.jsonl")
    assert last.step == reached + 1
    assert last.values["kl_ref"] > 0
    assert last.values["value_grad_norm"] > 0
    assert last.values["time_critic_wait_s"] > 0


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed; `make test-vllm` runs this")
@pytest.mark.timeout(600)
def test_two_ranks_of_vllm_score_beside_two_trainer_ranks_also_after_their_actor_was_killed(tmp_path: Path) -> None:
    reward, directory, recipe = reward_folder(tmp_path / "reward", CHAR), tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text(to_toml(spec_of(directory, reward, steps=12, vllm=True)))
    process = start(recipe, directory)
    wait_for(process, directory, "checkpoint", session=1)
    names = command_lines(processes_below(process.pid))
    (actor,) = (pid for pid, name in names.items() if "ray::FrozenScorerActor" in name)
    ranks = list(processes_below(actor))
    assert len(ranks) >= 2
    os.kill(actor, signal.SIGKILL)
    all_gone(ranks, within_s=5)
    wait_for(process, directory, "reader_restart", session=1)
    while process.poll() is None:
        names |= command_lines(processes_below(process.pid))
        time.sleep(0.2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert {event["who"] for event in events if event["event"] == "reader_restart"} == {"reference"}
    lines = [line for line in read_metrics(directory / "metrics.jsonl") if line.step]
    assert lines[0].values["kl_ref"] == pytest.approx(0.0, abs=1e-6), "the policy is still the reference"
    assert lines[-1].values["kl_ref"] > 1e-6
    assert all(line.values["reward_std"] > 0 for line in lines)
    all_gone(list(names), within_s=5)
