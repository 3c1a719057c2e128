"""`token_logprobs` in Triton kernels: large chunks of rows, no kept probabilities, and no wait for the device.

Logits are computed again in the backward pass: a matrix product reads and writes less than keeping them would.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tidemill.kernels.head import HeadStatistics, HeadTokens, head_gradient, head_statistics
from tidemill.models.attention import float32_product

if TYPE_CHECKING:
    from tidemill.models.token_logprobs import Targets

_CHUNK_ROWS = 4096
_ROW_BYTES = 6  # per token of the vocabulary: a logit in float32 and its gradient in bfloat16


class FusedLogprobs(torch.autograd.Function):
    """Logprobs float32 [T] and a statistic float32 [T], as `token_logprobs` describes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        device, rounded_weight = hidden.device, weight.to(hidden.dtype)
        rows = torch.arange(len(hidden) + 1, device=device)
        tokens = HeadTokens(torch.searchsorted(targets.rows, rows), targets.token_ids)
        found = HeadStatistics.empty(len(hidden), len(targets.token_ids), device)
        scale: dict[str, Any] = {"temperature": targets.temperature, "softcap": softcap}
        for states, first in _chunks(hidden, weight, targets):
            head_statistics(_logits(states, rounded_weight, bias), first, tokens, found, **scale)
        if targets.statistic == "entropy":
            values = found.entropy[targets.rows]
        elif targets.statistic == "hit":
            values = (found.argmax[targets.rows] == targets.token_ids).float()
        else:
            values = torch.zeros_like(found.logprobs)
        if targets.statistic != "entropy":
            ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, tokens.starts, found.normalizers, found.entropy)
        ctx.targets, ctx.scale = targets, scale
        return found.logprobs, values

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, value_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, starts, normalizers, entropy = ctx.saved_tensors
        targets, rounded_weight, needs = ctx.targets, weight.to(hidden.dtype), ctx.needs_input_grad
        tokens, grads = HeadTokens(starts, targets.token_ids), (logprob_grad, value_grad)
        hidden_grad = torch.empty_like(hidden) if needs[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        dtype = hidden.dtype if bias_grad is None else torch.float32
        for states, first in _chunks(hidden, weight, targets):
            logits = _logits(states, rounded_weight, bias)
            gradient = head_gradient(logits, first, tokens, normalizers, entropy, *grads, dtype=dtype, **ctx.scale)
            del logits
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
            rounded = gradient.to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(rounded, rounded_weight, out=hidden_grad[first : first + len(states)])
            if weight_grad is not None:
                weight_grad += float32_product(rounded.t(), states.t())
        typed_weight = None if weight_grad is None else weight_grad.to(weight.dtype)
        return hidden_grad, typed_weight, None if bias_grad is None else bias_grad.to(bias.dtype), None, None


def _chunks(hidden: Tensor, weight: Tensor, targets: Targets) -> Iterator[tuple[Tensor, int]]:
    """(states, first row) of each chunk."""
    size = max(1, min(_CHUNK_ROWS, targets.budget_bytes // (_ROW_BYTES * len(weight))))
    for first in range(0, len(hidden), size):
        yield hidden[first : first + size], first


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = float32_product(states, weight)
    return logits if bias is None else logits.add_(bias)
