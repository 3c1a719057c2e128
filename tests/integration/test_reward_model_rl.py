"""A run with a reward model of an earlier stage, and invalid reward models."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.integration.supervised_process import session, write_data
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.jobs.model_evaluation import evaluate
from tidemill.jobs.train import train
from tidemill.models.folder import DESCRIPTION
from tidemill.telemetry.metrics import read_metrics

CHAR = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 32}


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    short = {"trainer": {"steps": 6}}
    return Path(session(folder / "run", write_data(folder / "data.jsonl"), "reward_model", **short)["model"])


def rl_spec(directory: Path, *rewards: dict[str, Any], **model: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": {"dir": directory},
            "model": {"source": "char", "char": CHAR} | model,
            "task": {"kind": "arithmetic", "shots": 0},
            "sampling": {"max_new_tokens": 4},
            "scoring": {"rewards": rewards},
            "batch": {"prompts": 2, "group_size": 4},
            "trainer": {"steps": 2, "threads": 1},
            "eval": {"prompts": 4},
            "telemetry": {"live": False},
        }
    )


def test_training_with_a_reward_model(reward_folder: Path, tmp_path: Path) -> None:
    model = {"kind": "model", "model": str(reward_folder)}
    summary = train(rl_spec(tmp_path / "run", model, {"kind": "exact", "weight": 0.5}), telemetry_stream=StringIO())
    assert summary["finished"]
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line.step]
    assert len(lines) == 2
    assert all(line.values["samples_invalid"] == 0 for line in lines)
    assert all(line.values["reward_std"] > 0 for line in lines)  # a model distinguishes samples that `exact` does not
    samples = [json.loads(line) for line in (tmp_path / "run/samples/step_000001.jsonl").read_text().splitlines()]
    assert all(set(sample["components"]) == {"model", "exact"} for sample in samples)
    first = samples[0]
    assert first["reward"] == pytest.approx(first["components"]["model"] + 0.5 * first["components"]["exact"])
    held_out = (tmp_path / "run/samples/step_000000.eval-held_out.jsonl").read_text().splitlines()
    judged = [json.loads(line) for line in held_out]
    assert all(set(sample["components"]) == {"model", "exact"} for sample in judged)
    assert all(sample["reward"] == sample["components"]["exact"] for sample in judged)  # only the exact reward counts


def test_an_evaluation_reports_model_score_and_true_reward(reward_folder: Path, tmp_path: Path) -> None:
    found = evaluate(rl_spec(tmp_path / "run", {"kind": "model", "model": str(reward_folder)}))
    score = found["scores"]["model"]
    assert (score["invalid"], found["n"]) == (0, 4)
    assert score["low"] < score["value"] < score["high"]
    assert found["greedy_accuracy"] in (0.0, 0.25, 0.5, 0.75, 1.0)  # of exact answers


def test_a_model_without_a_head_is_refused_as_reward_model(tmp_path: Path, reward_folder: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in reward_folder.iterdir():
        if path.is_file() and path.name != DESCRIPTION:
            (plain / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"not a reward model: the folder has no tidemill\.json"):
        train(rl_spec(tmp_path / "run", {"kind": "model", "model": str(plain)}), telemetry_stream=StringIO())
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_reward_model_with_another_tokenizer_is_refused_with_a_hint(tmp_path: Path, reward_folder: Path) -> None:
    other = rl_spec(
        tmp_path / "run", {"kind": "model", "model": str(reward_folder)}, char=CHAR | {"alphabet": "+=0123456789\n"}
    )
    with pytest.raises(UserError, match="another tokenizer than the policy") as caught:
        train(other, telemetry_stream=StringIO())
    assert caught.value.where == "scoring.rewards[0].model"
    assert "reward_model stage" in caught.value.hint
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="another tokenizer than the policy"):
        evaluate(other)


def test_a_stage_named_outside_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='"stage:reward" names a stage') as caught:
        train(rl_spec(tmp_path / "run", {"kind": "model", "model": "stage:reward"}), telemetry_stream=StringIO())
    assert caught.value.where == "scoring.rewards[0].model"


def four_models(directory: Path, reward_folder: Path, **reading: Any) -> RunSpec:
    """Policy, reference, critic and reward model; completions of several chunks each."""
    spec = rl_spec(directory, {"kind": "model", "model": str(reward_folder)}).model_dump()
    changes: dict[str, Any] = {
        "sampling": {"max_new_tokens": 14},
        "algorithm": {"name": "ppo", "kl_beta": 0.1},
        "engine": {"tick_s": 1e-4},  # a report after every token
        "optimizer": {"learning_rate": 1e-3},
        "eval": {"prompts": 2, "every_steps": 0},
        "reading": {"ahead": True, "chunk_tokens": 4, **reading},
    }
    return RunSpec.model_validate(spec | {name: spec[name] | change for name, change in changes.items()})


def told(spec: RunSpec) -> list[tuple[str, dict[str, float]]]:
    """Weights and metrics of each step, without times."""
    assert train(spec, telemetry_stream=StringIO())["finished"]
    lines = [line for line in read_metrics(spec.directory / "metrics.jsonl") if line.step]
    skipped = ("time_", "cpu_", "tokens_per_s", "peak_rss", "tokens_read")
    return [
        (line.weights_digest, {name: value for name, value in line.values.items() if not name.startswith(skipped)})
        for line in lines
    ]


def test_reading_ahead_changes_only_timing(reward_folder: Path, tmp_path: Path) -> None:
    late = told(four_models(tmp_path / "late", reward_folder, cache_tokens=0))
    ahead = told(four_models(tmp_path / "ahead", reward_folder, own_thread=True))
    assert ahead == late
    assert late[0][1]["kl_ref"] == pytest.approx(0.0, abs=1e-6)  # the policy starts as the reference
    assert late[1][1]["kl_ref"] > 1e-6
    read = [line.values for line in read_metrics(tmp_path / "ahead" / "metrics.jsonl") if line.step]
    assert sum(values["tokens_read_ahead"] for values in read) > 0
    first = [line.values for line in read_metrics(tmp_path / "late" / "metrics.jsonl") if line.step]
    assert sum(values["tokens_read_ahead"] for values in first) == 0
    # Reward model and reference: prompt and completion of every sample, because nothing is cached.
    generated = [values["tokens_generated"] for values in first]
    assert all(values["tokens_read_late"] > 2 * tokens for values, tokens in zip(first, generated, strict=True))
    plain = told(four_models(tmp_path / "plain", reward_folder, ahead=False))
    assert plain[0][1]["reward_mean"] == pytest.approx(late[0][1]["reward_mean"], abs=1e-5)
    assert plain[1][1]["kl_ref"] == pytest.approx(late[1][1]["kl_ref"], rel=1e-3)
