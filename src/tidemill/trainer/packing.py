"""Pack samples into microbatches as token trees, so that shared prefixes are computed once."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.algos.losses import Samples
from tidemill.core.errors import TidemillError
from tidemill.core.records import Ranges, SampleId, TokenBuffer, Trajectory, count
from tidemill.models.token_tree import IntArray, Tokens, TokenTree, build_tree, common_prefix
from tidemill.models.transfer import on_device

FloatArray: TypeAlias = npt.NDArray[np.float32]
ItemT = TypeVar("ItemT")
Sequences: TypeAlias = Callable[[ItemT], Sequence[Tokens]]
"""Returns the token sequences (int32 [T] each) of an example."""


class TreeSize:
    """Counts the nodes of a token tree while sequences are added, without building the tree."""

    def __init__(self) -> None:
        self.nodes = 0
        self._keys: list[bytes] = []  # big-endian, so that bytes sort as token ids do
        self._sequences: list[Tokens] = []

    def growth(self, sequences: Sequence[Tokens]) -> int:
        """Number of nodes that adding all of these would create."""
        new = TreeSize()
        nodes = 0
        for sequence in sequences:
            nodes += len(sequence) - max(self._shared(sequence), new._shared(sequence))
            new.add([sequence])
        return nodes

    def add(self, sequences: Sequence[Tokens]) -> None:
        for sequence in sequences:
            self.nodes += len(sequence) - self._shared(sequence)
            key = sequence.astype(">i4").tobytes()
            index = bisect.bisect_left(self._keys, key)
            self._keys.insert(index, key)
            self._sequences.insert(index, sequence)

    def _shared(self, sequence: Tokens) -> int:
        """Length of the longest prefix in the tree; in sorted order a neighbour has it."""
        index = bisect.bisect_left(self._keys, sequence.astype(">i4").tobytes())
        neighbours = self._sequences[max(index - 1, 0) : index + 1]
        return max((common_prefix(sequence, each) for each in neighbours), default=0)


def split_by_tokens(examples: Sequence[ItemT], sequences: Sequences[ItemT], budget: int) -> list[list[ItemT]]:
    """Split examples into consecutive runs of at most `budget` packed tokens; a larger example gets its own run."""
    runs: list[list[ItemT]] = []
    size = TreeSize()
    for example in examples:
        parts = sequences(example)
        if not runs or size.nodes + size.growth(parts) > budget:
            runs.append([])
            size = TreeSize()
        runs[-1].append(example)
        size.add(parts)
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSample:
    """A sample of T trained tokens with its advantage and token weight."""

    trajectory: Trajectory
    advantage: float | npt.NDArray[np.floating]  # scalar or [T]
    token_weight: float  # of each token in the loss
    returns: FloatArray | None = None  # [T], targets of the critic
    values: FloatArray | None = None  # [T], of the critic at the start of the update
    ref_logprobs: FloatArray | None = None  # [T], if already computed
    detailed: bool = False  # logprobs and entropies of its tokens are logged

    @property
    def input_ids(self) -> list[Tokens]:
        """int32 of each row, without its last token, which predicts nothing."""
        return [row.token_ids[:-1] for row in rows_of(self.trajectory)]


@dataclass(slots=True, kw_only=True)
class PackedCompletions:
    """T trained tokens of several completions, over the tree of their inputs; implements `scoring.Predictions`.

    A token is predicted at the node of the token before it. Tokens are sorted by that node, so that a chunk of head
    rows is a contiguous range of tokens.
    """

    tree: TokenTree
    head_nodes: Tensor  # int64 [H], distinct nodes that predict a trained token, ascending
    head_rows: Tensor  # int64 [T], index into `head_nodes` of the node that predicts the token, ascending
    targets: Tensor  # int64 [T]
    samples: Samples  # the completion of each token
    unpacked_tokens: int  # tokens to compute without prefix sharing


@dataclass(slots=True, kw_only=True)
class Microbatch(PackedCompletions):
    """T trained tokens of several samples, and what their loss needs."""

    advantages: Tensor  # float32 [T]
    weights: Tensor  # float32 [T]
    rollout_logprobs: Tensor  # float32 [T]; NaN if the engine returned none
    publish_logprobs: Tensor  # float32 [K, T], under the versions published since generation, oldest first
    lags: Tensor  # int64 [T], versions between generation of the token and the trainer
    tokens_by_lag: Counter[int]
    sources: tuple[tuple[str, str], ...]  # engine and worker, and its lease, of all that generated the tokens
    source_rows: Tensor  # int64 [T], index into `sources`
    returns: Tensor | None = None  # float32 [T], with a critic
    values: Tensor | None = None  # float32 [T], of the critic at the start of the update
    proximal_logprobs: Tensor | None = None  # float32 [T], once computed
    ref_logprobs: Tensor | None = None  # float32 [T], once computed
    has_rollout_logprobs: bool = True  # for every token
    # int64, tokens sampled from kept caches (see `kept_cache_of`), and the others; None without schedule.keep_cache
    kept_cache: tuple[Tensor, Tensor] | None = None
    # Samples whose logprobs and entropies are logged, with the places of their tokens (int64) in buffer order.
    detailed: tuple[tuple[SampleId, Tensor], ...] = ()
    states: Tensor | None = None  # [H, hidden] of the policy at `head_nodes`, during its forward and backward pass
    counted: bool = True  # False on a rank that has no microbatch in a round: weights are 0, and sums do not include it

    @property
    def tokens(self) -> int:
        return len(self.targets)


def split_by_sample(values_T: Tensor, samples: Samples) -> list[FloatArray]:
    """[T_s] of each sample, in buffer order (a microbatch interleaves the tokens of samples and rows)."""
    index_T = samples.index_T.cpu().numpy()
    order = np.argsort(index_T if samples.buffer_T is None else samples.buffer_T.cpu().numpy(), kind="stable")
    ends = np.cumsum(np.bincount(index_T, minlength=samples.count))
    return np.split(values_T.float().cpu().numpy()[order], ends[:-1])


def pack(
    samples: Sequence[WeightedSample], device: torch.device, *, version: int = 0, keep_cache: bool = False
) -> Microbatch:
    """Pack `samples` into one microbatch on `device`.

    Args:
        version: the trainer's, from which lags are counted.
        keep_cache: whether engines kept caches across versions.
    """
    trajectories = [sample.trajectory for sample in samples]
    rows = [row for trajectory in trajectories for row in rows_of(trajectory)]
    tree = build_tree([row.token_ids[:-1] for row in rows])
    nodes = np.concatenate([path[row.trained - 1] for path, row in zip(tree.paths, rows, strict=True)])
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    lengths = [trajectory.trained_length for trajectory in trajectories]
    places = np.argsort(order)  # of each token in buffer order

    def gather(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
        return on_device(np.concatenate(parts, axis=-1)[..., order].astype(dtype), device)

    def gather_if_complete(parts: Sequence[FloatArray | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        return gather(present, np.float32) if len(present) == len(parts) else None

    def publish_logprobs(trajectory: Trajectory, tokens: int) -> FloatArray:
        """float32 [K, tokens]; for publishes before the sample the rollout logprobs, whose ratio is 1."""
        seen = [np.frombuffer(buffer, np.float32) for buffer in trajectory.publish_logprobs]
        before = [rollout_logprobs(trajectory, tokens)] * (publishes - len(seen))
        return np.stack([*before, *seen]) if publishes else np.empty((0, tokens), np.float32)

    def token_lags(trajectory: Trajectory) -> IntArray:
        """int64 [T]; 0 for a token without a recorded version."""
        return version - version_numbers(trajectory, missing=version)[trained_positions(trajectory)]

    def token_sources(trajectory: Trajectory) -> IntArray:
        """int64 [T], index into `sources`."""
        indices = np.zeros(trajectory.completion_length, np.int64)
        for run in trajectory.sources:
            indices[run.start : run.end] = sources.index((run.source, run.lease))
        return indices[trained_positions(trajectory)]

    def kept_and_fresh() -> tuple[Tensor, Tensor]:
        kept = np.concatenate([kept_cache_of(trajectory) for trajectory in trajectories])[order]
        return on_device(np.flatnonzero(kept), device), on_device(np.flatnonzero(~kept), device)

    used = {(run.source, run.lease) for trajectory in trajectories for run in trajectory.sources}
    sources = (("", ""), *sorted(used))
    publishes = max((len(trajectory.publish_logprobs) for trajectory in trajectories), default=0)
    sized = list(zip(trajectories, lengths, strict=True))
    lags = [token_lags(trajectory) for trajectory in trajectories]
    rollouts = [rollout_logprobs(trajectory, n) for trajectory, n in sized]
    owners = [np.full(tokens, index) for index, tokens in enumerate(lengths)]
    return Microbatch(
        tree=tree,
        head_nodes=on_device(head_nodes, device),
        head_rows=on_device(head_rows, device),
        targets=gather([row.token_ids[row.trained] for row in rows], np.int64),
        samples=Samples(gather(owners, np.int64), len(samples), gather([np.arange(len(nodes))], np.int64)),
        advantages=gather([np.full(n, s.advantage) for s, n in zip(samples, lengths, strict=True)], np.float32),
        weights=gather([np.full(n, s.token_weight) for s, n in zip(samples, lengths, strict=True)], np.float32),
        rollout_logprobs=gather(rollouts, np.float32),
        publish_logprobs=gather([publish_logprobs(trajectory, n) for trajectory, n in sized], np.float32),
        lags=gather(lags, np.int64),
        tokens_by_lag=Counter(np.concatenate(lags).tolist()),
        sources=sources,
        source_rows=gather([token_sources(trajectory) for trajectory in trajectories], np.int64),
        unpacked_tokens=sum(len(row.token_ids) - 1 for row in rows),
        returns=gather_if_complete([sample.returns for sample in samples]),
        values=gather_if_complete([sample.values for sample in samples]),
        ref_logprobs=gather_if_complete([sample.ref_logprobs for sample in samples]),
        has_rollout_logprobs=not any(np.isnan(part).any() for part in rollouts),
        kept_cache=kept_and_fresh() if keep_cache else None,
        detailed=tuple(
            (sample.trajectory.sample_id, on_device(places_of_sample, device))
            for sample, places_of_sample in zip(samples, np.split(places, np.cumsum(lengths)[:-1]), strict=True)
            if sample.detailed
        ),
    )


class TrainingRow(NamedTuple):
    """A sequence that the model sees, up to its last trained token, which is predicted at the token before it."""

    token_ids: Tokens  # int32 [R]
    trained: IntArray  # int64 [N], N >= 1, places of the trained tokens in the row, ascending


def rows_of(trajectory: Trajectory) -> list[TrainingRow]:
    """The rows of a trajectory that have trained tokens; each trained token is in one row, in buffer order.

    The first row starts with the prompt. A segment of role `context` starts another row, which replaces everything
    before it. Tokens after the last trained one of a row are left out: nothing is predicted from them.
    """
    tokens, rows = tokens_of(trajectory.token_ids), []
    starts = [0, *(segment.start for segment in trajectory.segments if segment.role == "context")]
    trained = trained_positions(trajectory) + trajectory.prompt_length
    for start, own in zip(starts, np.split(trained, np.searchsorted(trained, starts[1:])), strict=True):
        if len(own):
            rows.append(TrainingRow(tokens[start : own[-1] + 1], own - start))
    return rows


def trained_positions(trajectory: Trajectory) -> IntArray:
    """int64 [T], completion positions of the trained tokens, ascending."""
    spans = [np.arange(segment.start, segment.end) for segment in trajectory.segments if segment.trained]
    return np.concatenate(spans) - trajectory.prompt_length if spans else np.empty(0, np.int64)


def version_numbers(trajectory: Trajectory, *, missing: int = 0) -> IntArray:
    """int64 [N], the version that generated each completion token; `missing` if none is recorded."""
    numbers = np.full(trajectory.completion_length, missing, np.int64)
    for run in trajectory.versions:
        numbers[run.start : run.end] = run.version.number
    return numbers


def kept_cache_of(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """bool [T], whether a trained token is of a newer version than the first one of its lease and turn.

    If engines keep caches across versions, these tokens were sampled from keys and values of older weights. Records do
    not tell whether a sample left a lease and came back before another lease generated a token: it then computed its
    keys and values again, and counts nevertheless.
    """
    numbers = version_numbers(trajectory)
    turns = (s.start - trajectory.prompt_length for s in trajectory.segments if s.role == "action" and s.end > s.start)
    starts = [*turns, *(run.start for run in trajectory.sources if run.end > run.start)]
    first = np.zeros_like(numbers)  # position of the first token of the same lease and turn
    first[starts] = starts
    newer = numbers > numbers[np.maximum.accumulate(first)]
    return newer[trained_positions(trajectory)]


def rollout_logprobs(trajectory: Trajectory, tokens: int) -> FloatArray:
    """float32 [tokens], NaN if the engine returned none."""
    if not trajectory.rollout_logprobs:
        return np.full(tokens, np.nan, np.float32)
    return np.frombuffer(trajectory.rollout_logprobs, np.float32)


def ref_logprobs(trajectory: Trajectory) -> FloatArray | None:
    """float32 [T], or None if no frozen model has computed them."""
    if not trajectory.ref_logprobs:
        return None
    return np.frombuffer(trajectory.ref_logprobs, np.float32)


def missing_reference(trajectory: Trajectory) -> TidemillError:
    """The error for a sample without reference logprobs in a trainer without a reference model."""
    return TidemillError(
        f"{trajectory.sample_id} has no reference logprobs, and this trainer has no reference model to compute them"
    )


def tokens_of(buffer: TokenBuffer) -> Tokens:
    """int32 [T]."""
    return np.frombuffer(buffer, np.int32)


class MaskedCompletion(NamedTuple):
    """A prompt and a completion; fields as in `Demonstration`."""

    prompt_ids: TokenBuffer
    completion_ids: TokenBuffer
    trained: Ranges = ()
    branches: tuple[int, ...] = ()

    @property
    def rows(self) -> list[tuple[Tokens, npt.NDArray[np.int64]]]:
        """The sequences that the model sees, int32 [R] each, and the places of their trained tokens. The first token
        of a sequence has no prediction, and is not trained."""
        tokens, start = tokens_of(self.prompt_ids + self.completion_ids), count(self.prompt_ids)
        mask = np.zeros(len(tokens), bool)
        for first, end in self.trained or [(0, len(tokens))]:
            mask[start + first : start + end] = True
        edges = pairwise([0, *(start + at for at in self.branches), len(tokens)])
        return [(tokens[first:end], np.flatnonzero(mask[first + 1 : end]) + 1) for first, end in edges]


def pack_completions(completions: Sequence[MaskedCompletion], device: torch.device) -> PackedCompletions:
    """Pack the trained tokens of completions into one tree."""
    rows = [(owner, *row) for owner, completion in enumerate(completions) for row in completion.rows]
    tree = build_tree([tokens[:-1] for _, tokens, _ in rows])
    nodes = np.concatenate([path[trained - 1] for path, (_, _, trained) in zip(tree.paths, rows, strict=True)])
    order = np.argsort(nodes, kind="stable")
    head_nodes, head_rows = np.unique(nodes[order], return_inverse=True)
    targets = np.concatenate([tokens[trained] for _, tokens, trained in rows])
    owners = np.concatenate([np.full(len(trained), owner) for owner, _, trained in rows])
    return PackedCompletions(
        tree=tree,
        head_nodes=on_device(head_nodes, device),
        head_rows=on_device(head_rows, device),
        targets=on_device(targets[order].astype(np.int64), device),
        samples=Samples(on_device(owners[order], device), len(completions)),
        unpacked_tokens=sum(len(tokens) - 1 for _, tokens, _ in rows),
    )
