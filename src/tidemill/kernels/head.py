"""Statistics and gradient of an output layer's logits: one read of the logits, and one read with one write.

A logit l becomes z = c tanh(l / c) / temperature with a soft cap c, else l / temperature. With p the softmax of a row's
z and H its entropy: d logprob_t / dz = onehot(t) - p, and dH / dz = -p (log p + H). Sums have a fixed order.

Tested in Triton's interpreter and compiled for compute capabilities 8.0 and 9.0; not run on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # tokens
_WARPS = 8
_LOWEST = tl.constexpr(-1e30)  # finite, so that a difference from it is a number


class HeadTokens(NamedTuple):
    """T tokens whose logprobs are wanted, ordered by the row that predicts them."""

    starts: Tensor  # int64 [R + 1], first token of each row, and the end
    token_ids: Tensor  # int64 [T]


class HeadStatistics(NamedTuple):
    """Of R rows of logits and T tokens."""

    normalizers: Tensor  # float32 [R], logsumexp of z
    entropy: Tensor  # float32 [R], nats
    argmax: Tensor  # int64 [R], the first of equal ones
    logprobs: Tensor  # float32 [T]

    @staticmethod
    def empty(rows: int, tokens: int, device: torch.device) -> HeadStatistics:
        normalizers, entropy = torch.empty((2, rows), dtype=torch.float32, device=device).unbind()
        argmax = torch.empty(rows, dtype=torch.int64, device=device)
        return HeadStatistics(normalizers, entropy, argmax, torch.empty(tokens, dtype=torch.float32, device=device))


def head_statistics(
    logits: Tensor, first: int, tokens: HeadTokens, out: HeadStatistics, *, temperature: float, softcap: float | None
) -> None:
    """Write the statistics of logits float32 [N, V], which are those of the rows from `first`, and of their tokens."""
    _statistics[(len(logits),)](
        logits, tokens.starts, tokens.token_ids, out.normalizers, out.entropy, out.argmax, out.logprobs,
        first, logits.shape[1], logits.stride(0), (softcap or 1.0) / temperature, 1.0 / (softcap or 1.0),
        CAPPED=bool(softcap), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip


def head_gradient(
    logits: Tensor,
    first: int,
    tokens: HeadTokens,
    normalizers: Tensor,
    entropy: Tensor,
    token_grad: Tensor | None,
    entropy_grad: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [N, V] of the logits float32 [N, V] of the rows from `first`.

    Args:
        normalizers, entropy: of all rows.
        token_grad: float32 [T], of the tokens' logprobs.
        entropy_grad: float32 [T], of the entropy of the row that predicts each token.
    """
    gradient = torch.empty_like(logits, dtype=dtype)
    rows, vocabulary = logits.shape
    nothing = normalizers  # not read
    _gradient[(rows, triton.cdiv(vocabulary, _BLOCK))](
        logits, tokens.starts, tokens.token_ids, normalizers, entropy,
        nothing if token_grad is None else token_grad.contiguous(),
        nothing if entropy_grad is None else entropy_grad.contiguous(),
        gradient, first, vocabulary, logits.stride(0),
        1.0 / temperature, (softcap or 1.0) / temperature, 1.0 / (softcap or 1.0),
        OF_TOKENS=token_grad is not None, OF_ENTROPY=entropy_grad is not None,
        CAPPED=bool(softcap), BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return gradient


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _scaled(logits, scale, inverse_cap, CAPPED: tl.constexpr):
    """z of logits, with the scale c / temperature under a cap, else 1 / temperature."""
    if CAPPED:
        return scale * _tanh(logits * inverse_cap)
    return logits * scale


@triton.jit(do_not_specialize=["first"])
def _statistics(
    logits, starts, token_ids, normalizers, entropy, argmax, logprobs,
    first, vocabulary, stride, scale, inverse_cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    # Of each lane: maximum, its place, Σ exp(z - maximum), Σ exp(z - maximum) (z - maximum).
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + lanes
        inside = columns < vocabulary
        z = _scaled(tl.load(logits + row * stride + columns, mask=inside, other=0.0), scale, inverse_cap, CAPPED)
        z = tl.where(inside, z, _LOWEST)
        place = tl.where(z > largest, columns, place)
        higher = tl.maximum(z, largest)
        shrunk, change = tl.exp(largest - higher), largest - higher
        power = tl.where(inside, tl.exp(z - higher), 0.0)
        moment = tl.where(total > 0.0, shrunk * (moment + change * total), 0.0) + power * (z - higher)
        total = total * shrunk + power
        largest = higher
    top = tl.max(largest, 0)
    shrunk = tl.exp(largest - top)
    whole_moment = tl.sum(tl.where(total > 0.0, shrunk * (moment + (largest - top) * total), 0.0), 0)
    whole = tl.sum(total * shrunk, 0)
    normalizer = top + tl.log(whole)
    tl.store(normalizers + first + row, normalizer)
    tl.store(entropy + first + row, tl.log(whole) - whole_moment / whole)
    tl.store(argmax + first + row, tl.min(tl.where(largest == top, place, vocabulary), 0).to(tl.int64))
    for token in range(tl.load(starts + first + row), tl.load(starts + first + row + 1)):
        chosen = tl.load(logits + row * stride + tl.load(token_ids + token))
        tl.store(logprobs + token, _scaled(chosen, scale, inverse_cap, CAPPED) - normalizer)


@triton.jit(do_not_specialize=["first"])
def _gradient(
    logits, starts, token_ids, normalizers, entropy, token_grad, entropy_grad,
    gradient, first, vocabulary, stride, inverse, scale, inverse_cap,
    OF_TOKENS: tl.constexpr, OF_ENTROPY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    z = _scaled(tl.load(logits + row * stride + columns, mask=inside, other=0.0), scale, inverse_cap, CAPPED)
    logprob = z - tl.load(normalizers + first + row)
    onehot = tl.zeros([BLOCK], tl.float32)
    of_tokens = 0.0
    of_entropy = 0.0
    for token in range(tl.load(starts + first + row), tl.load(starts + first + row + 1)):
        if OF_TOKENS:
            slope = tl.load(token_grad + token)
            of_tokens += slope
            onehot += tl.where(columns == tl.load(token_ids + token), slope, 0.0)
        if OF_ENTROPY:
            of_entropy += tl.load(entropy_grad + token)
    factor = of_tokens
    if OF_ENTROPY:
        factor += of_entropy * (logprob + tl.load(entropy + first + row))
    result = (onehot - tl.exp(logprob) * factor) * inverse
    if CAPPED:
        tanh = z / scale
        result *= 1.0 - tanh * tanh
    tl.store(gradient + row * stride + columns, result.to(gradient.dtype.element_ty), mask=inside)
