"""A LoRA run from the command line: trained, evaluated, merged, and refused where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import Ran, run_here
from tests.integration.supervised_process import session, write_data
from tidemill.config.load import RECIPES, load_spec
from tidemill.config.model import ModelConfig
from tidemill.models.catalog import resolve
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import load_model
from tidemill.models.lora import frozen_parameters, learned_parameters
from tidemill.models.reward_model import load_reward_model
from tidemill.runtime.model_bundle import load_model_bundle
from tidemill.trainer.objectives import SupervisedKind

RECIPE = f"@{RECIPES / 'char-addition.toml'}"
LORA = "--model.lora.rank=4"
SHAPE = ("--trainer.steps=4", "--optimizer.learning_rate=3e-3", "--trainer.threads=1", "--eval.every_steps=2",
         "--checkpoint.every_steps=2", "--batch.prompts=4", "--task.held_out_fraction=0.9")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Path:
    """A finished run of four steps with a simulated worker."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    done(run_here("train", RECIPE, *SHAPE, LORA, "--pool.workers=1", f"--run.dir={folder}", "--json"))
    return folder


def done(ran: Ran) -> Any:
    assert ran.code == 0, ran.err
    return ran.data


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def test_a_run_publishes_adapters(run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    # 4 layers × rank 4 × (q, k, v, o: 4 × (128 + 128), gate, up, down: 3 × (128 + 352)) × 4 bytes
    assert {event["nbytes"] for event in events if event["event"] == "publish"} == {157_696}
    assert not [event for event in events if event["event"] == "quarantine"]


def test_eval_and_generate_load_an_adapter_checkpoint(run: Path) -> None:
    found = done(run_here("eval", "--checkpoint", str(run), "--json"))
    assert found["weights_digest"] == summary(run)["weights_digest"]
    assert found["greedy_accuracy"] == summary(run)["eval"]["after"]["greedy_accuracy"]
    assert found["model"] == str(run / "checkpoints" / "step_4")
    with_recipe = done(run_here("eval", RECIPE, *SHAPE, "--checkpoint", str(run / "checkpoints" / "step_4"), "--json"))
    assert with_recipe["weights_digest"] == found["weights_digest"]
    untrained = done(run_here("eval", RECIPE, *SHAPE, LORA, "--json"))
    assert untrained["weights_digest"] != found["weights_digest"]
    drawn = done(run_here("generate", "1+2=", "--checkpoint", str(run), "--json"))
    assert len(drawn["samples"]) == 1


def test_a_merged_model_can_be_a_model_source(run: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    assert done(run_here("model", "merge", str(run), str(merged), "--json"))["path"] == str(merged)
    here = done(run_here("eval", "--checkpoint", str(run), "--json"))
    there = done(run_here("eval", RECIPE, *SHAPE, f"--model.source={merged}", "--json"))
    assert [one["completion"] for one in there["samples"]] == [one["completion"] for one in here["samples"]]
    named = done(run_here("eval", RECIPE, *SHAPE, f"--model.source={run / 'checkpoints' / 'step_4'}", "--json"))
    assert named["weights_digest"] == there["weights_digest"]


@pytest.mark.slow  # tests/unit/trainer/test_lora.py resumes an adapter
def test_a_finished_run_is_resumed_with_more_steps(run: Path, tmp_path: Path) -> None:
    more = (*SHAPE[1:], LORA, "--trainer.steps=5")
    straight = done(
        run_here("train", RECIPE, *more, "--engine.batch_invariant=true", f"--run.dir={tmp_path / 'a'}", "--json")
    )
    first = ("--engine.batch_invariant=true", f"--run.dir={tmp_path / 'b'}", "--json")
    done(run_here("train", RECIPE, *SHAPE, LORA, *first))
    again = done(run_here("train", RECIPE, *more, *first))
    assert (again["sessions"], again["weights_digest"]) == (2, straight["weights_digest"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model.lora.rank=8"], "model.lora.rank = 8, the run has 4"),
        (["--model.lora.rank=0"], "model.lora.rank = 0, the run has 4"),
        ([LORA, '--model.lora.targets=["q_proj"]'], "model.lora.targets = "),
    ],
)  # fmt: skip
def test_a_resumed_run_keeps_its_adapter(run: Path, more: list[str], says: str) -> None:
    ran = run_here("train", RECIPE, *SHAPE, *more, "--pool.workers=1", f"--run.dir={run}")
    assert ran.code == 2
    assert says in ran.err


def test_adapter_errors_are_reported_before_training(run: Path, tmp_path: Path) -> None:
    def told(*argv: str) -> str:
        ran = run_here("train", RECIPE, *SHAPE, *argv, f"--run.dir={tmp_path / 'x'}")
        assert ran.code == 2
        assert not list(tmp_path.glob("x/samples/*"))
        return ran.err

    unknown = told(LORA, '--model.lora.targets=["q_proj", "query"]')
    assert "has no linear layer 'query'" in unknown
    assert "name some of down_proj, gate_proj" in unknown
    assert "set dropout = 0" in told(LORA, "--model.lora.dropout=0.1")


def test_an_adapter_version_of_smollm2_is_under_two_percent_of_the_model(shared_cache: Path) -> None:
    spec = load_spec([f"@{RECIPES / 'smollm2-lora.toml'}", "--trainer.threads=1", "--trainer.device=cpu"])
    model = load_model_bundle(spec, progress=lambda _: None).model
    learned, base = (
        sum(p.nbytes for p in part.values()) for part in (learned_parameters(model), frozen_parameters(model))
    )
    # 30 layers × rank 8 × (q, o: 2 × 1152, k, v: 2 × 768, gate, up, down: 3 × 2112) × 4 bytes
    assert learned == 30 * 8 * (2304 + 1536 + 6336) * 4
    assert learned < 0.02 * base


@pytest.mark.parametrize(
    "kind", ["reward_model", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft", "dpo"))]
)
def test_a_supervised_stage_trains_an_adapter(kind: SupervisedKind, tmp_path: Path) -> None:
    """Stopped half-way and resumed it gives the same weights; its result is a plain model."""
    data = write_data(tmp_path / "data.jsonl")
    char = {"hidden_size": 32, "layers": 2, "heads": 2, "context": 32}
    same: dict[str, dict[str, Any]] = {
        "model": {"char": char, "lora": {"rank": 4}},
        "optimizer": {"schedule": "constant"},
    }
    calm = session(tmp_path / "calm", data, kind, **same, trainer={"steps": 8})
    session(tmp_path / "resumed", data, kind, **same, trainer={"steps": 4})
    resumed = session(tmp_path / "resumed", data, kind, **same, trainer={"steps": 8})
    assert resumed["weights_digest"] == calm["weights_digest"]
    made = Path(resumed["model"])
    assert not holds_adapter(made)
    load_model(resolve(ModelConfig(source=str(made)), progress=lambda _: None), device=torch.device("cpu"))
    if kind == "reward_model":
        reward = load_reward_model(made, device=torch.device("cpu"))
        assert not any(parameter.requires_grad for parameter in reward.model.parameters())
