"""Logprobs of chosen tokens from hidden states, without a [tokens, vocabulary] block beyond a budget.

The output layer, softmax and gather are one autograd function, computed in chunks of rows. Element-wise work runs over
a few rows at a time, which stay in the cache. Probabilities that fit the budget are kept for the backward pass, the
others are computed again. On a GPU `fused_logprobs` computes the same in Triton kernels, if they can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.kernels.availability import missing
from tidemill.models.attention import float32_product, logit_softcap, output_layer

Statistic: TypeAlias = Literal["entropy", "hit", "none"]
"""Computed with the logprobs of the tokens: entropy in nats of the distribution that predicts each; 1 if it has the
highest probability there, else 0; or nothing (zeros)."""

FLOAT_BYTES = 4
_CHUNK_ROWS = 512  # for an efficient matrix product
_CACHED_BYTES = 1 << 20


class Targets(NamedTuple):
    """T tokens to compute logprobs of, predicted by H states."""

    rows: Tensor  # int64 [T], the state that predicts each token, ascending
    token_ids: Tensor  # int64 [T]
    temperature: float  # of the logits
    budget_bytes: int  # largest size of the probabilities kept for the backward pass, and of a chunk of them
    statistic: Statistic = "entropy"


def token_logprobs(model: PreTrainedModel, hidden: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Logprobs float32 [T] of target tokens, and a statistic float32 [T]; entropy has a gradient, too.

    Args:
        model: its output layer is used.
        hidden: [H, hidden], the states that predict.
    """
    layer = output_layer(model)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    function: type[torch.autograd.Function] = _TokenLogprobs
    if missing(hidden.device) is None:
        from tidemill.models.fused_logprobs import FusedLogprobs  # imports Triton

        function = FusedLogprobs
    results: tuple[Tensor, Tensor] = function.apply(hidden, layer.weight, layer.bias, targets, logit_softcap(model))
    return results


class _TokenLogprobs(torch.autograd.Function):
    """With z the scaled logits of a row, p their softmax and H its entropy: logprob_t = z_t - logsumexp(z), so
    d logprob_t / dz = onehot(t) - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        rows, statistic = targets.rows, targets.statistic
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        values = torch.zeros_like(logprobs)
        entropy = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        rounded_weight = weight.to(hidden.dtype)
        needed = any(ctx.needs_input_grad[:3])
        kept: dict[int, Tensor] = {}  # by chunk; a short last one may fit when one before it did not
        for number, (states, first, last, tokens) in enumerate(_chunks(hidden, weight, targets)):
            logits = _logits(states, rounded_weight, bias, targets.temperature, softcap)
            own, chosen = rows[tokens] - first, targets.token_ids[tokens]
            picked = logits[own, chosen]
            if statistic == "hit":
                values[tokens] = (logits.argmax(-1)[own] == chosen).float()
            normalizers = _to_probabilities(logits, entropy[first:last] if statistic == "entropy" else None)
            logprobs[tokens] = picked - normalizers[own]
            nbytes = sum(each.nbytes for each in kept.values()) + logits.nbytes
            if needed and not softcap and nbytes <= targets.budget_bytes:
                kept[number] = logits
        if statistic == "entropy":
            values = entropy[rows]
        else:
            ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, entropy)
        ctx.targets, ctx.softcap, ctx.kept = targets, softcap, kept
        return logprobs, values

    @staticmethod
    def backward(ctx: Any, logprob_grad: Tensor | None, value_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, entropy = ctx.saved_tensors
        targets, softcap, kept = ctx.targets, ctx.softcap, ctx.kept
        temperature, rounded_weight = targets.temperature, weight.to(hidden.dtype)
        needs = ctx.needs_input_grad
        hidden_grad = torch.empty_like(hidden) if needs[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        for number, (states, first, last, tokens) in enumerate(_chunks(hidden, weight, targets)):
            own, chosen = targets.rows[tokens] - first, targets.token_ids[tokens]
            slope = None
            if number in kept:
                gradient = kept.pop(number)
            else:
                gradient = _logits(states, rounded_weight, bias, temperature, softcap)
                slope = 1 - (gradient * (temperature / softcap)).square() if softcap else None
                _to_probabilities(gradient, None)
            token_grad = torch.zeros(len(own), device=own.device) if logprob_grad is None else logprob_grad[tokens]
            entropy_grad = None if value_grad is None else _summed(value_grad[tokens], own, last - first)
            _to_gradient(gradient, _summed(token_grad, own, last - first), entropy_grad, entropy[first:last])
            gradient.index_put_((own, chosen), token_grad, accumulate=True)
            if slope is not None:
                gradient *= slope
            if temperature != 1.0:
                gradient /= temperature
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
            rounded = gradient.to(hidden.dtype)
            del gradient
            if hidden_grad is not None:
                torch.mm(rounded, rounded_weight, out=hidden_grad[first:last])
            if weight_grad is not None:
                if rounded.dtype == weight_grad.dtype:
                    weight_grad.addmm_(rounded.t(), states)
                else:
                    weight_grad += rounded.t() @ states
        grads = weight_grad, bias_grad
        typed = (None if g is None else g.to(each.dtype) for g, each in zip(grads, (weight, bias), strict=True))
        return hidden_grad, *typed, None, None


def _chunks(hidden: Tensor, weight: Tensor, targets: Targets) -> Iterator[tuple[Tensor, int, int, slice]]:
    """(states, first row, end, tokens that they predict) of each chunk."""
    size = max(1, min(_CHUNK_ROWS, targets.budget_bytes // (FLOAT_BYTES * len(weight))))
    starts = list(range(0, len(hidden), size))
    edges = torch.tensor([*starts, len(hidden)], device=targets.rows.device)
    at = torch.searchsorted(targets.rows, edges).tolist()
    for number, first in enumerate(starts):
        last = min(first + size, len(hidden))
        yield hidden[first:last], first, last, slice(at[number], at[number + 1])


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    """float32 [R, vocabulary], capped and divided by the temperature."""
    logits = float32_product(states, weight)
    if bias is not None:
        logits += bias
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits /= temperature
    return logits


def _cached_rows(block: Tensor) -> int:
    return max(1, _CACHED_BYTES // (FLOAT_BYTES * block.shape[1])) if block.device.type == "cpu" else len(block)


def _to_probabilities(logits: Tensor, entropy: Tensor | None) -> Tensor:
    """Replace logits by probabilities; returns the normalizers [R] and writes the entropy [R] of each row."""
    normalizers = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    size = _cached_rows(logits)
    for start in range(0, len(logits), size):
        block = logits[start : start + size]
        largest = block.amax(-1, keepdim=True)
        block -= largest
        powers = torch.exp(block)
        total = powers.sum(-1, keepdim=True)
        log_total = total.log()[:, 0]
        normalizers[start : start + size] = largest[:, 0] + log_total
        if entropy is not None:
            entropy[start : start + size] = log_total - torch.linalg.vecdot(powers, block) / total[:, 0]
        torch.div(powers, total, out=block)
    return normalizers


def _to_gradient(probabilities: Tensor, token_grad: Tensor, entropy_grad: Tensor | None, entropy: Tensor) -> None:
    """Replace the probabilities p of each row by `-p token_grad - p (log p + entropy) entropy_grad`."""
    size = _cached_rows(probabilities)
    for start in range(0, len(probabilities), size):
        block, rows = probabilities[start : start + size], slice(start, start + size)
        if entropy_grad is None:
            block *= -token_grad[rows, None]
            continue
        slope, factor = entropy_grad[rows, None], token_grad[rows] + entropy_grad[rows] * entropy[rows]
        surprise = torch.special.xlogy(block, block)
        block.mul_(-factor[:, None]).sub_(surprise.mul_(slope))


def _summed(values: Tensor, rows: Tensor, count: int) -> Tensor:
    sums = torch.zeros(count, dtype=torch.float32, device=values.device)
    if values.is_cuda:  # `index_add_` adds there in any order; this sorts
        return sums.index_put_((rows,), values, accumulate=True)
    return sums.index_add_(0, rows, values)
