"""Losses and gradients of a tiny model against the trainers of TRL, on batches that TRL collates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workbench import fit_context, supervised_spec
from tidemill.config.model import CharModelConfig
from tidemill.core.records import Demonstration, PreferencePair, pack_tokens
from tidemill.models.builtin import build_char_model
from tidemill.models.loading import load_model
from tidemill.trainer.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from tidemill.trainer.supervised_loop import LossSums, Objective

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and its dependencies

ROWS = [
    {"prompt": "1+1=", "chosen": "2\n", "rejected": "11\n"},
    {"prompt": "1+12=", "chosen": "13 yes\n", "rejected": "no"},
    {"prompt": "7*6=", "chosen": "42", "rejected": "thirteen\n"},
    {"prompt": "1+1=", "chosen": "two", "rejected": "2 or 3\n"},
]
BETA = 0.3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("char")
    build_char_model(CharModelConfig(hidden_size=32, layers=2, heads=2, context=32), path)
    return path


def arguments(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out),
        "per_device_train_batch_size": len(ROWS),
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def theirs(trainer: Any) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """Loss, gradients by name and batch of the first step of a TRL trainer."""
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    found = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), found, batch


def ours(objective: Objective[Any], examples: Sequence[Any]) -> tuple[LossSums, dict[str, Tensor]]:
    sums = objective.losses(examples)
    (sums.loss / sums.weight).backward()
    return sums, {name: p.grad for name, p in objective.trained.named_parameters() if p.grad is not None}


def assert_equal(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert mine.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(mine[name].reshape(gradient.shape), gradient, rtol=1e-4, atol=1e-5, msg=name)


def completion(ids: Tensor, mask: Tensor, attended: Tensor) -> tuple[bytes, bytes]:
    """(prompt, completion) of one collated row."""
    kept = attended.bool()
    tokens, trained = ids[kept].tolist(), mask[kept].tolist()
    start = trained.index(1)
    assert all(trained[start:])
    return pack_tokens(tokens[:start]), pack_tokens(tokens[start:])


def model_and_tokenizer(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_sft(folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = model_and_tokenizer(folder)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in ROWS]),
        args=SFTConfig(**arguments(tmp_path / "out"), completion_only_loss=True),
    )
    loss, gradients, batch = theirs(trainer)
    examples = []
    for number, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        attended = batch["attention_mask"][number] if "attention_mask" in batch else torch.ones_like(ids)
        prompt, rest = completion(ids, (labels != -100).long(), attended)
        examples.append(Demonstration(id=str(number), prompt_ids=prompt, completion_ids=rest))
    objective = SupervisedObjective(supervised_spec(), fit_context(tmp_path, model=load_model(folder, device=CPU)))
    sums, mine = ours(objective, examples)
    assert float(sums.loss.detach()) / sums.weight == pytest.approx(loss, rel=1e-5)
    assert_equal(mine, gradients)


@pytest.mark.parametrize(("ours_named", "theirs_named"), [("dpo", "sigmoid"), ("ipo", "ipo")])
def test_preference_optimisation(ours_named: str, theirs_named: str, folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = model_and_tokenizer(folder)
    with torch.no_grad():  # different from the reference
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    reference, _ = model_and_tokenizer(folder)
    moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(ROWS),
        args=DPOConfig(**arguments(tmp_path / "out"), beta=BETA, loss_type=[theirs_named]),
    )
    loss, gradients, batch = theirs(trainer)
    rows = [
        completion(ids, mask, attended)
        for ids, mask, attended in zip(
            batch["input_ids"], batch["completion_mask"], batch["attention_mask"], strict=True
        )
    ]
    half = len(rows) // 2
    examples = [
        PreferencePair(id=str(number), prompt_ids=chosen[0], chosen_ids=chosen[1], rejected_ids=rejected[1])
        for number, (chosen, rejected) in enumerate(zip(rows[:half], rows[half:], strict=True))
    ]
    subject = fit_context(tmp_path, model=load_model(folder, device=CPU))
    objective = PreferenceObjective(supervised_spec(preference={"loss": ours_named, "beta": BETA}), subject)
    objective.prepare(examples)
    subject.model.load_state_dict(moved)
    sums, mine = ours(objective, examples)
    assert float(sums.loss.detach()) / sums.weight == pytest.approx(loss, rel=1e-5)
    assert abs(loss - 0.6931) > 1e-3  # not the initial loss
    assert_equal(mine, gradients)


def test_reward_model(folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    subject = fit_context(tmp_path, model=load_model(folder, device=CPU), source=folder)
    objective = RewardObjective(supervised_spec(reward_model={"centring": 0.05}), subject)
    assert objective.head is not None
    with torch.no_grad():
        model.score.weight.copy_(objective.head.weight[None])
    trainer = RewardTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=Dataset.from_list([row | {"margin": 0.25 * number} for number, row in enumerate(ROWS)]),
        args=RewardConfig(**arguments(tmp_path / "out"), center_rewards_coefficient=0.05),
    )
    loss, gradients, batch = theirs(trainer)
    rows = [
        pack_tokens(ids[attended.bool()].tolist())
        for ids, attended in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    half = len(rows) // 2
    examples = [
        PreferencePair(id=str(number), prompt_ids=chosen[:4], chosen_ids=chosen[4:], rejected_ids=rejected[4:],
                       margin=float(batch["margin"][number]))
        for number, (chosen, rejected) in enumerate(zip(rows[:half], rows[half:], strict=True))
    ]  # fmt: skip
    sums, mine = ours(objective, examples)
    assert float(sums.loss.detach()) / sums.weight == pytest.approx(loss, rel=1e-5)
    mine.pop("head.bias")
    mine["score.weight"] = mine.pop("head.weight")
    assert_equal({name.removeprefix("model.model."): each for name, each in mine.items()},
                 {name.removeprefix("model."): each for name, each in gradients.items()})  # fmt: skip
