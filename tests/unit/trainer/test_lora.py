"""Training an adapter: gradients, frozen base, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.adapters import teach
from tests.model_folders import save_folder
from tests.model_shapes import MODEL_SHAPES, VOCABULARY, llama
from tests.trajectories import group, trajectory
from tidemill.config.learning import Checkpointing
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Group, unpack_tokens
from tidemill.models.loading import load_model
from tidemill.models.lora import frozen_parameters, learned_parameters
from tidemill.models.model_source import locate
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.trainer.policy import PolicyTrainer

BETA = 0.3
CPU = torch.device("cpu")


def spec(base: Path, *, rank: int = 4, **sections: dict[str, Any]) -> RunSpec:
    settings: dict[str, dict[str, Any]] = {
        "model": {"source": str(base), "lora": {"rank": rank}},
        "batch": {"prompts": 2, "group_size": 4},
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 1e9},
        "sampling": {"max_new_tokens": 8},
        "trainer": {"threads": 1, "device": "cpu", "precision": "fp32"},
        "algorithm": {"correction": {"kind": "none"}},  # the rollout logprobs here are arbitrary
    }
    return RunSpec.model_validate({name: {**settings.get(name, {}), **sections.get(name, {})}
                                   for name in {*settings, *sections}})  # fmt: skip


def trainer_of(parts: ModelBundle) -> PolicyTrainer:
    return PolicyTrainer(
        parts.forward,
        parts.spec,
        compute=ComputeThread(),
        source=parts.folder,
        reference=parts.forward_of(parts.reference()),
    )


def trained(settings: RunSpec) -> tuple[ModelBundle, PolicyTrainer]:
    """An adapter with trained weights, so that both of its matrices have gradients."""
    parts = load_model_bundle(settings, progress=lambda _: None)
    teach(parts.model)
    return parts, trainer_of(parts)


def groups(seed: int = 0) -> list[Group]:
    rng = np.random.default_rng(seed)
    header = rng.integers(2, VOCABULARY, 5).tolist()
    made = []
    for position in range(2):
        prompt = header + rng.integers(2, VOCABULARY, 3).tolist()
        samples = [
            trajectory(prompt, rng.integers(2, VOCABULARY, rng.integers(1, 8)).tolist(), reward, index=index)
            for index, reward in enumerate(rng.normal(size=4).tolist())
        ]
        made.append(group(position, samples))
    return made


def accumulated(subject: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Normalised gradients just before the optimizer step."""
    for one in groups():
        subject.add_group(one)
    (minibatch,) = subject._minibatches
    subject._add_microbatch(minibatch, minibatch.flush(), backward=True)
    named = subject.model.named_parameters()
    return {name: p.grad / minibatch.denominator for name, p in named if p.grad is not None}


def plain_logprobs(model: PreTrainedModel, tokens: list[int], prompt: int) -> torch.Tensor:
    logprobs: torch.Tensor = (
        model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, prompt - 1 : -1].log_softmax(-1)
    )
    return logprobs[torch.arange(len(tokens) - prompt), torch.tensor(tokens[prompt:])]


def plain_gradients(model: PreTrainedModel, reference: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The first step of GRPO with a k3 penalty, one sample at a time, with the forward pass of peft."""
    losses = []
    for one in groups():
        rewards = torch.tensor([t.reward.value for t in one.trajectories if t.reward])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for sample, advantage in zip(one.trajectories, advantages, strict=True):
            tokens = unpack_tokens(sample.token_ids)
            logprobs = plain_logprobs(model, tokens, sample.prompt_length)
            with torch.no_grad():
                ref = plain_logprobs(reference, tokens, sample.prompt_length)
            ratio = (logprobs - logprobs.detach()).exp()
            losses.append((-ratio * advantage + BETA * (torch.exp(ref - logprobs) - (ref - logprobs) - 1)).mean())
    torch.stack(losses).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_equal_plain_ones_with_the_base_as_reference(
    shape: str, checkpointing: Checkpointing, tmp_path: Path
) -> None:
    base = save_folder(MODEL_SHAPES[shape](), tmp_path)
    algorithm = {"kl_beta": BETA, "correction": {"kind": "none"}}  # the rollout logprobs here are arbitrary
    settings = spec(base, algorithm=algorithm, trainer={"activation_checkpointing": checkpointing})
    parts, subject = trained(settings)
    ours = accumulated(subject)
    plain = load_model_bundle(spec(base), progress=lambda _: None).model
    teach(plain)
    plain.set_attn_implementation("eager")
    expected = plain_gradients(plain, MODEL_SHAPES[shape]())
    assert list(ours) == list(expected) == list(learned_parameters(parts.model))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * largest, msg=name)


def test_the_reference_shares_the_base_and_is_not_trained(tmp_path: Path) -> None:
    parts, subject = trained(spec(save_folder(llama(), tmp_path), algorithm={"kl_beta": BETA}))
    reference = parts.reference()
    assert reference is not None
    assert weights_digest(reference) == weights_digest(llama())
    frozen = frozen_parameters(parts.model)
    assert {id(parameter) for parameter in reference.parameters()} == {id(parameter) for parameter in frozen.values()}
    assert parts.frozen.load(parts.folder) is reference  # as for any other role with this folder
    for one in groups():
        subject.add_group(one)
    assert subject.finish_batch(1).values["kl_ref"] > 0
    assert weights_digest(reference) == weights_digest(llama())


def test_the_optimizer_trains_all_of_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    parts, subject = trained(spec(save_folder(llama(), tmp_path)))
    learned = learned_parameters(parts.model)
    before = {name: parameter.detach().clone() for name, parameter in learned.items()}
    digest = subject.version.digest
    assert {id(p) for g in subject.optimizer.param_groups for p in g["params"]} == {id(p) for p in learned.values()}
    for one in groups():
        subject.add_group(one)
    version = subject.finish_batch(1).version
    assert all(not torch.equal(before[name], parameter) for name, parameter in learned.items())
    assert version.digest == weights_digest(parts.model) != digest
    # fp32 weights and two moments of 4 bytes each
    count = sum(parameter.numel() for parameter in learned.values())
    assert 12 * count <= subject.state_bytes() <= 12 * count + (1 << 20)


def test_training_resumes_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    settings = spec(save_folder(llama(), tmp_path / "base"))
    _, first = trained(settings)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for step in (1, 2):
        if step == 2:
            first.write_state(directory)
        for one in groups(step):
            first.add_group(one)
        first.finish_batch(step)
    resumed = trainer_of(load_model_bundle(settings, progress=lambda _: None))
    resumed.read_state(directory)
    assert resumed.version.number == 1
    for one in groups(2):
        resumed.add_group(one)
    assert resumed.finish_batch(2).version == first.version
    # 2 layers × 4 × (q, o: 2 × 128, k, v: 2 × 96, MLP: 3 × 160) = 7,424 parameters of 12 bytes; 69,952 in the model
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()]
    assert 12 * 7424 < sum(sizes) < 2 * 12 * 7424


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    base = save_folder(llama(), tmp_path / "base")
    for name, rank in (("whole", 0), ("rank 4", 4)):
        (tmp_path / name).mkdir()
        trainer_of(load_model_bundle(spec(base, rank=rank), progress=lambda _: None)).write_state(tmp_path / name)
    adapter = trainer_of(load_model_bundle(spec(base, rank=8), progress=lambda _: None))
    with pytest.raises(UserError, match="holds a whole model, but this run trains an adapter of rank 8"):
        adapter.read_state(tmp_path / "whole")
    with pytest.raises(UserError, match=r"model.lora.rank = 4, now 8"):
        adapter.read_state(tmp_path / "rank 4")
    whole = trainer_of(load_model_bundle(spec(base, rank=0), progress=lambda _: None))
    with pytest.raises(UserError, match="holds an adapter, but this run trains the whole model"):
        whole.read_state(tmp_path / "rank 4")


def test_a_checkpoint_loads_as_a_bundle_with_any_recipe(tmp_path: Path) -> None:
    base = save_folder(llama(), tmp_path / "base")
    _, subject = trained(spec(base))
    stored = tmp_path / "stored"
    stored.mkdir()
    subject.write_state(stored)
    for settings in (spec(base, rank=0), spec(base, rank=8), RunSpec()):
        parts = load_model_bundle(settings, progress=lambda _: None, model=locate(stored))
        assert weights_digest(parts.model) == weights_digest(subject.model)
        assert parts.spec.model.lora.rank == 4
    # a whole model needs no adapter
    parts = load_model_bundle(spec(base, rank=8), progress=lambda _: None, model=locate(base))
    assert weights_digest(parts.model) == weights_digest(load_model(base, device=CPU))
    assert not parts.spec.model.lora.enabled
