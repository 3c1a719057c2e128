"""Logprobs, entropies and gradients of the output layer against plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.output_layers import logprobs_of, plain_logprobs
from tidemill.models import token_logprobs as module

VOCABULARY, HIDDEN, STATES = 37, 8, 11
ROW_BYTES = 4 * VOCABULARY
ROWS = torch.tensor([0, 0, 1, 3, 3, 3, 4, 6, 9, 10, 10])
TARGETS = torch.tensor([5, 5, 0, 1, 2, 1, 36, 7, 8, 9, 10])  # the first two predict the same token from the same state


def inputs(*, bias: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(STATES, HIDDEN), (VOCABULARY, HIDDEN), *([(VOCABULARY,)] if bias else [])]
    return [(2 * torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]


def loss(results: tuple[Tensor, Tensor], *, entropy: bool) -> Tensor:
    logprobs, entropies = results
    weights = torch.linspace(-1, 2, len(ROWS))
    return (weights * logprobs).sum() + (0.3 * (weights.flip(0) * entropies).sum() if entropy else 0)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept_rows", [1, 4, 7, 8, 1000])  # 7: the first and the short last chunk
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"softcap": 3.0, "temperature": 0.6}, {"bias": True}],
    ids=["plain", "temperature", "softcap", "bias"],
)
def test_values_and_gradients_equal_those_of_all_logits_at_once(
    settings: dict[str, Any], kept_rows: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ROWS", 4)  # with a budget of 8 rows, two of three chunks are kept
    monkeypatch.setattr(module, "_CACHED_BYTES", 3 * ROW_BYTES)
    options = dict(settings)
    ours, plain = inputs(bias=options.pop("bias", False)), inputs(bias=settings.get("bias", False))
    found = logprobs_of(*ours, rows=ROWS, targets=TARGETS, budget_bytes=kept_rows * ROW_BYTES, **options)
    expected = plain_logprobs(*plain, rows=ROWS, targets=TARGETS, **options)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    loss(found, entropy=entropy).backward()
    loss(expected, entropy=entropy).backward()
    for tensor, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(tensor.grad, wanted.grad, rtol=1e-4, atol=1e-5)


def test_no_chunk_of_logits_is_larger_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, computed = [], module._logits

    def noted(*arguments: Any) -> Tensor:
        logits = computed(*arguments)
        sizes.append(logits.nbytes)
        return logits

    monkeypatch.setattr(module, "_logits", noted)
    results = logprobs_of(*inputs(), rows=ROWS, targets=TARGETS, budget_bytes=3 * ROW_BYTES)
    loss(results, entropy=True).backward()
    assert max(sizes) == 3 * ROW_BYTES


def test_only_probabilities_within_the_budget_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_ROWS", 4)
    logprobs, _ = logprobs_of(*inputs(), rows=ROWS, targets=TARGETS, budget_bytes=8 * ROW_BYTES)
    kept = logprobs.grad_fn.kept  # type: ignore[union-attr]
    assert [tuple(each.shape) for each in kept.values()] == [(4, VOCABULARY)] * 2


def test_nothing_is_kept_without_gradients() -> None:
    hidden, weight = inputs()
    with torch.no_grad():
        logprobs, _ = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    assert logprobs.grad_fn is None


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight = inputs()
    weight.requires_grad_(False)
    logprobs, _ = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_hits_are_the_most_likely_tokens() -> None:
    hidden, weight = inputs()
    _, hits = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS, statistic="hit")
    best = (hidden @ weight.T).argmax(-1)
    assert hits.tolist() == (best[ROWS] == TARGETS).float().tolist()
    assert not hits.requires_grad


def test_a_probability_of_zero_has_finite_gradients() -> None:
    hidden, weight = inputs()
    with torch.no_grad():
        hidden.mul_(1e3)
    logprobs, entropy = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_under_autocast_only_products_are_rounded() -> None:
    hidden, weight = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    with torch.no_grad():
        rounded = (hidden.bfloat16() @ weight.bfloat16().T).float()
    torch.testing.assert_close(logprobs, rounded.log_softmax(-1)[ROWS, TARGETS], rtol=1e-6, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
