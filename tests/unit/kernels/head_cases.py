"""The kernels of the output layer, in Triton's interpreter, against plain autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.output_layers import logprobs_of, plain_logprobs
from tests.unit.models.test_token_logprobs import ROWS, TARGETS, VOCABULARY, inputs, loss
from tidemill.kernels.head import HeadStatistics, HeadTokens, head_gradient, head_statistics

WIDE = 5000  # tokens: three blocks, the last one partly outside


def wide_inputs(*, bias: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(11, 8), (WIDE, 8), *([(WIDE,)] if bias else [])]
    return [(2 * torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]


WIDE_TARGETS = torch.tensor([4999, 4999, 0, 2047, 2048, 2047, 4095, 7, 8, 4096, 10])


@pytest.mark.parametrize(("entropy", "wide"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.6}, {"softcap": 3.0, "temperature": 0.6}, {"bias": True}],
    ids=["plain", "temperature", "softcap", "bias"],
)
def test_values_and_gradients_equal_those_of_all_logits_in_float64(
    settings: dict[str, Any], entropy: bool, wide: bool
) -> None:
    options, bias, make = dict(settings), bool(settings.get("bias")), wide_inputs if wide else inputs
    options.pop("bias", None)
    ours, exact = make(bias=bias), [each.detach().double().requires_grad_() for each in make(bias=bias)]
    targets = WIDE_TARGETS if wide else TARGETS
    # Chunks of 4 rows; row 2 and others predict nothing.
    found = logprobs_of(*ours, rows=ROWS, targets=targets, budget_bytes=4 * 6 * len(ours[1]), **options)
    assert type(found[0].grad_fn).__name__ == "FusedLogprobsBackward"
    expected = in_double(exact, targets, **options)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    loss(found, entropy=entropy).backward()
    loss(expected, entropy=entropy).backward()
    for tensor, wanted in zip(ours, exact, strict=True):
        assert tensor.grad is not None and wanted.grad is not None
        torch.testing.assert_close(tensor.grad.double(), wanted.grad, rtol=1e-4, atol=2e-5)


def in_double(
    tensors: list[Tensor], targets: Tensor, *, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    hidden, weight, *bias = tensors
    logits = torch.nn.functional.linear(hidden, weight, *bias)
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    log_softmax = (logits / temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax[ROWS, targets], entropy[ROWS]


def test_a_gradient_in_bfloat16_is_rounded_once() -> None:
    """Of a token with a probability near 1, p - 1 is computed in float32. Two tokens have the same row."""
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    logits[:, 5] += 9.0
    tokens = HeadTokens(torch.tensor([0, 2, 3]), torch.tensor([5, 7, 5]))
    scale: dict[str, Any] = {"temperature": 0.8, "softcap": None}
    found = HeadStatistics.empty(2, 3, torch.device("cpu"))
    head_statistics(logits, 0, tokens, found, **scale)
    exact = logits.double().requires_grad_()
    logprobs = (exact / 0.8).log_softmax(-1)[torch.tensor([0, 0, 1]), tokens.token_ids]
    grads = torch.tensor([1.0, 0.25, -2.0])
    (logprobs * grads).sum().backward()
    assert exact.grad is not None
    assert 0 < abs(float(exact.grad[1, 5])) < 0.01
    rounded = head_gradient(
        logits, 0, tokens, found.normalizers, found.entropy, grads, None, dtype=torch.bfloat16, **scale
    )
    torch.testing.assert_close(rounded.double(), exact.grad, rtol=2**-7, atol=1e-7)  # the interpreter truncates


def test_hits_are_the_most_likely_tokens_and_the_first_of_equal_ones() -> None:
    hidden, weight = wide_inputs()
    with torch.no_grad():
        weight[4097] = weight[3] = 3 * hidden[0]  # lane 3 of a block has the later one's maximum, too
    found, hits = logprobs_of(hidden, weight, rows=ROWS, targets=WIDE_TARGETS.clone().fill_(3), statistic="hit")
    best = (hidden @ weight.T).argmax(-1)
    assert best[0] == 3
    assert hits.tolist() == (best[ROWS] == 3).float().tolist()
    assert not hits.requires_grad
    torch.testing.assert_close(found, plain_logprobs(hidden, weight, rows=ROWS, targets=torch.full_like(ROWS, 3))[0])


def test_a_frozen_output_layer_gets_no_gradient() -> None:
    hidden, weight = inputs()
    weight.requires_grad_(False)
    logprobs, _ = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_a_probability_of_zero_has_finite_gradients() -> None:
    hidden, weight = inputs()
    with torch.no_grad():
        hidden.mul_(1e3)
    logprobs, entropy = logprobs_of(hidden, weight, rows=ROWS, targets=TARGETS)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert entropy.min() >= -1e-6
