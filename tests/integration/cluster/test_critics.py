"""PPO on Ray: a critic in an actor, a value head on the policy, and a reward model in the controller's process."""

from __future__ import annotations

import json
import os
import signal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster.test_train import all_gone, start, wait_for
from tests.integration.test_critics import ppo, run
from tests.processes import command_lines, processes_below
from tidemill.config.model import CharModelConfig
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.jobs.train import train
from tidemill.models.builtin import build_char_model
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import reward_head, save_head
from tidemill.telemetry.metrics import MetricLine, read_metrics

pytestmark = pytest.mark.xdist_group("ray")

ON_RAY = ("--runtime=ray", "--placement.critic=actor", "--trainer.steps=4000")


def by_step(lines: list[MetricLine]) -> list[tuple[int, str, float, float]]:
    return [
        (line.step, line.weights_digest, line.values["value_loss"], line.values["value_grad_norm"]) for line in lines
    ]


def every_sample_alone(directory: Path, steps: int, *, checkpoint_every: int = 0) -> RunSpec:
    """A microbatch holds one sample, so that every process computes it in the same shape."""
    spec = ppo(directory, steps=steps, critic={"kind": "own"})
    batch = spec.batch.model_copy(update={"microbatch_tokens": 4, "epochs": 2})
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": checkpoint_every})
    return spec.model_copy(update={"batch": batch, "checkpoint": checkpoint})


@pytest.mark.slow  # tests/integration/test_critics.py resumes a critic in one process
def test_a_critic_in_an_actor_trains_the_same_policy_also_after_it_was_killed(tmp_path: Path) -> None:
    """The run starts in one process, continues on Ray until the critic is killed, and ends in one process."""
    directory, recipe = tmp_path / "parts", tmp_path / "recipe.toml"
    run(every_sample_alone(directory, 2))
    recipe.write_text(to_toml(every_sample_alone(directory, 2, checkpoint_every=1)))
    process = start(recipe, directory, *ON_RAY)
    wait_for(process, directory, "checkpoint", session=2)
    names = command_lines(processes_below(process.pid))
    (critic,) = (pid for pid, name in names.items() if "ray::CriticActor" in name)
    os.kill(critic, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    error = json.loads(out)["error"]
    assert error["kind"] == "lost"
    assert "the critic died: its process was killed (SIGKILL or out of memory)" in error["message"]
    assert "run the same command again" in error["message"]
    all_gone(list(names), within_s=5)

    reached = read_metrics(directory / "metrics.jsonl")[-1].step
    assert reached > 2
    assert all(line.values["time_critic_wait_s"] > 0 for line in read_metrics(directory / "metrics.jsonl")[3:])
    parts = run(every_sample_alone(directory, reached + 1))
    assert by_step(parts) == by_step(run(every_sample_alone(tmp_path / "whole", reached + 1)))


def reward_folder(folder: Path, model: dict[str, Any]) -> Path:
    folder.mkdir()
    build_char_model(CharModelConfig.model_validate(model), folder)
    digest = load_codec(folder).vocabulary_digest
    save_head(folder, reward_head(model["hidden_size"]), kind="reward_model", pooling="last_token",
              vocabulary_digest=digest)  # fmt: skip
    return folder


@pytest.mark.slow  # tests/integration/test_critics.py trains both in one process
def test_a_value_head_and_a_reward_model_give_the_same_run_on_ray(tmp_path: Path) -> None:
    """The reward model is in the controller's process, the critic's head in the trainer's."""
    small = ppo(tmp_path, critic={"kind": "shared"})
    reward = reward_folder(tmp_path / "reward", small.model.char.model_dump())
    scoring = {"rewards": [{"kind": "model", "model": str(reward)}]}
    lines = {}
    for runtime in ("inprocess", "ray"):
        given = small.model_dump() | {"runtime": runtime, "scoring": scoring}
        given["run"]["dir"] = tmp_path / runtime
        given["trainer"]["steps"] = 2
        spec = RunSpec.model_validate(given)
        assert train(spec, telemetry_stream=StringIO())["finished"]
        lines[runtime] = [line for line in read_metrics(spec.directory / "metrics.jsonl") if line.step]
    for here, there in zip(lines["inprocess"], lines["ray"], strict=True):
        assert here.values["reward_std"] > 0
        for name in ("reward_mean", "reward_std", "value_loss", "loss", "grad_norm"):
            # timing decides which samples a reward model scores together, and so the rounding
            assert there.values[name] == pytest.approx(here.values[name], rel=1e-3, abs=1e-5)
