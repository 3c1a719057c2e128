"""Attention of one query per row of the cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MASK_ALIGNMENT = 16
"""Tokens; a GPU's kernels copy a mask whose rows are not a multiple of it."""


class DecodeAttention:
    """The newest token of each of the first R rows attends to all tokens of its row.

    Args:
        lengths: int64 [R], tokens of each row before the newest.
        longest: tokens of the longest row, with the newest.
        capacity: tokens for which each row has room.
    """

    def __init__(self, lengths: Tensor, *, longest: int, capacity: int) -> None:
        self._lengths = lengths
        if lengths.device.type == "cpu":
            # Reading all memory in order is faster than skipping up to half of it, in pieces.
            self._read = longest if 2 * longest < capacity else capacity
        else:
            self._read = min(-(-longest // MASK_ALIGNMENT) * MASK_ALIGNMENT, capacity)
        self._masks: dict[tuple[int | None, bool], Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None) -> Tensor:
        """Shapes as in `decode_attention`, of whole layers of the cache."""
        rows = len(self._lengths)
        keys, values = keys[:rows, :, : self._read], values[:rows, :, : self._read]
        products = keys.device.type == "cpu" and keys.dtype == torch.float32
        if (window, products) not in self._masks:
            mask = causal_mask(self._lengths, self._read, window)[:, None, None]
            if products:
                zeros = torch.zeros(mask.shape, device=mask.device)
                mask = zeros.masked_fill_(~mask, -torch.inf).expand(-1, keys.shape[1], -1, -1).flatten(0, 1)
            self._masks[window, products] = mask
        attend = decode_products if products else decode_attention
        return attend(query, keys, values, self._masks[window, products], scaling)


def causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """bool [R, length]: what the query at each of the positions, int64 [R], may attend to."""
    places = torch.arange(length, device=positions.device)
    mask = places[None] <= positions[:, None]
    if window is not None:
        mask &= places[None] > positions[:, None] - window
    return mask


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """[1, heads, R, W], the attention of one query per row.

    Args:
        query: [1, heads, R, D].
        keys: [R, kv_heads, L, D].
        values: [R, kv_heads, L, W].
        mask: bool [R, 1, 1, L].

    Query heads that share a key-value head are moved to the query-length dimension, so keys need not be repeated.
    """
    heads, rows, width = query.shape[1:]
    grouped = query[0].transpose(0, 1).reshape(rows, keys.shape[1], heads // keys.shape[1], width)
    out = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling)
    return out.reshape(rows, heads, values.shape[-1]).transpose(0, 1)[None]


def decode_products(query: Tensor, keys: Tensor, values: Tensor, added: Tensor, scaling: float) -> Tensor:
    """`decode_attention` as two batched products: faster on a CPU, in float32.

    Args:
        added: float32 [R * kv_heads, 1, L], 0 or minus infinity, added to the scores.
    """
    heads, rows, width = query.shape[1:]
    grouped = query[0].transpose(0, 1).reshape(rows * keys.shape[1], heads // keys.shape[1], width)
    scores = torch.baddbmm(added, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    return out.reshape(rows, heads, values.shape[-1]).transpose(0, 1)[None]
