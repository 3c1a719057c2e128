"""Counter-based sampling: token t of sample s is `argmax_k(logit_k / T + Gumbel(hash(sample key, t, k)))`.

The noise depends only on sample key, completion position and token, not on batch composition, worker, restarts or
migration. With independent Gumbel noise the argmax is a draw from the softmax (Gumbel 1954; Maddison et al. 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill.core.records import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_ROWS_PER_BLOCK = 4  # fits the cache of one core


def stream_key(sample_key: int, position: int) -> int:
    """64 random bits for completion position `position` of a sample (splitmix64, Steele et al. 2014)."""
    z = (sample_key + (position + 1) * _GOLDEN64) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token per row, with its log-probability under the distribution it was drawn from."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor  # float32 [R]


def draw(logits: torch.Tensor, keys: Sequence[int], params: Sequence[SamplingParams]) -> Drawn:
    """Draw one token per row of `logits` (float32 [R, V]) with 64-bit stream `keys` [R].

    Greedy rows (temperature 0) take the argmax, with its logprob at temperature 1. With top-k or top-p, logprobs are
    normalised over the kept tokens.
    """
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device)
    scaled = logits / temperatures[:, None] if any(p.temperature not in (0.0, 1.0) for p in params) else logits
    scaled = _keep(scaled, params)
    noisy = [row for row, p in enumerate(params) if p.temperature > 0]
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    for start in range(0, len(noisy), _ROWS_PER_BLOCK):
        rows = noisy[start : start + _ROWS_PER_BLOCK]
        noise = gumbel([keys[row] for row in rows], logits.shape[1], logits.device)
        token_ids[rows] = noise.add_(scaled[rows]).argmax(-1)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0]
    if greedy:
        token_ids[greedy] = scaled[greedy].argmax(-1)
    logprobs = scaled.gather(1, token_ids[:, None])[:, 0] - scaled.logsumexp(-1)
    return Drawn(token_ids=token_ids, logprobs=logprobs)


def gumbel(keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float32 [len(keys), vocabulary], a function of key and column.

    A 31-bit hash h gives v = (h + 1/2) / 2^31 in (0, 1); E = -log(1 - v) is exponential, -log E is Gumbel. Small v are
    exact in float32, so the upper tail, which decides the argmax, has a resolution of 2^-32. Large v are kept below 1.
    """
    low = torch.tensor([_signed(key & 0xFFFFFFFF) for key in keys], dtype=torch.int32, device=device)
    high = torch.tensor([_signed(key >> 32) for key in keys], dtype=torch.int32, device=device)
    x = torch.arange(vocabulary, dtype=torch.int32, device=device)[None] * _signed(0x9E3779B9) + low[:, None]
    _mix(x, 0x7FEB352D, 0x846CA68B)
    x += high[:, None]
    _mix(x, 0x2C1B3C6D, 0x297A2D39)
    v = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int) -> int:
    """Reinterpret a uint32 as int32."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: torch.Tensor, first: int, second: int) -> None:
    """Mix the bits of int32 `x` in place with bijective xor-shifts and multiplications modulo 2^32."""
    for shift, factor in ((16, first), (15, second), (16, None)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # a logical shift
        if factor is not None:
            x *= _signed(factor)


def _keep(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Set the logits outside each row's top-k and top-p to minus infinity."""
    rows = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1]
    if not rows:
        return scaled
    kept = scaled.clone()
    for row in rows:
        p = params[row]
        values, order = kept[row].sort(descending=True)
        if p.top_k:
            values[p.top_k :] = -math.inf
        probability_before = values.softmax(-1).cumsum(-1).roll(1)
        probability_before[0] = 0.0  # always keep the most likely token
        kept[row, order[(probability_before >= p.top_p) | values.isneginf()]] = -math.inf
    return kept
