"""Counter-based sampling: the next token is `argmax_k(logit_k / T + Gumbel(murmur3(seed, position, k)))`.

The noise depends only on the sample's seed, the position of the last input token and the token, not on batch
composition, worker, engine, restarts or migration. With independent Gumbel noise the argmax is a draw from the softmax
(Gumbel 1954; Maddison et al. 2014). The function is that of vLLM's Model Runner V2: -log(-log(1 - u)) of a uniform u.
SGLang's deterministic mode hashes the same three numbers and takes -log(-log(u)), which gives other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional

from tidemill.core.records import SamplingParams

NOISE = "murmur3, -log(-log(1 - u))"
"""Name of this noise (`EngineCapabilities.draws`). A sample continues exactly only where the noise is the same."""
STREAM = "stream"
"""Random numbers in the order of an engine's calls: no sample could continue elsewhere."""
_MASK32 = (1 << 32) - 1
_BLOCK_BYTES = 1 << 20  # of noise; fits the cache of one core
_BLOCK_ROWS = 32  # of a sum on a GPU
# Constants of MurmurHash3 x86_32 (Appleby).
_C1, _C2, _N, _F1, _F2 = 0xCC9E2D51, 0x1B873593, 0xE6546B64, 0x85EBCA6B, 0xC2B2AE35


def seed_state(seed: int) -> int:
    """32 bits: the state of murmur3 after a 64-bit seed."""
    return _mixed(_mixed(0, seed & _MASK32), (seed >> 32) & _MASK32)


def noise_key(seed: int, position: int) -> int:
    """32 bits: the state of murmur3 after a 64-bit seed and a position.

    Args:
        position: index of the last input token, counted from the start of the prompt.
    """
    return _mixed(seed_state(seed), position & _MASK32)


def _mixed(state: int, word: int) -> int:
    mixed = (_rotated((word * _C1) & _MASK32, 15) * _C2) & _MASK32
    return (_rotated(state ^ mixed, 13) * 5 + _N) & _MASK32


def _rotated(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK32


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token per row, with its log-probability under the distribution it was drawn from."""

    token_ids: torch.Tensor  # int64 [R]
    logprobs: torch.Tensor  # float32 [R]


def draw(logits: torch.Tensor, keys: Sequence[int], params: Sequence[SamplingParams]) -> Drawn:
    """Draw one token per row of `logits` (float32 [R, V]) with the `noise_key` of each row.

    Greedy rows (temperature 0) take the argmax, with its logprob at temperature 1. With top-k or top-p, logprobs are
    normalised over the kept tokens.
    """
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=logits.device)
    scaled = logits / temperatures[:, None] if any(p.temperature not in (0.0, 1.0) for p in params) else logits
    scaled = _keep(scaled, params)
    noisy = [row for row, p in enumerate(params) if p.temperature > 0]
    token_ids = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    block = max(1, _BLOCK_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(params)
    for start in range(0, len(noisy), block):
        rows = noisy[start : start + block]
        noise = gumbel([keys[row] for row in rows], logits.shape[1], logits.device)
        chosen = slice(start, start + len(rows)) if len(noisy) == len(params) else rows  # a slice copies nothing
        token_ids[chosen] = noise.add_(scaled[chosen]).argmax(-1)
    greedy = [row for row, p in enumerate(params) if p.temperature == 0]
    if greedy:
        token_ids[greedy] = scaled[greedy].argmax(-1)
    logprobs = scaled.gather(1, token_ids[:, None])[:, 0] - normalizers(scaled)
    return Drawn(token_ids=token_ids, logprobs=logprobs)


def normalizers(scaled: torch.Tensor) -> torch.Tensor:
    """The logsumexp of each row, float32 [R], whose bits do not depend on the other rows or their number."""
    # The number of rows determines how a GPU splits the sum over a row among its threads.
    return scaled.logsumexp(-1) if scaled.device.type == "cpu" else blockwise_logsumexp(scaled)


def blockwise_logsumexp(scaled: torch.Tensor) -> torch.Tensor:
    """The logsumexp of each row, computed in blocks of one shape."""
    blocks = functional.pad(scaled, (0, 0, 0, -len(scaled) % _BLOCK_ROWS)).split(_BLOCK_ROWS)
    return torch.cat([block.logsumexp(-1) for block in blocks])[: len(scaled)]


def gumbel(keys: Sequence[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float32 [len(keys), vocabulary], a function of key and column.

    Of the hash h, u = (h + 1/2) / 2^32 is in (0, 1), -log(1 - u) is exponential, and its negative logarithm is Gumbel.
    Small u, which decide the argmax, keep all 32 bits.
    """
    x = torch.tensor([_signed(key) for key in keys], dtype=torch.int32, device=device)[:, None]
    x = x ^ _token_words(vocabulary, device)
    _rotate(x, 13)
    x.mul_(5).add_(_signed(_N)).bitwise_xor_(16)  # 16: bytes hashed
    for shift, factor in ((16, _F1), (13, _F2), (16, None)):
        x ^= _shifted(x, shift)
        if factor is not None:
            x *= _signed(factor)
    u = (x & 0xFFFF).float().add_(0.5).mul_(2.0**-32)
    u.add_(_shifted(x, 16), alpha=2.0**-16).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _token_words(vocabulary: int, device: torch.device) -> torch.Tensor:
    """The token ids as murmur3 mixes them into its state, int32 [vocabulary]."""
    words = torch.arange(vocabulary, dtype=torch.int32, device=device) * _signed(_C1)
    _rotate(words, 15)
    return words * _signed(_C2)


def _signed(value: int) -> int:
    """Reinterpret a uint32 as int32."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _rotate(x: torch.Tensor, bits: int) -> None:
    """Rotate int32 to the left, in place."""
    low = _shifted(x, 32 - bits)
    x.bitwise_left_shift_(bits).bitwise_or_(low)


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
