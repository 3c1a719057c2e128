"""Samples packed into microbatches: one token tree each, so that a prompt is computed once for its whole group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tidemill.core.records import Trajectory
from tidemill.models.token_tree import TokenTree, build_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A sample, its advantage, and the weight of each of its trained tokens in the loss."""

    trajectory: Trajectory
    advantage: float
    token_weight: float


@dataclass(slots=True, kw_only=True)
class Microbatch:
    """T trained tokens of some samples, over the tree of everything that precedes them.

    A token is predicted at the node of the token before it. Tokens stand in order of that node, so that a chunk of head
    rows is a contiguous run of tokens.
    """

    tree: TokenTree
    head_nodes: torch.Tensor  # int64 [H], distinct nodes that predict a trained token, ascending
    head_rows: torch.Tensor  # int64 [T], which of them predicts the token, ascending
    targets: torch.Tensor  # int64 [T]
    advantages: torch.Tensor  # float32 [T]
    weights: torch.Tensor  # float32 [T]
    rollout_logprobs: torch.Tensor  # float32 [T]
    unpacked_tokens: int  # what the samples would cost without sharing
    proximal_logprobs: torch.Tensor | None = None  # float32 [T], once measured
    ref_logprobs: torch.Tensor | None = None  # float32 [T], once measured
    states: torch.Tensor | None = None  # [H, hidden] of the policy at `head_nodes`, while its forward pass is alive

    @property
    def tokens(self) -> int:
        return len(self.targets)


def packed_size(samples: Sequence[Weighted]) -> int:
    """Tokens to compute for these samples in one tree."""
    return build_tree([_inputs(sample.trajectory) for sample in samples]).size


def split_by_budget(samples: Sequence[Weighted], budget: int) -> list[list[Weighted]]:
    """Consecutive runs of samples, each of at most `budget` packed tokens (or a single sample)."""
    runs: list[list[Weighted]] = []
    for sample in samples:
        if runs and packed_size([*runs[-1], sample]) <= budget:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return runs


def pack(samples: Sequence[Weighted], device: torch.device) -> Microbatch:
    """One microbatch of `samples`, its tensors on `device`."""
    trajectories = [sample.trajectory for sample in samples]
    tree = build_tree([_inputs(trajectory) for trajectory in trajectories])
    trained = [_trained_positions(trajectory) for trajectory in trajectories]
    nodes = np.concatenate([path[at - 1] for path, at in zip(tree.paths, trained, strict=True)])
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    lengths = [len(at) for at in trained]

    def gathered(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)[order].astype(dtype)).to(device)

    tokens = [np.frombuffer(trajectory.token_ids, np.int32) for trajectory in trajectories]
    return Microbatch(
        tree=tree,
        head_nodes=torch.from_numpy(head_nodes).to(device),
        head_rows=torch.from_numpy(head_rows).to(device),
        targets=gathered([ids[at] for ids, at in zip(tokens, trained, strict=True)], np.int64),
        advantages=gathered([np.full(n, s.advantage) for s, n in zip(samples, lengths, strict=True)], np.float32),
        weights=gathered([np.full(n, s.token_weight) for s, n in zip(samples, lengths, strict=True)], np.float32),
        rollout_logprobs=gathered([np.frombuffer(t.rollout_logprobs, np.float32) for t in trajectories], np.float32),
        unpacked_tokens=sum(len(ids) - 1 for ids in tokens),
    )


def trained_tokens(trajectory: Trajectory) -> int:
    """Tokens of a sample that carry loss."""
    return sum(segment.end - segment.start for segment in trajectory.segments if segment.trained)


def _inputs(trajectory: Trajectory) -> npt.NDArray[np.int32]:
    """Every token but the last, which predicts nothing."""
    return np.frombuffer(trajectory.token_ids, np.int32)[:-1]


def _trained_positions(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    spans = [np.arange(segment.start, segment.end) for segment in trajectory.segments if segment.trained]
    return np.concatenate(spans) if spans else np.empty(0, np.int64)
