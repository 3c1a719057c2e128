"""Attention over token trees: each token attends to itself and its ancestors.

On a CPU the tree is cut into blocks, and each block attends to the keys of its own path only: the work grows with the
lengths of the paths, not with the square of the tree. A GPU uses FlexAttention, whose block mask is computed from the
tree alone, without all pairs of nodes. Its backward pass repeats its bits; that of a dense mask does not in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tidemill.models.attention import AttentionPlan, masked_attention
from tidemill.models.token_tree import IntArray, TokenTree
from tidemill.models.transfer import on_device

BLOCK = 128
"""Nodes per side of a block of FlexAttention's mask; trees are padded to multiples of it."""
LEAST_BLOCKS = 2
"""Smallest number of blocks of a padded tree: torch would compile kernels for a single block apart."""
LEAST_WIDTH = 16
"""Smallest width of a head in compiled FlexAttention; narrower ones are padded with zeros."""
BLOCK_TOKENS = 256
"""Longest block. A block computes all pairs of its tokens, of which it needs half."""
PADDING = 1.25
"""Largest ratio of computed to needed pairs of blocks that are computed together."""
_MASK_BYTES = 64 << 20  # of the mask of blocks that are computed together

BoolArray = npt.NDArray[np.bool_]


class TreePlan:
    """Attends in a tree with the implementation that suits its device."""

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._plan: AttentionPlan = BlockPlan(tree) if device.type == "cpu" else FlexPlan(tree, device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        return self._plan.attend(layer, query, key, value, scaling, window)


class Block(NamedTuple):
    """Consecutive nodes `path[-size:]`, of which each is the child of the one before, with all their ancestors."""

    size: int
    path: IntArray  # [K], from the root


def blocks_of(tree: TokenTree) -> list[Block]:
    """Cut a tree where a branch ends, and into blocks of at most `BLOCK_TOKENS` nodes, in the order of the nodes."""
    blocks = []
    path = np.empty(int(tree.depths.max(initial=-1)) + 1, np.int64)
    starts = np.flatnonzero(np.diff(tree.depths, prepend=-2) != 1).tolist()
    for start, end in zip(starts, [*starts[1:], tree.size], strict=True):
        first = int(tree.depths[start])
        path[first : first + end - start] = np.arange(start, end)
        for begin in range(start, end, BLOCK_TOKENS):
            size = min(BLOCK_TOKENS, end - begin)
            blocks.append(Block(size, path[: first + begin - start + size].copy()))
    return blocks


def buckets_of(blocks: Sequence[Block]) -> list[list[int]]:
    """Indices of blocks that are computed together, padded to the largest of them."""
    buckets: list[list[int]] = []
    needed = longest = 0  # pairs of the last bucket, and its longest path
    for index in sorted(range(len(blocks)), key=lambda index: (-blocks[index].size, -len(blocks[index].path), index)):
        size, length = blocks[index].size, len(blocks[index].path)
        if buckets:
            most = blocks[buckets[-1][0]].size  # the first is the largest
            padded = (len(buckets[-1]) + 1) * most * max(longest, length)
        if not buckets or padded > PADDING * (needed + size * length) or padded > _MASK_BYTES:
            buckets.append([])
            needed = longest = 0
        buckets[-1].append(index)
        needed, longest = needed + size * length, max(longest, length)
    return buckets


@dataclass(frozen=True, slots=True)
class _Bucket:
    """B blocks of up to Q nodes with paths of up to K nodes, both aligned at their ends."""

    queries: Tensor  # int64 [B * Q] nodes; padding repeats the first
    keys: Tensor  # int64 [B * K]
    sizes: Tensor  # int64 [B] nodes
    lengths: Tensor  # int64 [B] of the paths
    shape: tuple[int, int, int]  # B, Q, K

    def mask(self, window: int | None) -> Tensor:
        """bool [B, 1, Q, K]. A padded query attends to the whole path, so that its softmax is finite."""
        _, queries, keys = self.shape
        places = torch.arange(queries)[:, None] + keys - queries  # of the query's own key
        others = torch.arange(keys)
        causal = others <= places
        if window is not None:
            causal = causal & (places - others < window)
        padded = torch.arange(queries) < queries - self.sizes[:, None]
        real = others >= keys - self.lengths[:, None]
        return ((causal | padded[:, :, None]) & real[:, None])[:, None]


class BlockPlan:
    """Attends block by block, in float32: on a CPU the backward pass in bfloat16 takes three times as long."""

    def __init__(self, tree: TokenTree) -> None:
        blocks = blocks_of(tree)
        self._buckets = [_bucket([blocks[index] for index in bucket]) for bucket in buckets_of(blocks)]
        self._masks: dict[int | None, list[Tensor]] = {}
        nodes, start = np.empty(tree.size, np.int64), 0
        for bucket, shape in ((bucket.queries, bucket.shape) for bucket in self._buckets):
            # A padding row comes before the row of the node that it repeats.
            nodes[bucket.numpy()] = np.arange(start, start + shape[0] * shape[1])
            start += shape[0] * shape[1]
        self._rows = torch.from_numpy(nodes)  # of each node, in the concatenated results

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        if window not in self._masks:
            self._masks[window] = [bucket.mask(window) for bucket in self._buckets]
        # float32 [N, heads * D] of [1, heads, N, D]
        queries, keys, values = (
            each[0].transpose(0, 1).reshape(each.shape[2], -1).float() for each in (query, key, value)
        )
        outputs = []
        for bucket, mask in zip(self._buckets, self._masks[window], strict=True):
            count, longest, most = bucket.shape
            own = _gathered(queries, bucket.queries).view(count, longest, *query.shape[1::2]).transpose(1, 2)
            seen = _gathered(keys, bucket.keys).view(count, most, *key.shape[1::2]).transpose(1, 2)
            content = _gathered(values, bucket.keys).view(count, most, *value.shape[1::2]).transpose(1, 2)
            with torch.autocast("cpu", enabled=False):
                out = masked_attention(own, seen, content, mask, scaling)
            outputs.append(out.transpose(1, 2).reshape(count * longest, -1))
        rows = _gathered(torch.cat(outputs), self._rows).to(query.dtype)
        return rows.view(1, len(rows), query.shape[1], value.shape[3]).transpose(1, 2)


def _bucket(blocks: Sequence[Block]) -> _Bucket:
    sizes, lengths = [block.size for block in blocks], [len(block.path) for block in blocks]
    shape = len(blocks), max(sizes), max(lengths)
    queries, keys = np.empty(shape[:2], np.int64), np.empty((shape[0], shape[2]), np.int64)
    for row, block in enumerate(blocks):
        own = block.path[len(block.path) - block.size :]
        queries[row], keys[row] = own[0], block.path[0]
        queries[row, shape[1] - block.size :] = own
        keys[row, shape[2] - len(block.path) :] = block.path
    return _Bucket(
        torch.from_numpy(queries.ravel()),
        torch.from_numpy(keys.ravel()),
        torch.tensor(sizes),
        torch.tensor(lengths),
        shape,
    )


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    result: Tensor = _Gather.apply(rows, index)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    """Rows [M, C] of float32 [N, C], each of which may be taken several times."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return functional.embedding(index, rows)  # several times as fast as indexing

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient, index, ctx.count, -1, False), None


def block_structure(tree: TokenTree) -> tuple[BoolArray, BoolArray]:
    """(partial, full) bool [B, B]: blocks in which some but not all pairs attend, and blocks in which all do.

    Node i attends to node j if `j <= i < ends[j]`. Below the diagonal, a block of queries starting at node s has such a
    pair if any end in the block of keys is above s, and only such pairs if every end is above its last node.
    """
    ends = _padded(tree.ends).reshape(-1, BLOCK)
    count = len(ends)
    first = np.arange(count)[:, None] * BLOCK
    below = first > first.T
    some = below & (ends.max(1)[None] > first) | np.eye(count, dtype=bool)
    full = below & (ends.min(1)[None] > first + BLOCK - 1)
    return some & ~full, full


def tree_block_mask(tree: TokenTree, device: torch.device, *, window: int | None = None) -> BlockMask:
    """The mask of a tree, padded to whole blocks. A padding node attends to itself only."""
    partial, full = block_structure(tree)
    if window is not None:  # the window is applied within blocks
        partial, full = partial | full, np.zeros_like(full)
    size = partial.shape[0] * BLOCK
    # The end of a padding node is the next node, so no other attends to it.
    ends = on_device(np.concatenate([tree.ends, np.arange(tree.size, size) + 1]), device)
    depths = on_device(_padded(tree.depths), device)

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
        nodes, width = self._tree.size, value.shape[-1]
        rows = _padded_size(nodes) - nodes
        query, key, value = (
            functional.pad(each, (0, max(0, LEAST_WIDTH - each.shape[-1]), 0, rows)) for each in (query, key, value)
        )
        attend = _compiled() if query.is_cuda else flex_attention
        mask = self._masks[window]
        out: Tensor = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
        return out[:, :, :nodes, :width]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # Sizes differ from tree to tree. No max-autotune: its benchmarks would choose other kernels in another process.
    return torch.compile(flex_attention, dynamic=True)


def _padded_size(nodes: int) -> int:
    return BLOCK * max(LEAST_BLOCKS, -(-nodes // BLOCK))


def _padded(values: IntArray) -> IntArray:
    return np.pad(values, (0, _padded_size(len(values)) - len(values)))


def _listed(blocks: BoolArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """(count [1, 1, B], indices [1, 1, B, B]) of the chosen blocks of each row, these first."""
    counts = blocks.sum(1).astype(np.int32)
    indices = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return on_device(counts[None, None], device), on_device(indices[None, None], device)
