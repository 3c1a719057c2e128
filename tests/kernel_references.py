"""What kernels compute, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.kernels.decode import DecodeLayout


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
