"""Draws one token per row: temperature, Gumbel noise, argmax and logsumexp in one read of the logits.

The function is `rollout.sampling.draw` without top-k and top-p. The vocabulary is split into blocks of one size, whose
results a second kernel combines, so the bits of a row do not depend on the other rows or their number.

Tested in Triton's interpreter and compiled for compute capabilities 8.0 and 9.0; not run on a GPU yet. There, noise may
differ by units in the last place from that of a CPU, and so, rarely, a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # tokens
_WARPS = 4


def draw_tokens(logits: Tensor, states: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """(token ids int64 [R], logprobs float32 [R]).

    Args:
        logits: float32 [R, V].
        states: int32 [R], `rollout.sampling.seed_state` of each row's seed.
        positions: int64 [R], of the last input token.
        temperatures: float32 [R]; 0 takes the argmax, with its logprob at temperature 1.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    partial = logits.new_empty((5, rows, blocks))
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(rows)
    _draw_block[(rows, blocks)](
        logits, states, positions, temperatures, partial, logits.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_WARPS
    )
    padded = triton.next_power_of_2(blocks)
    _combine[(rows,)](partial, token_ids, logprobs, vocabulary, blocks, BLOCKS=padded, num_warps=1)
    return token_ids, logprobs


@triton.jit
def _mixed(state, word):
    """The state of murmur3 after one more word, both uint32."""
    word *= 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state ^= word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64


@triton.jit
def _hash(state):
    """murmur3's hash of a state after all 16 bytes."""
    x = state ^ 16
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _gumbel(x):
    """Standard Gumbel noise of a hash, as in `rollout.sampling.gumbel`."""
    low = ((x & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-32)
    u = tl.minimum(low + (x >> 16).to(tl.int32).to(tl.float32) * (2.0**-16), 1.0 - 2.0**-24)
    # -log1p(-u), also of small u: the rounding of 1 - u cancels (Goldberg 1991, theorem 4).
    rest = 1.0 - u
    exact = rest == 1.0
    exponential = tl.where(exact, u, -tl.log(rest) * (u / tl.where(exact, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def _draw_block(logits, states, positions, temperatures, partial, stride, vocabulary, BLOCK: tl.constexpr):
    """The largest noisy logit of a block, its logit and token, and the maximum and sum of exponentials of the block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    scaled = tl.load(logits + row * stride + tokens, mask=tokens < vocabulary, other=-float("inf"))
    scaled = tl.div_rn(scaled, tl.where(temperature == 0.0, 1.0, temperature))
    state = _mixed(tl.load(states + row).to(tl.uint32, bitcast=True), tl.load(positions + row).to(tl.uint32))
    noise = _gumbel(_hash(_mixed(state, tokens.to(tl.uint32))))
    noisy = tl.where(temperature == 0.0, scaled, scaled + noise)
    top, index = tl.max(noisy, 0, return_indices=True)
    chosen = tl.max(tl.where(tl.arange(0, BLOCK) == index, scaled, -float("inf")), 0)
    maximum = tl.max(scaled, 0)
    total = tl.sum(tl.exp(scaled - tl.where(maximum == -float("inf"), 0.0, maximum)), 0)
    plane = tl.num_programs(0) * tl.num_programs(1)
    place = partial + row * tl.num_programs(1) + block
    tl.store(place, top)
    tl.store(place + plane, chosen)
    tl.store(place + 2 * plane, (block * BLOCK + index).to(tl.float32, bitcast=True))
    tl.store(place + 3 * plane, maximum)
    tl.store(place + 4 * plane, total)


@triton.jit
def _combine(partial, token_ids, logprobs, vocabulary, blocks, BLOCKS: tl.constexpr):
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    plane = tl.num_programs(0) * blocks
    inside, places = lanes < blocks, partial + row * blocks + lanes
    _, index = tl.max(tl.load(places, mask=inside, other=-float("inf")), 0, return_indices=True)
    best = partial + row * blocks + index
    token = tl.load(best + 2 * plane).to(tl.int32, bitcast=True)
    tl.store(token_ids + row, tl.minimum(token, vocabulary - 1).to(tl.int64))  # with NaN it could be padding
    maxima = tl.load(places + 3 * plane, mask=inside, other=-float("inf"))
    maximum = tl.max(maxima, 0)
    totals = tl.load(places + 4 * plane, mask=inside, other=0.0)
    normalizer = tl.log(tl.sum(totals * tl.exp(maxima - maximum), 0)) + maximum
    tl.store(logprobs + row, tl.load(best + plane) - normalizer)
