"""FlexAttention for large token trees: block masks computed from the tree alone, without all pairs of nodes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tidemill.models.token_tree import IntArray, TokenTree

BLOCK = 128
"""Nodes per side of a block of the mask; trees are padded to multiples of it."""

BoolArray = npt.NDArray[np.bool_]


def block_structure(tree: TokenTree) -> tuple[BoolArray, BoolArray]:
    """(partial, full) bool [B, B]: blocks in which some but not all pairs attend, and blocks in which all do.

    Node i attends to node j if `j <= i < ends[j]`. Below the diagonal, a block of queries starting at node s has such a
    pair if any end in the block of keys is above s, and only such pairs if every end is above its last node.
    """
    ends = _padded(tree.ends, 0).reshape(-1, BLOCK)
    count = len(ends)
    first = np.arange(count)[:, None] * BLOCK
    below = first > first.T
    some = below & (ends.max(1)[None] > first) | np.eye(count, dtype=bool)
    full = below & (ends.min(1)[None] > first + BLOCK - 1)
    return some & ~full, full


def tree_block_mask(tree: TokenTree, device: torch.device, *, window: int | None = None) -> BlockMask:
    """The mask of a tree, padded to a multiple of `BLOCK`. A padding node attends to itself only."""
    partial, full = block_structure(tree)
    if window is not None:  # the window is applied within blocks
        partial, full = partial | full, np.zeros_like(full)
    size = partial.shape[0] * BLOCK
    # The end of a padding node is the next node, so no other attends to it.
    ends = torch.from_numpy(np.concatenate([tree.ends, np.arange(tree.size, size) + 1])).to(device)
    depths = torch.from_numpy(_padded(tree.depths, 0)).to(device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = (key <= query) & (query < ends[key])
        return allowed if window is None else allowed & (depths[query] - depths[key] < window)

    return BlockMask.from_kv_blocks(
        *_listed(partial, device), *_listed(full, device), BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(size, size)
    )


class FlexPlan:
    """Attends in a tree with FlexAttention: compiled on a GPU; on a CPU only without gradients."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree, self._device = tree, device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        if window not in self._masks:
            self._masks[window] = tree_block_mask(self._tree, self._device, window=window)
        padding = (0, 0, 0, -self._tree.size % BLOCK)
        query, key, value = (functional.pad(each, padding) for each in (query, key, value))
        attend = _compiled() if query.is_cuda else flex_attention
        mask = self._masks[window]
        out: Tensor = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
        return out[:, :, : self._tree.size]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # Sizes differ from tree to tree. No max-autotune: its benchmarks would choose other kernels in another process.
    return torch.compile(flex_attention, dynamic=True)


def _padded(values: IntArray, value: int) -> IntArray:
    return np.pad(values, (0, -len(values) % BLOCK), constant_values=value)


def _listed(blocks: BoolArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """(count [1, 1, B], indices [1, 1, B, B]) of the chosen blocks of each row, these first."""
    counts = blocks.sum(1).astype(np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)
