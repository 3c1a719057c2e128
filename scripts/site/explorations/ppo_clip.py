"""Table of the clipped surrogate and its gradient, from `algos.losses.ppo_clip`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scripts.site.explorations.rounding import digits, row
from tidemill.algos.losses import ppo_clip

PROXIMAL = -2.0
LOGPROBS = tuple(round(-3.5 + 0.1 * step, 1) for step in range(29))
"""Trainer logprobs, from -3.5 to -0.7."""
ADVANTAGES = tuple(round(-2.0 + 0.4 * step, 1) for step in range(11))
LOWS = (0.1, 0.2, 0.3, 0.4)
HIGHS = (0.1, 0.2, 0.28, 0.4)
DUALS = (None, 3.0)
EXAMPLE = {"logprob": -1.5, "advantage": 0.8, "low": 0.2, "high": 0.2}
RATIOS = tuple(sorted({round(0.1 * step, 1) for step in range(1, 41)} | {1 + high for high in HIGHS}))
"""Of the curve, which is straight between them."""


def surrogate(
    logprobs: Sequence[float], proximal: float, advantage: float, *, low: float, high: float, dual: float | None
) -> tuple[list[float], list[float], list[float]]:
    """Ratio, objective J = -loss, and the gradient of J by the trainer's logprob, of each logprob."""
    trainer_T = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    proximal_T = torch.full_like(trainer_T, proximal)
    advantages_T = torch.full_like(trainer_T, advantage)
    loss = ppo_clip(trainer_T, proximal_T, advantages_T, clip_low=low, clip_high=high, dual_clip=dual)
    (gradient_T,) = torch.autograd.grad(-loss.loss_T.sum(), trainer_T)
    return loss.ratio_T.tolist(), (-loss.loss_T.detach()).tolist(), gradient_T.tolist()


def table() -> dict[str, Any]:
    """`curves` and `points` [advantage][low][high][dual]: objectives, then gradients, at `ratios` and at `logprobs`.

    Equal entries are stored once: `curves` has indices into `unique`.
    """
    unique, known = list[list[float | int]](), dict[tuple[float, ...], int]()

    def stored(values: list[float]) -> int:
        short = row((0.0 if abs(value) < 1e-9 else value for value in values), 4)
        if (key := tuple(short)) not in known:
            known[key] = len(unique)
            unique.append(short)
        return known[key]

    log_ratios = torch.tensor(RATIOS, dtype=torch.float64).log().tolist()
    # A ratio that is a bound of the clip is inside it: exp(log(1.2)) may be above 1.2 by rounding.
    inside = [value - 1e-12 if ratio >= 1 else value + 1e-12 for ratio, value in zip(RATIOS, log_ratios, strict=True)]
    grid = [(a, low, high, dual) for a in ADVANTAGES for low in LOWS for high in HIGHS for dual in DUALS]
    curves, points = [], []
    for advantage, low, high, dual in grid:
        _, objective, gradient = surrogate(inside, 0.0, advantage, low=low, high=high, dual=dual)
        curves.append([stored(objective), stored(gradient)])
        _, objective, gradient = surrogate(LOGPROBS, PROXIMAL, advantage, low=low, high=high, dual=dual)
        points.append([stored(objective), stored(gradient)])
    ratios, _, _ = surrogate(LOGPROBS, PROXIMAL, 1.0, low=0.2, high=0.2, dual=None)
    (example_ratio,), (example_objective,), _ = surrogate(
        [EXAMPLE["logprob"]],
        PROXIMAL,
        EXAMPLE["advantage"],
        low=EXAMPLE["low"],
        high=EXAMPLE["high"],
        dual=None,
    )
    return {
        "proximal": PROXIMAL,
        "logprobs": list(LOGPROBS),
        "point_ratios": row(ratios),
        "advantages": list(ADVANTAGES),
        "lows": list(LOWS),
        "highs": list(HIGHS),
        "example": EXAMPLE | {"ratio": digits(example_ratio), "objective": digits(example_objective)},
        "duals": [0 if dual is None else dual for dual in DUALS],
        "ratios": row(RATIOS),
        "unique": unique,
        "curves": curves,
        "points": points,
    }
