"""Token trees: sequences packed so that a shared prefix is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A prefix tree of S sequences; each of its N nodes is one distinct prefix and is computed once.

    A node's hidden state depends only on its ancestors, so one forward pass over the nodes equals one pass over all
    sequences, and the gradient of a shared node is the sum over its sequences. Nodes are in depth-first order, so that
    "j is an ancestor of i" is the interval test `j <= i < ends[j]`.
    """

    token_ids: IntArray  # [N]
    depths: IntArray  # [N] position of the node's token in its sequences
    ends: IntArray  # [N] one past the last node of the subtree
    paths: tuple[IntArray, ...]  # per sequence, in input order: the nodes of its tokens

    @property
    def size(self) -> int:
        return len(self.token_ids)

    def ancestor_mask(self, device: torch.device, *, window: int | None = None) -> Tensor:
        """bool [N, N]: whether node i (row) attends to node j (column), optionally in a sliding window of positions."""
        ends = torch.from_numpy(self.ends).to(device)
        nodes = torch.arange(self.size, device=device)
        mask = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < ends[None, :])
        if window is not None:
            depths = torch.from_numpy(self.depths).to(device)
            mask &= depths[:, None] - depths[None, :] < window
        return mask


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two token arrays."""
    shorter = min(len(a), len(b))
    differing = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differing[0]) if len(differing) else shorter


def build_tree(sequences: Sequence[Tokens]) -> TokenTree:
    """Pack sequences (int32 [T_s] each) into a tree, in lexicographic order."""
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].tolist())
    paths: list[IntArray] = [np.empty(0, np.int64)] * len(sequences)
    tokens: list[Tokens] = []
    depths: list[IntArray] = []
    size, previous, path = 0, np.empty(0, np.int32), np.empty(0, np.int64)
    for index in order:
        sequence = sequences[index]
        shared = common_prefix(previous, sequence)
        added = len(sequence) - shared
        path = np.concatenate([path[:shared], np.arange(size, size + added)])
        tokens.append(sequence[shared:])
        depths.append(np.arange(shared, len(sequence)))
        paths[index], previous = path, sequence
        size += added
    ends = np.empty(size, np.int64)
    reached = 0
    for index in order:
        reached = max(reached, int(paths[index][-1]) + 1) if len(paths[index]) else reached
        ends[paths[index]] = reached
    return TokenTree(
        token_ids=np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64),
        depths=np.concatenate(depths).astype(np.int64) if depths else np.empty(0, np.int64),
        ends=ends,
        paths=tuple(paths),
    )
