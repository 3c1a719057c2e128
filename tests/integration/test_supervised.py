"""Supervised stages as whole runs: their directory, a resume after kill -9, Ctrl-C, and bad input."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.forked import Forked
from tests.integration.supervised_process import newest, session, write_data
from tidemill.core.errors import UserError
from tidemill.models.codec import load_codec
from tidemill.models.loading import load_model
from tidemill.models.reward_model import load_reward_model, sequence_scores
from tidemill.models.tree_forward import TreeForward
from tidemill.telemetry.metrics import read_metrics
from tidemill.trainer.objectives import SupervisedKind

PROCESS = "tests.integration.supervised_process:main"
CPU = torch.device("cpu")


def test_sft_logs_its_progress_and_returns_a_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = session(run, write_data(tmp_path / "data.jsonl"), "sft")
    assert {path.name for path in run.iterdir()} >= {
        "config.toml", "manifest.json", "events.jsonl", "metrics.jsonl", "summary.json", "report.html", "checkpoints",
    }  # fmt: skip
    lines = read_metrics(run / "metrics.jsonl")
    assert [line.step for line in lines] == list(range(25))
    assert lines[-1].values["eval/loss"] < lines[0].values["eval/loss"]
    assert (summary["steps"], summary["total_steps"], summary["outcome"]) == (24, 24, "finished")
    assert summary["held_out"]["loss"] == pytest.approx(min(line.values.get("eval/loss", 9) for line in lines), abs=0.2)
    load_model(Path(summary["model"]), device=CPU)
    assert json.loads((run / "summary.json").read_text())["model"] == summary["model"]
    page = (run / "report.html").read_text()
    assert "Held-out loss went from" in page
    assert "Token accuracy" in page
    view = (tmp_path / "view.txt").read_text()
    assert "step 24/24" in view
    assert "held-out loss" in view
    again = session(run, tmp_path / "data.jsonl", "sft")
    assert again["already_finished"]


def test_sft_learns_the_turns_of_conversations(tmp_path: Path) -> None:
    data = tmp_path / "turns.jsonl"
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "completion": [
                {"role": "assistant", "content": f"{a + b}"},
                {"role": "user", "content": "=\n"},
                {"role": "assistant", "content": f"{a}\n"},
            ],
        }
        for a in range(8)
        for b in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    session(tmp_path / "run", data, "sft")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [line.values for line in lines if line.values.get("tokens_trained")]
    assert steps[-1]["loss"] < steps[0]["loss"]
    # One or two digits and the end token; then a digit, a new line and the end token. The user's "=" and "\n" are not
    # trained.
    assert all(5 <= step["tokens_trained"] / step["examples"] <= 6 for step in steps)


@pytest.mark.slow  # test_pipelines.py trains one, which raises the true reward
def test_a_reward_model_ranks_answers_and_scores_text(tmp_path: Path) -> None:
    longer = {"trainer": {"steps": 120}, "supervised": {"evaluate_every_steps": 20, "minibatch_tokens": 200}}
    summary = session(tmp_path / "run", write_data(tmp_path / "data.jsonl"), "reward_model", **longer)
    folder = Path(summary["model"])
    reward, codec = load_reward_model(folder, device=CPU), load_codec(folder)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1].values["pairwise_accuracy"] > 0.9  # of the training pairs
    sides = [np.array(codec.encode(text), np.int32) for text in ("2+3=5\n", "2+3=6\n")]
    stop = np.array(codec.stop_token_ids[:1], np.int32)
    sequences = [np.concatenate([side, stop]) for side in sides]
    right, wrong = sequence_scores(TreeForward(reward.model), reward.head, sequences)[0]
    assert right > wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo"])
def test_a_stage_killed_at_random_times_gives_the_same_weights(kind: SupervisedKind, tmp_path: Path) -> None:
    with Forked("killed", str(tmp_path), kind, target=PROCESS) as lives:
        out, err = lives.communicate(timeout=118)
    assert lives.returncode == 0, out + err
    uninterrupted, resumed, kills = out.split()[-3:]
    assert resumed == uninterrupted
    assert int(kills) >= 3  # at most 7 of 24 steps between kills
    calm, wild = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("calm", "wild"))
    assert [(line.step, line.weights_digest) for line in wild] == [(line.step, line.weights_digest) for line in calm]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_stage_with_a_checkpoint_and_exit_code_130(number: signal.Signals, tmp_path: Path) -> None:
    with Forked("run", str(tmp_path), "sft", target=PROCESS) as stage:
        deadline = time.monotonic() + 60
        while newest(tmp_path / "run") < 4 and time.monotonic() < deadline and stage.poll() is None:
            time.sleep(0.01)
        stage.send_signal(number)
        out, err = stage.communicate(timeout=60)
    assert stage.returncode == 130, out + err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert summary["steps"] == newest(tmp_path / "run")  # the last step is checkpointed
    assert "the same command resumes it" in (tmp_path / "view.txt").read_text()


def test_a_resumed_stage_refuses_other_data_and_settings(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl")
    session(tmp_path / "run", data, "sft")
    with pytest.raises(UserError, match="another configuration"):
        session(tmp_path / "run", data, "sft", optimizer={"learning_rate": 1e-2})
    data.write_text(data.read_text().replace("0+1=", "9+1="))
    with pytest.raises(UserError, match="examples have changed") as caught:
        session(tmp_path / "run", data, "sft")
    assert caught.value.where == "data.path"


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        session(tmp_path / "run", tmp_path / "nothing.jsonl", "sft")
    assert "nothing.jsonl" in str(caught.value)


@pytest.mark.parametrize("kind", ["sft", "reward_model", "dpo"])
def test_an_adapter_stage_exports_a_plain_model(kind: SupervisedKind, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    data = write_data(tmp_path / "data.jsonl")
    lora: dict[str, dict[str, Any]] = {"model": {"lora": {"rank": 4}}, "trainer": {"steps": 4}}
    summary = session(tmp_path / "run", data, kind, **lora)
    model = load_model(Path(summary["model"]), device=CPU)
    assert not any("lora" in name for name, _ in model.named_parameters())
    if kind == "reward_model":
        reward = load_reward_model(Path(summary["model"]), device=CPU)
        assert reward.head.bias.abs().item() > 0  # the trained head, not a new one
    again = session(tmp_path / "run", data, kind, **lora)
    assert (again["already_finished"], again["model"]) == (True, summary["model"])
