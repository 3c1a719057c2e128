"""Agreement with TRL, an independent implementation: its loss method on given numbers, and its trainer's advantages."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tidemill.algos.advantages import grpo
from tidemill.algos.kl import k3
from tidemill.algos.losses import Normalize, denominator, ppo_clip, token_weights
from tidemill.config.model import CharModelConfig

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # what TRL and its dependencies warn of is not ours to mend

LENGTHS = [7, 1, 4, 6]  # completion tokens of each sample, padded to the longest
BETA, CLIP_LOW, CLIP_HIGH = 0.04, 0.2, 0.28
TRL_LOSS_TYPE: dict[Normalize, str] = {"sample": "grpo", "token": "dapo"}


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Padded trainer, proximal and reference logprobs [S, T], advantages [S] and mask [S, T]; ratios from 0.2 to 5."""
    draw = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    proximal = -4 * torch.rand(shape, generator=draw, dtype=torch.float64)
    trainer = proximal + 1.6 * (2 * torch.rand(shape, generator=draw, dtype=torch.float64) - 1)
    ref = proximal + 0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)
    advantages = torch.tensor([1.3, -0.4, -1.1, 0.6], dtype=torch.float64)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return trainer, proximal, ref, advantages, mask


def trl_loss(normalize: Normalize, beta: float, delta: float | None) -> tuple[float, Tensor, float]:
    """Loss, gradient by token and clip fraction as TRL's own method computes them, on a stand-in for its trainer."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer, proximal, ref, advantages, mask = drawn()
    trainer.requires_grad_()
    metrics: dict[str, Any] = defaultdict(list)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (trainer, torch.zeros_like(trainer), None),
        _metrics={"train": metrics},
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        importance_sampling_level="token",
        loss_type=TRL_LOSS_TYPE[normalize],
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": proximal,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)
    loss.backward()
    assert trainer.grad is not None
    return loss.item(), trainer.grad[mask], metrics["clip_ratio/region_mean"][0]


def our_loss(normalize: Normalize, beta: float, dual_clip: float | None) -> tuple[float, Tensor, float]:
    """The same from the flattened functions, one sample a microbatch, divided once at the end."""
    trainer, proximal, ref, advantages, mask = drawn()
    logprobs_T = trainer[mask].requires_grad_()
    loss = ppo_clip(
        logprobs_T,
        proximal[mask],
        advantages.repeat_interleave(torch.tensor(LENGTHS)),
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        dual_clip=dual_clip,
    )
    per_token = loss.loss_T + beta * k3(logprobs_T, ref[mask])
    weights_S = torch.tensor(token_weights(LENGTHS, normalize), dtype=torch.float64)
    weights_T = weights_S.repeat_interleave(torch.tensor(LENGTHS))
    for part, weight in zip(per_token.split(LENGTHS), weights_T.split(LENGTHS), strict=True):
        (part * weight).sum().backward(retain_graph=True)
    scale = 1.0 / denominator(LENGTHS, normalize)
    assert logprobs_T.grad is not None
    value = float((per_token * weights_T).sum().detach()) * scale
    return value, logprobs_T.grad * scale, loss.clipped_T.double().mean().item()


@pytest.mark.parametrize("normalize", ["sample", "token"])
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_gradient_and_clip_fraction(
    normalize: Literal["sample", "token"], beta: float, dual_clip: float | None
) -> None:
    # TRL's `delta`, an upper limit of the ratio itself, is the dual clip: where A < 0, min(ρ, δ) A = max(ρA, δA).
    theirs, ours = trl_loss(normalize, beta, dual_clip), our_loss(normalize, beta, dual_clip)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-9, atol=1e-12)
    if dual_clip is None:  # TRL does not count what delta holds
        assert ours[2] == pytest.approx(theirs[2])
        assert 0.1 < ours[2] < 0.9  # the numbers exercise both sides


def test_advantages_of_a_whole_trainer_step(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from tidemill.models.char import build_char_model

    # A group of mixed rewards, one of equal ones (as floats whose mean is another float), one with a failed reward.
    rewards = [[0.0, 1.0, 0.25, 1.0], [0.1, 0.1, 0.1, 0.1], [2.0, math.nan, -1.0, 0.5]]
    seen: list[Tensor] = []

    class Recording(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:  # before they are shuffled
            scored = super()._generate_and_score_completions(inputs)
            seen.append(scored["advantages"].clone())
            return scored

    def given(completions: list[str], **_: Any) -> list[float | None]:
        flat = [value for group in rewards for value in group]
        assert len(completions) == len(flat)
        return [None if math.isnan(value) else value for value in flat]

    build_char_model(CharModelConfig(hidden_size=16, layers=1, heads=2, context=32), tmp_path)
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(tmp_path),
        processing_class=AutoTokenizer.from_pretrained(tmp_path),
        reward_funcs=given,
        train_dataset=Dataset.from_list([{"prompt": text} for text in ("1+1=", "2+2=", "3+4=")]),
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=12,
            num_generations=4,
            max_completion_length=2,
            max_steps=1,
            shuffle_dataset=False,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    trainer.train()
    (theirs,) = seen
    ours = torch.cat([grpo(torch.tensor(group), ~torch.tensor(group).isnan()) for group in rewards])
    # TRL leaves rounding noise (up to 1e-8 / 1e-4) where all rewards are equal; we return zero.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(ours[:4], theirs[:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[8:], theirs[8:], rtol=1e-5, atol=1e-6)
