"""Forward passes of the embedded engine, packed (fast) and batch-invariant.

Packed: new samples are computed as trees of tokens (jobs), each continuing a prefix that is in a row of the cache.
Siblings of a group add no node, and prompts with a common header share its nodes.

Batch-invariant: on a given machine, a row of a fixed-shape matrix product does not depend on the other rows. Tokens of
prompts and observations are always computed with shape [1, CHUNK] and generated tokens (also of a continued prefix)
with shape [slots, 1], against the whole capacity of the cache, so the bits of a token do not depend on slot or batch
composition, or on how often its sample was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.models.attention import hidden_states, masked_attention, vocabulary_logits
from tidemill.models.token_tree import Tokens, TokenTree, build_tree, common_prefix
from tidemill.models.tree_attention import BlockPlan
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.decode_attention import DecodeAttention, causal_mask, decode_attention
from tidemill.rollout.sequence import Sequence


@dataclass(slots=True)
class Job:
    """Sequences whose first `past` tokens are in row `source`, and the rows for their keys and values."""

    source: int
    past: int
    suffixes: list[Tokens] = field(default_factory=list)
    rows: list[int | None] = field(default_factory=list)  # None: keep no keys and values
    groups: list[list[Sequence]] = field(default_factory=list)  # of each suffix, the samples that have it

    def cost(self, suffix: Tokens) -> int:
        """Number of nodes that one more sequence would add."""
        return len(suffix) - max((common_prefix(other, suffix) for other in self.suffixes), default=0)


class PackedPlan:
    """Attention of a packed forward pass: the trees of all jobs, then one token of each running row 0..R-1."""

    def __init__(self, cache: SlotCache, jobs: Seq[Job], running: Seq[Sequence], device: torch.device) -> None:
        self._cache, self._device = cache, device
        self.jobs = jobs
        self.trees = [build_tree(job.suffixes) for job in jobs]
        self._rows = torch.arange(len(running), device=device)
        self._positions = torch.tensor([s.computed for s in running], dtype=torch.int64, device=device)
        longest = max((s.computed + 1 for s in running), default=0)
        ends = (job.past + len(path) for job, tree in zip(jobs, self.trees, strict=True) for path in tree.paths)
        cache.reserve(max(longest, max(ends, default=0)))
        self._running = DecodeAttention(self._positions, longest=longest, capacity=cache.capacity)
        self._blocks = [
            BlockPlan(tree) if device.type == "cpu" and not job.past else None
            for job, tree in zip(jobs, self.trees, strict=True)
        ]
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # of the other jobs
        self._targets = [_write_index(job, tree, device) for job, tree in zip(jobs, self.trees, strict=True)]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        outputs, writes, start = [], [], 0
        for index, (job, tree) in enumerate(zip(self.jobs, self.trees, strict=True)):
            nodes = slice(start, start + tree.size)
            own_query, own_key, own_value = (each[:, :, nodes] for each in (query, key, value))
            job_keys = torch.cat([keys[job.source, :, : job.past], own_key[0]], 1)
            job_values = torch.cat([values[job.source, :, : job.past], own_value[0]], 1)
            if (blocks := self._blocks[index]) is not None:
                outputs.append(blocks.attend(layer, own_query, own_key, own_value, scaling, window))
            else:
                mask = self._tree_mask(index, tree, job.past, window)
                outputs.append(masked_attention(own_query, job_keys[None], job_values[None], mask, scaling))
            writes.append((job_keys, job_values))
            start += tree.size
        if len(self._rows):
            keys[self._rows, :, self._positions] = key[0, :, start:].transpose(0, 1)
            values[self._rows, :, self._positions] = value[0, :, start:].transpose(0, 1)
            outputs.append(self._running.attend(query[:, :, start:], keys, values, scaling, window))
        # At the end, because a row written here can be the source of a job.
        for (job_keys, job_values), (rows, places) in zip(writes, self._targets, strict=True):
            keys[rows, :, : places.shape[1]] = job_keys[:, places].transpose(0, 1)
            values[rows, :, : places.shape[1]] = job_values[:, places].transpose(0, 1)
        return torch.cat(outputs, 2)

    def _tree_mask(self, index: int, tree: TokenTree, past: int, window: int | None) -> Tensor:
        if (index, window) not in self._masks:
            mask = tree.ancestor_mask(self._device, window=window)
            before = torch.ones(tree.size, past, dtype=torch.bool, device=self._device)
            if window is not None:
                depths = torch.from_numpy(tree.depths).to(self._device) + past
                before &= depths[:, None] - torch.arange(past, device=self._device)[None] < window
            self._masks[index, window] = torch.cat([before, mask], 1)[None, None]
        return self._masks[index, window]


def _write_index(job: Job, tree: TokenTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows [n], for each row the index of its tokens in past + nodes [n, longest]).

    Padding has index 0, and is written after the end of the row.
    """
    written = [(row, path) for row, path in zip(job.rows, tree.paths, strict=True) if row is not None]
    longest = max((len(path) for _, path in written), default=0)
    index = np.zeros((len(written), job.past + longest), np.int64)
    index[:, : job.past] = np.arange(job.past)
    for number, (_, path) in enumerate(written):
        index[number, job.past : job.past + len(path)] = job.past + path
    rows = torch.tensor([row for row, _ in written], dtype=torch.int64, device=device)
    return rows, torch.from_numpy(index).to(device)


def packed_forward(
    model: PreTrainedModel, cache: SlotCache, jobs: Seq[Job], running: Seq[Sequence], device: torch.device
) -> Tensor:
    """Logits float32 [n, V] of the next token: sequences of the jobs in order, then running rows."""
    plan = PackedPlan(cache, jobs, running, device)
    tokens = [tree.token_ids for tree in plan.trees]
    positions = [tree.depths + job.past for job, tree in zip(jobs, plan.trees, strict=True)]
    tokens.append(np.array([s.tokens[s.computed] for s in running], np.int64))
    positions.append(np.array([s.computed for s in running], np.int64))
    packed, places = np.concatenate(tokens), np.concatenate(positions)
    hidden = hidden_states(model, torch.from_numpy(packed).to(device), torch.from_numpy(places).to(device), plan)

    last_nodes: list[int] = []
    start = 0
    for tree in plan.trees:
        last_nodes.extend(start + int(path[-1]) for path in tree.paths)
        start += tree.size
    last_nodes.extend(range(start, start + len(running)))
    distinct, spread = np.unique(np.array(last_nodes, np.int64), return_inverse=True)
    logits = vocabulary_logits(model, hidden[torch.from_numpy(distinct).to(device)])
    ordered = np.array_equal(spread, np.arange(len(last_nodes)))
    return logits if ordered else logits[torch.from_numpy(spread).to(device)]


CHUNK = 32


class FixedPlan:
    """Attention with fixed shapes: writes keys and values at (row, position), then attends over the whole row.

    Args:
        one_row: the number of the row, if all tokens are in one.
    """

    def __init__(self, cache: SlotCache, rows: Tensor, positions: Tensor, *, one_row: int | None) -> None:
        self._cache, self._rows, self._positions, self._one_row = cache, rows, positions, one_row
        cache.reserve(cache.context + 1)  # position `context` is for padding and never read
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer, key, value)
        keys[self._rows, :, self._positions] = key[0].transpose(0, 1)
        values[self._rows, :, self._positions] = value[0].transpose(0, 1)
        if window not in self._masks:
            self._masks[window] = causal_mask(self._positions, self._cache.context + 1, window)
        mask = self._masks[window]
        if (row := self._one_row) is not None:
            return masked_attention(query, keys[row : row + 1], values[row : row + 1], mask[None, None], scaling)
        count = len(self._rows)
        return decode_attention(query, keys[:count], values[:count], mask[:, None, None], scaling)


def chunk_forward(
    model: PreTrainedModel, cache: SlotCache, row: int, sequence: Sequence, device: torch.device
) -> Tensor | None:
    """Compute up to CHUNK more tokens of a prompt or observation; returns logits [V] if they include its last token."""
    start, last = sequence.computed, sequence.span_end
    end = min(start + CHUNK, last)
    tokens = torch.zeros(CHUNK, dtype=torch.int64, device=device)
    positions = torch.full((CHUNK,), cache.context, dtype=torch.int64, device=device)
    tokens[: end - start] = torch.from_numpy(sequence.tokens[start:end].copy()).to(device)
    positions[: end - start] = torch.arange(start, end, device=device)
    plan = FixedPlan(cache, torch.full((CHUNK,), row, device=device), positions, one_row=row)
    hidden = hidden_states(model, tokens, positions, plan)
    sequence.computed = end
    return vocabulary_logits(model, hidden[end - start - 1 : end - start])[0] if end == last else None


def decode_forward(
    model: PreTrainedModel, cache: SlotCache, rows: Seq[Sequence | None], device: torch.device
) -> Tensor:
    """Decode one token of every row; logits float32 [slots, V]. Empty rows compute a padding token."""
    tokens = torch.tensor([0 if s is None else int(s.tokens[s.computed]) for s in rows], device=device)
    positions = torch.tensor([cache.context if s is None else s.computed for s in rows], device=device)
    plan = FixedPlan(cache, torch.arange(len(rows), device=device), positions, one_row=None)
    logits = vocabulary_logits(model, hidden_states(model, tokens, positions, plan))
    for sequence in rows:
        if sequence is not None:
            sequence.computed += 1
    return logits
