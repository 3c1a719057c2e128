"""Samples packed into microbatches as token trees: a prompt is computed once for its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.algos.losses import Samples
from tidemill.core.errors import TidemillError
from tidemill.core.records import TokenBuffer, Trajectory
from tidemill.models.token_tree import Tokens, TokenTree, build_tree

FloatArray: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A sample of T trained tokens, its advantage, and the weight of each of its tokens in the loss."""

    trajectory: Trajectory
    advantage: float | FloatArray  # one for all its tokens, or [T]
    token_weight: float
    returns: FloatArray | None = None  # [T], what a critic learns
    values: FloatArray | None = None  # [T], the critic's at the start of the update
    ref_logprobs: FloatArray | None = None  # [T], where known already


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
    samples: Samples  # which sample each token is of
    advantages: torch.Tensor  # float32 [T]
    weights: torch.Tensor  # float32 [T]
    rollout_logprobs: torch.Tensor  # float32 [T]; NaN where the engine gave none
    publish_logprobs: torch.Tensor  # float32 [K, T], under versions published since, oldest first
    lags: torch.Tensor  # int64 [T], versions from the one that made the token to the trainer's
    tokens_by_lag: Counter[int]
    unpacked_tokens: int  # what the samples would cost without sharing
    returns: torch.Tensor | None = None  # float32 [T], of samples that a critic learns from
    values: torch.Tensor | None = None  # float32 [T], the critic's at the start of the update
    proximal_logprobs: torch.Tensor | None = None  # float32 [T], once measured
    ref_logprobs: torch.Tensor | None = None  # float32 [T], once measured
    states: torch.Tensor | None = None  # [H, hidden] of the policy at `head_nodes`, while its forward pass is alive

    @property
    def tokens(self) -> int:
        return len(self.targets)


def by_sample(values_T: torch.Tensor, samples: Samples) -> list[FloatArray]:
    """[T_s] of each sample, its tokens in order: they stand so in a packed tree, between those of others."""
    index_T = samples.index_T.cpu().numpy()
    order = np.argsort(index_T, kind="stable")
    ends = np.cumsum(np.bincount(index_T, minlength=samples.count))
    return np.split(values_T.float().cpu().numpy()[order], ends[:-1])


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


def pack(samples: Sequence[Weighted], device: torch.device, *, version: int = 0) -> Microbatch:
    """One microbatch of `samples`, its tensors on `device`; `version` is the trainer's, from which lags count."""
    trajectories = [sample.trajectory for sample in samples]
    tree = build_tree([_inputs(trajectory) for trajectory in trajectories])
    trained = [_trained_positions(trajectory) for trajectory in trajectories]
    nodes = np.concatenate([path[at - 1] for path, at in zip(tree.paths, trained, strict=True)])
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    lengths = [len(at) for at in trained]

    def gathered(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts, axis=-1)[..., order].astype(dtype)).to(device)

    def known(parts: Sequence[FloatArray | None]) -> torch.Tensor | None:
        there = [part for part in parts if part is not None]
        return gathered(there, np.float32) if len(there) == len(parts) else None

    tokens = [np.frombuffer(trajectory.token_ids, np.int32) for trajectory in trajectories]
    lags = [_lags(trajectory, at, version) for trajectory, at in zip(trajectories, trained, strict=True)]
    publishes = max((len(trajectory.publish_logprobs) for trajectory in trajectories), default=0)
    return Microbatch(
        tree=tree,
        head_nodes=torch.from_numpy(head_nodes).to(device),
        head_rows=torch.from_numpy(head_rows).to(device),
        targets=gathered([ids[at] for ids, at in zip(tokens, trained, strict=True)], np.int64),
        samples=Samples(gathered([np.full(n, index) for index, n in enumerate(lengths)], np.int64), len(samples)),
        advantages=gathered([np.full(n, s.advantage) for s, n in zip(samples, lengths, strict=True)], np.float32),
        weights=gathered([np.full(n, s.token_weight) for s, n in zip(samples, lengths, strict=True)], np.float32),
        rollout_logprobs=gathered(
            [rollout_logprobs(t, n) for t, n in zip(trajectories, lengths, strict=True)], np.float32
        ),
        publish_logprobs=gathered(
            [_publish_logprobs(trajectory, publishes, n) for trajectory, n in zip(trajectories, lengths, strict=True)],
            np.float32,
        ),
        lags=gathered(lags, np.int64),
        tokens_by_lag=Counter(np.concatenate(lags).tolist()),
        unpacked_tokens=sum(len(ids) - 1 for ids in tokens),
        returns=known([sample.returns for sample in samples]),
        values=known([sample.values for sample in samples]),
        ref_logprobs=known([sample.ref_logprobs for sample in samples]),
    )


def trained_tokens(trajectory: Trajectory) -> int:
    """Tokens of a sample that carry loss."""
    return sum(segment.end - segment.start for segment in trajectory.segments if segment.trained)


def rollout_logprobs(trajectory: Trajectory, tokens: int) -> FloatArray:
    """float32 [tokens], NaN where the engine gave none."""
    if not trajectory.rollout_logprobs:
        return np.full(tokens, np.nan, np.float32)
    return np.frombuffer(trajectory.rollout_logprobs, np.float32)


def ref_logprobs(trajectory: Trajectory) -> FloatArray | None:
    """float32 [T], where a reader of the reference gave them."""
    if not trajectory.ref_logprobs:
        return None
    return np.frombuffer(trajectory.ref_logprobs, np.float32)


def without_reference(trajectory: Trajectory) -> TidemillError:
    """Nobody can say what the reference thinks of a sample: whoever was to read it did not."""
    return TidemillError(
        f"{trajectory.sample_id} came without reference logprobs, and this trainer has no reference to measure them"
    )


def _publish_logprobs(trajectory: Trajectory, publishes: int, tokens: int) -> FloatArray:
    """float32 [publishes, tokens]; a sample that saw fewer begins with its rollout logprobs, whose ratio is 1."""
    seen = [np.frombuffer(buffer, np.float32) for buffer in trajectory.publish_logprobs]
    before = [rollout_logprobs(trajectory, tokens)] * (publishes - len(seen))
    return np.stack([*before, *seen]) if publishes else np.empty((0, tokens), np.float32)


def _lags(trajectory: Trajectory, trained: npt.NDArray[np.int64], version: int) -> npt.NDArray[np.int64]:
    """int64 [T]; a token that no version claims counts as the trainer's own."""
    made = np.full(trajectory.completion_length, version, np.int64)
    for run in trajectory.versions:
        made[run.start : run.end] = run.version.number
    return version - made[trained - trajectory.prompt_length]


def _inputs(trajectory: Trajectory) -> npt.NDArray[np.int32]:
    """Every token but the last, which predicts nothing."""
    return np.frombuffer(trajectory.token_ids, np.int32)[:-1]


def _trained_positions(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    spans = [np.arange(segment.start, segment.end) for segment in trajectory.segments if segment.trained]
    return np.concatenate(spans) if spans else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCompletions:
    """The T completion tokens of S sequences over the tree of everything that precedes them; `Predictions`."""

    tree: TokenTree
    head_nodes: Tensor  # int64 [H], distinct nodes that predict a completion token, ascending
    head_rows: Tensor  # int64 [T], which of them predicts the token, ascending
    targets: Tensor  # int64 [T]
    samples: Samples  # which of the S sequences each of the T tokens belongs to
    unpacked_tokens: int  # what the sequences would cost without sharing


def tokens_of(buffer: TokenBuffer) -> Tokens:
    """int32 [T]."""
    return np.frombuffer(buffer, np.int32)


def pack_completions(pairs: Sequence[tuple[TokenBuffer, TokenBuffer]], device: torch.device) -> PackedCompletions:
    """(prompt, completion) pairs in one tree. The very first token of a sequence without a prompt is not trained:
    nothing predicts it."""
    whole = [tokens_of(prompt + completion) for prompt, completion in pairs]
    tree = build_tree([sequence[:-1] for sequence in whole])
    starts = [max(len(tokens_of(prompt)), 1) for prompt, _ in pairs]
    nodes = np.concatenate([path[start - 1 :] for path, start in zip(tree.paths, starts, strict=True)])
    lengths = [len(sequence) - start for sequence, start in zip(whole, starts, strict=True)]
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    targets = np.concatenate([sequence[start:] for sequence, start in zip(whole, starts, strict=True)])
    owners = np.repeat(np.arange(len(whole)), lengths)
    return PackedCompletions(
        tree=tree,
        head_nodes=torch.from_numpy(head_nodes).to(device),
        head_rows=torch.from_numpy(head_rows).to(device),
        targets=torch.from_numpy(targets[order].astype(np.int64)).to(device),
        samples=Samples(torch.from_numpy(owners[order]).to(device), len(whole)),
        unpacked_tokens=sum(len(sequence) - 1 for sequence in whole),
    )
