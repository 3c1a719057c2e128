"""Token trees: logprobs and gradients of the trainer against transformers, and whether a step repeats its bits.

Two equal backward passes must give the same bits, or a resumed run is another run. The loss weighs every logprob by
another number: sums of ones would be the same in any order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu.check_rows import CheckRows, Limit
from benchmarks.gpu.checks.reference import (
    FP32,
    NARROW,
    OWN,
    OWN_ERROR,
    in_dtype,
    reference,
    reference_logprobs,
    sharp_model,
)
from benchmarks.gpu.train_step import Samples, tree_logprobs, tree_of
from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward

GROUP_SIZE = 8
VOCABULARY = 512  # of the samples
GRADIENT = 1e-3
"""Largest relative error of the gradient in fp32; 1e-6 was measured on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Logprobs [samples, completion] and gradients by parameter."""

    logprobs: Tensor
    gradients: Sequence[Tensor]

    def differing(self, other: Passed) -> int:
        """Parameters whose gradients have other bits."""
        return sum(not torch.equal(one, two) for one, two in zip(self.gradients, other.gradients, strict=True))

    def gradient_error(self, expected: Passed) -> float:
        pairs = zip(self.gradients, expected.gradients, strict=True)
        error = sum(float((one - two).double().square().sum()) for one, two in pairs)
        size = sum(float(each.double().square().sum()) for each in expected.gradients)
        return float((error / size) ** 0.5)


def small_trees(rows: CheckRows) -> None:
    samples = _samples(1, 20, 10) if rows.settings.tiny else _samples(1, 100, 60)  # 580 nodes
    _rows_of(rows, sharp_model(rows.settings), samples, prompt=20 if rows.settings.tiny else 100)


def large_trees(rows: CheckRows) -> None:
    samples = _samples(2, 40, 100) if rows.settings.tiny else _samples(2, 300, 200)  # 1,680 or 3,800 nodes
    prompt = 40 if rows.settings.tiny else 300
    _rows_of(rows, sharp_model(rows.settings), samples, prompt=prompt)
    narrow = sharp_model(rows.settings, NARROW)
    expected = _by_reference(in_dtype(narrow, torch.float64), samples, prompt)
    own = _by_reference(narrow, samples, prompt)
    rows.measure(
        "heads of width 8",
        partial(_measured, narrow, samples, prompt, expected, own, autocast=None),
        _limits(torch.float32),
    )


def _rows_of(rows: CheckRows, model: PreTrainedModel, samples: Samples, *, prompt: int) -> None:
    expected = _by_reference(in_dtype(model, torch.float64), samples, prompt)
    for dtype, autocast in ((torch.float32, None), (torch.bfloat16, torch.bfloat16)):
        own = _by_reference(model, samples, prompt, autocast=autocast)
        measure = partial(_measured, model, samples, prompt, expected, own, autocast=autocast)
        rows.measure(str(dtype).removeprefix("torch."), measure, _limits(dtype))


def _limits(dtype: torch.dtype) -> list[Limit]:
    repeats = Limit("differing_gradients", 0, "two equal passes; resumed runs repeat their bits")
    limits = [Limit(name, OWN_ERROR[dtype], OWN) for name in ("mean_to_own_error", "gradient_to_own_error")]
    if dtype == torch.float32:
        limits += [Limit("max", FP32, "order of sums"), Limit("gradient_error", GRADIENT, "order of sums")]
    return [*limits, repeats]


def _samples(groups: int, prompt: int, completion: int) -> Samples:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCABULARY, (groups, 1, prompt)).repeat(GROUP_SIZE, 1)
    completions = rng.integers(1, VOCABULARY, (groups, GROUP_SIZE, completion))
    return np.concatenate([prompts, completions], 2).reshape(groups * GROUP_SIZE, -1).astype(np.int32)


def _by_reference(
    model: PreTrainedModel, samples: Samples, prompt: int, *, autocast: torch.dtype | None = None
) -> Passed:
    own = reference(copy.deepcopy(model))
    logprobs = []
    for sequence, weights in zip(samples.tolist(), _weights(samples, prompt, model.device), strict=True):
        with torch.autocast(model.device.type, autocast, enabled=autocast is not None):
            of_sample = reference_logprobs(own, sequence, prompt)
        (of_sample * weights).sum().backward()
        logprobs.append(of_sample.detach())
    return Passed(logprobs=torch.stack(logprobs), gradients=_gradients(own))


def _by_trainer(model: PreTrainedModel, samples: Samples, prompt: int, autocast: torch.dtype | None) -> Passed:
    own = copy.deepcopy(model)
    use_packed_attention(own)
    forward = TreeForward(own, autocast=autocast, device=own.device)
    (logprobs,) = tree_logprobs(forward, [samples], [tree_of(samples, share=True)], prompt, own.device)
    (logprobs * _weights(samples, prompt, own.device)).sum().backward()
    return Passed(logprobs=logprobs.detach(), gradients=_gradients(own))


def _weights(samples: Samples, prompt: int, device: torch.device) -> Tensor:
    """Of the logprobs in the loss, float32 [samples, completion]."""
    shape = len(samples), samples.shape[1] - prompt
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


def _gradients(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _measured(
    model: PreTrainedModel,
    samples: Samples,
    prompt: int,
    expected: Passed,
    own: Passed,
    *,
    autocast: torch.dtype | None,
) -> dict[str, Any]:
    first, second = (_by_trainer(model, samples, prompt, autocast) for _ in range(2))
    gap = (first.logprobs - expected.logprobs).abs()
    own_error, own_gradient = float((own.logprobs - expected.logprobs).abs().mean()), own.gradient_error(expected)
    found: dict[str, Any] = {
        "nodes": tree_of(samples, share=True).size,
        "max": float(gap.max()),
        "mean": float(gap.mean()),
        "gradient_error": first.gradient_error(expected),
        "differing_gradients": first.differing(second),
        "differing_logprobs": int((first.logprobs != second.logprobs).sum()),
    }
    found |= {
        "own_error_mean": own_error,
        "mean_to_own_error": found["mean"] / own_error,
        "own_gradient_error": own_gradient,
        "gradient_to_own_error": found["gradient_error"] / own_gradient,
    }
    return found
