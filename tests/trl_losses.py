"""TRL's loss methods on given numbers, called on stand-ins for its trainers."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LENGTHS = [7, 1, 4, 6]  # completion tokens of each sample, padded to the longest
MAX_NEW_TOKENS = 8


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


def trl_policy_loss(
    *,
    loss_type: str,
    level: str = "token",
    beta: float = 0.0,
    delta: float | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl_ratio: bool = False,
    correction: Tensor | None = None,
    entropy: Tensor | None = None,
    bonus: float = 0.0,
) -> tuple[float, Tensor, dict[str, Any]]:
    """Loss, gradient by token [T] and metrics of GRPOTrainer; `correction` is a ratio [S, T] or [S, 1]; `bonus` is on
    the entropies [S, T], whose gradients are left in them."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer, proximal, ref, advantages, mask = drawn()
    trainer.requires_grad_()
    metrics: dict[str, Any] = defaultdict(list)
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            trainer,
            torch.zeros_like(trainer) if entropy is None else entropy,
            None,
        ),
        _metrics={"train": metrics},
        _entropy_bonus_enabled=bonus > 0,
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=False
        ),
        args=SimpleNamespace(use_bias_correction_kl=kl_ratio, delta=delta, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        entropy_coef=bonus,
        epsilon_low=clip_low,
        epsilon_high=clip_high,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=MAX_NEW_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
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
        "importance_sampling_ratio": correction,
    }
    loss = GRPOTrainer._compute_loss(stand_in, stand_in.model, inputs)
    loss.backward()
    assert trainer.grad is not None
    return loss.item(), trainer.grad[mask], metrics


def trl_preference_loss(
    loss_type: str, beta: float, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[float, Tensor]:
    """Loss and gradient [2P, T] of DPOTrainer on padded logprobs [2P, T]: P chosen completions, then P rejected."""
    from trl.trainer.dpo_trainer import DPOTrainer

    given = (logprobs * mask).detach().requires_grad_()
    ref_chosen, ref_rejected = (ref_logprobs * mask).sum(1).chunk(2)
    outputs = SimpleNamespace(log_probs=given, entropy=given, mean_logits=given, is_top1=mask)
    stand_in = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, num_processes=1
        ),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        beta=beta,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        ld_alpha=None,
        loss_types=[loss_type],
        loss_weights=[1.0],
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.zeros(len(mask), mask.shape[1] + 1, dtype=torch.long),
        "attention_mask": torch.ones(len(mask), mask.shape[1] + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], 1),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(stand_in, lambda **_: outputs, inputs, False)
    loss.backward()
    assert given.grad is not None
    return loss.item(), given.grad * mask


def trl_reward_loss(scores: Tensor, margins: Tensor | None, centring: float | None) -> tuple[float, Tensor]:
    """Loss and gradient [2P] of RewardTrainer on scores [2P]: P chosen completions, then P rejected ones."""
    from trl.trainer.reward_trainer import RewardTrainer

    given = scores.detach().requires_grad_()
    stand_in = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(center_rewards_coefficient=centring),
        model=SimpleNamespace(training=True),
    )
    inputs: dict[str, Any] = {"attention_mask": torch.ones(len(scores), 1)}
    if margins is not None:
        inputs["margin"] = margins
    loss = RewardTrainer.compute_loss(stand_in, lambda **_: SimpleNamespace(logits=given[:, None]), inputs)
    loss.backward()
    assert given.grad is not None
    return loss.item(), given.grad
