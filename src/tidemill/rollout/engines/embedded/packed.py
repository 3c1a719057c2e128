"""The fast forward: one packed call holds the prefill of new samples and one token of every running one.

New samples are packed as trees of the tokens that nobody has computed yet. A job is one such tree, hanging on a prefix
that some row already holds; siblings of a group add no node, prompts with a common header share its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tidemill.models.attention import hidden_states, masked_attention, vocabulary_logits
from tidemill.models.token_tree import Tokens, TokenTree, build_tree, common_prefix
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.sequence import Sequence


@dataclass(slots=True)
class Job:
    """Sequences whose first `past` tokens stand in row `source`, and the rows their keys and values go to."""

    source: int
    past: int
    suffixes: list[Tokens] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def cost(self, suffix: Tokens) -> int:
        """Nodes that one more sequence would add."""
        shared = max((common_prefix(other, suffix) for other in self._distinct()), default=0)
        return len(suffix) - shared

    def _distinct(self) -> list[Tokens]:
        return [s for i, s in enumerate(self.suffixes) if not i or not np.array_equal(s, self.suffixes[i - 1])]


class PackedPlan:
    """Attention of one packed call: the trees of all jobs first, then one token of each running row 0..R-1."""

    def __init__(self, cache: SlotCache, jobs: Seq[Job], running: Seq[Sequence], device: torch.device) -> None:
        self._cache, self._device = cache, device
        self.jobs = jobs
        self.trees = [build_tree(job.suffixes) for job in jobs]
        self._running = len(running)
        self._lengths = torch.tensor([s.computed for s in running], dtype=torch.int64, device=device)
        self._longest = max((s.computed for s in running), default=-1) + 1
        self._row_index = torch.arange(self._running, device=device)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._targets = [_write_index(job, tree, device) for job, tree in zip(jobs, self.trees, strict=True)]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = self._cache.layer(layer, key, value)
        outputs, writes, start = [], [], 0
        for index, (job, tree) in enumerate(zip(self.jobs, self.trees, strict=True)):
            nodes = slice(start, start + tree.size)
            job_keys = torch.cat([keys[job.source, :, : job.past], key[0, :, nodes]], 1)
            job_values = torch.cat([values[job.source, :, : job.past], value[0, :, nodes]], 1)
            mask = self._tree_mask(index, tree, job.past, window)
            outputs.append(masked_attention(query[:, :, nodes], job_keys[None], job_values[None], mask, scaling))
            writes.append((job_keys, job_values))
            start += tree.size
        if self._running:
            rows, positions = self._row_index, self._lengths
            keys[rows, :, positions] = key[0, :, start:].transpose(0, 1)
            values[rows, :, positions] = value[0, :, start:].transpose(0, 1)
            outputs.append(self._attend_running(query[:, :, start:], keys, values, scaling, window))
        # Only now: a row written here may be the source of a job above.
        for (job_keys, job_values), (rows, places) in zip(writes, self._targets, strict=True):
            keys[rows, :, : places.shape[1]] = job_keys[:, places].transpose(0, 1)
            values[rows, :, : places.shape[1]] = job_values[:, places].transpose(0, 1)
        return torch.cat(outputs, 2)

    def _attend_running(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
    ) -> torch.Tensor:
        if (-1, window) not in self._masks:
            positions = torch.arange(self._longest, device=self._device)
            mask = positions[None] <= self._lengths[:, None]
            if window is not None:
                mask &= positions[None] > self._lengths[:, None] - window
            self._masks[-1, window] = mask[:, None, None]
        key, value = keys[: self._running, :, : self._longest], values[: self._running, :, : self._longest]
        return decode_attention(query, key, value, self._masks[-1, window], scaling)

    def _tree_mask(self, index: int, tree: TokenTree, past: int, window: int | None) -> torch.Tensor:
        if (index, window) not in self._masks:
            mask = tree.ancestor_mask(self._device, window=window)
            before = torch.ones(tree.size, past, dtype=torch.bool, device=self._device)
            if window is not None:
                depths = torch.from_numpy(tree.depths).to(self._device) + past
                before &= depths[:, None] - torch.arange(past, device=self._device)[None] < window
            self._masks[index, window] = torch.cat([before, mask], 1)[None, None]
        return self._masks[index, window]


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One query a row: [1, heads, R, D] against keys [R, kv_heads, L, D] and values [R, kv_heads, L, W].

    `mask` is [R, 1, 1, L].

    The query heads that share a key-value head stand in the query-length dimension, so no key is repeated.
    """
    heads, rows, width = query.shape[1:]
    grouped = query[0].transpose(0, 1).reshape(rows, keys.shape[1], heads // keys.shape[1], width)
    out = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scaling)
    return out.reshape(rows, heads, values.shape[-1]).transpose(0, 1)[None]


def _write_index(job: Job, tree: TokenTree, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n] and, per row, where in (past + nodes) each of its tokens stands [n, longest]; the padding repeats
    position 0 and lands beyond the row's length."""
    longest = max(len(path) for path in tree.paths)
    index = np.zeros((len(job.rows), job.past + longest), np.int64)
    index[:, : job.past] = np.arange(job.past)
    for row, path in enumerate(tree.paths):
        index[row, job.past : job.past + len(path)] = job.past + path
    return torch.tensor(job.rows, device=device), torch.from_numpy(index).to(device)


def packed_forward(
    model: PreTrainedModel, cache: SlotCache, jobs: Seq[Job], running: Seq[Sequence], device: torch.device
) -> torch.Tensor:
    """Logits float32 [sequences of the jobs in order, then running rows; V] for each one's next token."""
    plan = PackedPlan(cache, jobs, running, device)
    tokens = [tree.token_ids for tree in plan.trees]
    positions = [tree.depths + job.past for job, tree in zip(jobs, plan.trees, strict=True)]
    tokens.append(np.array([s.tokens[s.computed] for s in running], np.int64))
    positions.append(np.array([s.computed for s in running], np.int64))
    packed, places = np.concatenate(tokens), np.concatenate(positions)
    hidden = hidden_states(model, torch.from_numpy(packed).to(device), torch.from_numpy(places).to(device), plan)

    wanted: list[int] = []
    start = 0
    for tree in plan.trees:
        wanted.extend(start + int(path[-1]) for path in tree.paths)
        start += tree.size
    wanted.extend(range(start, start + len(running)))
    distinct, spread = np.unique(np.array(wanted, np.int64), return_inverse=True)
    logits = vocabulary_logits(model, hidden[torch.from_numpy(distinct).to(device)])
    return logits[torch.from_numpy(spread).to(device)]
