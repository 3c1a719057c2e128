"""AdamW, its learning-rate schedule, and the one place where accumulated gradients are normalised, clipped and used."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tidemill.config.learning import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay on matrices only (embeddings are matrices).

    The fused implementation is taken where the parameters' device and type allow: it needs no temporaries the size of
    a tensor. Elsewhere one tensor is updated at a time, which needs temporaries of the largest one.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]

    def adamw(*, fused: bool) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            foreach=False,
            fused=fused,
        )

    try:
        return adamw(fused=True)
    except RuntimeError:  # how torch says that it has no fused kernel for these
        return adamw(fused=False)


def learning_rate(optimizer_step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of one optimizer step.

    Args:
        optimizer_step: 1-based number of the step about to be taken.
        total_steps: number of the run's last step; later ones stay at its rate.
        config: peak, warm-up, schedule and final ratio.

    Warm-up rises linearly to the peak at step `warmup_steps`; the schedule then falls from the peak there (at step 1
    without warm-up) to peak × min_learning_rate_ratio at step `total_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if optimizer_step <= warmup:
        return peak * optimizer_step / warmup
    if config.schedule == "constant":
        return peak
    start = max(warmup, 1)
    progress = min((optimizer_step - start) / (total_steps - start), 1.0) if total_steps > start else 0.0
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return peak * (floor + (1.0 - floor) * remaining)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_and_step(optimizer: torch.optim.Optimizer, *, scale: float, max_grad_norm: float) -> float:
    """Normalise the accumulated gradients, clip them to a global norm, and take one optimizer step.

    Args:
        optimizer: its parameters' `.grad` hold sums over the batch. They are changed in place, never copied, and gone
            (None) afterwards.
        scale: multiplies every gradient first: one over what the sums are to be divided by.
        max_grad_norm: the largest global L2 norm after scaling.

    Returns:
        The global norm after scaling, before clipping. When it is not finite the step was skipped: weights and
        moments are as before, and the caller counts it.
    """
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = _global_norm(gradients) * scale
    if gradients and math.isfinite(norm):
        factor = scale * min(1.0, max_grad_norm / norm) if norm > 0 else scale
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _global_norm(gradients: list[Tensor]) -> float:
    """L2 norm over all gradients, read from the device once."""
    if not gradients:
        return 0.0
    # Row by row, then in double: one float32 sum over an embedding's 28M elements is off by 2e-3.
    squares = [torch.linalg.vector_norm(g, dim=-1 if g.ndim else None).double().square().sum() for g in gradients]
    return math.sqrt(torch.stack(squares).sum().item())
