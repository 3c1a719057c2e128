"""Attention of one query per entry over rows of the KV cache; entries of a group read a common prefix once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Which tokens of which row of the cache each of B entries attends to. All tensors are on the device.

    The first `prefix_lengths` tokens are read from `prefix_rows`, the others, at the same positions, from `rows`. An
    entry with a prefix is in exactly one group. The entries of a group are adjacent and have the same prefix.
    """

    rows: Tensor  # int64 [B]
    lengths: Tensor  # int32 [B], tokens with the newest; 0 for padding, whose output is finite
    prefix_rows: Tensor  # int64 [B]
    prefix_lengths: Tensor  # int32 [B]; 0 = no prefix
    group_first: Tensor  # int32 [G], G <= B: the first entry of a group
    group_size: Tensor  # int32 [G]; 0 = no group


def decode(
    query: Tensor, keys: Tensor, values: Tensor, layout: DecodeLayout, *, scaling: float, window: int | None
) -> Tensor:
    """[B, heads, W] of query [B, heads, D], keys [N, kv_heads, C, D] and values [N, kv_heads, C, W]."""
    return decode_reference(query, keys, values, layout, scaling=scaling, window=window)


def decode_reference(
    query: Tensor, keys: Tensor, values: Tensor, layout: DecodeLayout, *, scaling: float, window: int | None
) -> Tensor:
    """The function of `decode`, in float32 and without branches on the device's numbers."""
    entries, heads, _ = query.shape
    kv_heads, capacity = keys.shape[1:3]
    places = torch.arange(capacity, device=query.device)
    rows = torch.where(places < layout.prefix_lengths[:, None], layout.prefix_rows[:, None], layout.rows[:, None])
    own_keys = keys[rows, :, places].float()  # [B, C, kv_heads, D]
    own_values = values[rows, :, places].float()
    grouped = query.float().reshape(entries, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("bkrd,bckd->bkrc", grouped, own_keys) * scaling
    visible = places < layout.lengths[:, None]
    if window is not None:
        visible &= places >= layout.lengths[:, None] - window
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))  # of padding
    out = torch.einsum("bkrc,bckw->bkrw", weights, own_values)
    return out.reshape(entries, heads, -1).to(query.dtype)
