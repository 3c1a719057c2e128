"""PPO with both kinds of critic as whole runs, and invalid critics."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.model import CharModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.train import train
from tidemill.models.builtin import build_char_model
from tidemill.telemetry.metrics import MetricLine, read_metrics

CHAR = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 32}


def ppo(directory: Path, *, steps: int = 4, critic: dict[str, Any], **algorithm: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"dir": directory},
            "model": {"source": "char", "char": CHAR},
            "task": {"kind": "arithmetic", "shots": 0},
            "sampling": {"max_new_tokens": 4},
            "scoring": {"rewards": [{"kind": "length", "target_tokens": 2}]},
            "engine": {"batch_invariant": True},
            "batch": {"prompts": 4, "group_size": 2, "minibatches": 2},
            "algorithm": {"name": "ppo"} | algorithm,
            "critic": {"learning_rate": 1e-3} | critic,
            "optimizer": {"learning_rate": 1e-3},
            "trainer": {"steps": steps, "threads": 1},
            "checkpoint": {"every_steps": 1},
            "eval": {"every_steps": 0, "prompts": 2},
            "telemetry": {"live": False},
        }
    )


def run(spec: RunSpec) -> list[MetricLine]:
    assert train(spec, telemetry_stream=StringIO())["finished"]
    return [line for line in read_metrics(spec.directory / "metrics.jsonl") if line.step]


@pytest.mark.parametrize("critic", [{"kind": "own"}, {"kind": "shared"}, {"kind": "own", "normalize": True}])
def test_a_critic_is_trained_with_the_policy_and_resumed(critic: dict[str, Any], tmp_path: Path) -> None:
    whole = run(ppo(tmp_path / "whole", critic=critic))
    assert all({"value_loss", "explained_variance", "returns_mean"} <= line.values.keys() for line in whole)
    assert all(line.optimizer_steps == 2 for line in whole)
    assert len({line.weights_digest for line in whole}) == 4
    run(ppo(tmp_path / "parts", steps=2, critic=critic))
    parts = run(ppo(tmp_path / "parts", critic=critic))
    assert [line.weights_digest for line in parts] == [line.weights_digest for line in whole]
    losses = [(line.values["value_loss"], line.values["explained_variance"]) for line in whole]
    assert [(line.values["value_loss"], line.values["explained_variance"]) for line in parts] == losses


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_the_policy_is_unchanged_during_critic_warmup(kind: str, tmp_path: Path) -> None:
    lines = run(ppo(tmp_path, critic={"kind": kind, "warmup_steps": 4}))
    assert [line.optimizer_steps for line in lines] == [0, 0, 2, 2]
    assert lines[0].weights_digest == lines[1].weights_digest != lines[2].weights_digest
    assert lines[0].values["explained_variance"] == pytest.approx(0.0, abs=1e-6)  # values of 0 explain nothing
    assert lines[1].values["explained_variance"] != pytest.approx(0.0, abs=1e-6)


def test_a_critic_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    build_char_model(CharModelConfig(alphabet="0123456789+=\n", hidden_size=16, layers=1, heads=2), tmp_path / "other")
    spec = ppo(tmp_path / "run", critic={"source": str(tmp_path / "other")})
    with pytest.raises(UserError, match="another tokenizer than the policy") as caught:
        train(spec, telemetry_stream=StringIO())
    assert caught.value.where == "critic.source"
    assert not (tmp_path / "run").exists()
