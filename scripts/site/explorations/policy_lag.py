"""Table of importance ratios by policy lag: a small random policy, its later versions, and what `algos.corrections`
makes of tokens that the oldest version sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scripts.site.explorations.rounding import digits, row
from tidemill.algos.corrections import CORRECTIONS, Corrected
from tidemill.algos.kl import mismatch
from tidemill.algos.losses import Samples
from tidemill.config.algorithm import CORRECTION_LIMITS
from tidemill.planner.staleness import parse_table, plan_staleness

CONTEXTS, VOCABULARY = 64, 32
SAMPLES, LENGTH = 128, 16
LAGS = tuple(range(11))
CHANGES = (0.05, 0.1, 0.2, 0.4)
"""Standard deviation by which one update changes a logit."""
COMMON = 0.7
"""Share of an update's change that the next one repeats, as the updates of a training run do."""
SETTINGS: tuple[tuple[str, float | None], ...] = (
    ("none", None),
    ("tis", 1.25),
    ("tis", 2.0),
    ("tis", 5.0),
    ("clip_range", None),
    ("icepop", None),
    ("mu_step", None),
    ("sequence_tis", None),
    ("geometric", None),
)
"""Corrections and their upper bounds; None: the default of the configuration."""
MEASURED = """\
lag,reward_per_step,utilisation
0,.15,35%
1,.13,55%
3,.10,75%
5,.05,85%
10,-.02,92%
"""
"""The example of `plan staleness`."""
BINS, SPAN = 40, 2.0
"""Of histograms over log r, from -SPAN to SPAN."""


def logprobs_of_versions(change: float) -> Tensor:
    """float64 [K + 1, T]: of the same tokens, which version 0 sampled, under each version."""
    random = torch.Generator().manual_seed(0)
    contexts_T = torch.randint(CONTEXTS, (SAMPLES * LENGTH,), generator=random)
    logits = 2.0 * torch.randn(CONTEXTS, VOCABULARY, generator=random, dtype=torch.float64)
    tokens_T = torch.multinomial(logits.softmax(-1)[contexts_T], 1, generator=random).squeeze(-1)
    common = torch.randn(CONTEXTS, VOCABULARY, generator=random, dtype=torch.float64)
    found = []
    for _ in LAGS:
        found.append(logits.log_softmax(-1)[contexts_T, tokens_T])
        fresh = torch.randn(CONTEXTS, VOCABULARY, generator=random, dtype=torch.float64)
        logits = logits + change * (COMMON * common + (1 - COMMON**2) ** 0.5 * fresh)
    return torch.stack(found)


def samples() -> Samples:
    return Samples(torch.arange(SAMPLES).repeat_interleave(LENGTH), SAMPLES)


def corrected(logprobs_KT: Tensor, lag: int, kind: str, high: float | None) -> Corrected:
    """Weights of the tokens when the trainer is `lag` versions ahead, with the default limits but for `high`."""
    defaults = CORRECTION_LIMITS[kind]._asdict()  # type: ignore[index]
    limits = {name: value for name, value in defaults.items() if name in CORRECTIONS[kind].limits}
    if high is not None:
        limits["high"] = high
    if kind == "mu_step":
        steps_KT = logprobs_KT[: lag + 1].diff(dim=0) if lag else torch.zeros_like(logprobs_KT[:1])
        return CORRECTIONS[kind].function(steps_KT, samples(), **limits)
    return CORRECTIONS[kind].function(logprobs_KT[lag] - logprobs_KT[0], samples(), **limits)


def effective(weights_T: Tensor) -> float:
    """Effective sample size of weights, as a share of the tokens."""
    log_T = weights_T.log()
    return mismatch(torch.zeros_like(log_T), log_T).reduce()["effective_sample_size"]


def table() -> dict[str, Any]:
    """`ratios` [change][lag] of r, and `weights` [change][lag][setting] of the corrections, with histograms."""
    ratios, weights = [], []
    for change in CHANGES:
        logprobs_KT = logprobs_of_versions(change)
        ratios.append([_ratio(logprobs_KT[0], logprobs_KT[lag]) for lag in LAGS])
        weights.append([[_weights(corrected(logprobs_KT, lag, kind, high)) for kind, high in SETTINGS] for lag in LAGS])
    plan = plan_staleness(parse_table(MEASURED, source="the example"))
    return {
        "lags": list(LAGS),
        "changes": list(CHANGES),
        "settings": [_setting(kind, high) for kind, high in SETTINGS],
        "tokens": SAMPLES * LENGTH,
        "span": SPAN,
        "bins": BINS,
        "ratios": ratios,
        "weights": weights,
        "example": {
            "measured": MEASURED,
            "best": digits(plan.best_lag),
            "progress": row(each.progress for each in plan.lags),
        },
    }


def _setting(kind: str, high: float | None) -> dict[str, Any]:
    limits = dict(CORRECTION_LIMITS[kind]._asdict())  # type: ignore[index]
    if high is not None:
        limits["high"] = high
    bounds = ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None)
    return {"kind": kind, "bounds": bounds, "formula": CORRECTIONS[kind].formula}


def _ratio(rollout_T: Tensor, now_T: Tensor) -> dict[str, Any]:
    found = mismatch(rollout_T, now_T).reduce()
    return {
        "effective": digits(found["effective_sample_size"]),
        "kl": digits(found["mismatch_kl"], 4),
        "largest": digits(found["ratio_max"], 4),
        "histogram": _histogram(now_T - rollout_T),
    }


def _weights(found: Corrected) -> dict[str, Any]:
    kept_T = found.weights_T > 0
    return {
        "effective": digits(effective(found.weights_T)) if kept_T.any() else 0,
        "mean": digits(float(found.weights_T.mean()), 4),
        "changed": row((float(found.truncated_T.double().mean()), float(found.masked_T.double().mean())), 4),
        "histogram": _histogram(found.weights_T[kept_T].log()),
    }


def _histogram(log_T: Tensor) -> list[int]:
    """Tokens per bin; those outside are in the first and last one."""
    inside_T = log_T.clamp(-SPAN * (1 - 1e-9), SPAN * (1 - 1e-9))
    return [int(count) for count in torch.histc(inside_T, BINS, -SPAN, SPAN)]
