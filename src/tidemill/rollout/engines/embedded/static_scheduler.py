"""The scheduler for GPUs: memory that never moves, CUDA graphs, and tokens that the host reads one step late.

The sequences on the host are the truth. The device runs ahead by one step: the next step is launched with tokens that
the host has not seen, and a token that was computed after its sample's last one is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from tidemill.models.token_tree import Tokens
from tidemill.rollout.engines.embedded.cache import SlotCache
from tidemill.rollout.engines.embedded.forwards import Job, packed_forward
from tidemill.rollout.engines.embedded.graphs import DecodeGraphs
from tidemill.rollout.engines.embedded.scheduler import DrawnToken, Step, TreeScheduler, draw_next
from tidemill.rollout.engines.embedded.static_decode import (
    DecodeState,
    Entries,
    StepKernels,
    bucket,
    decode_logits,
    decode_step,
)
from tidemill.rollout.sampling import draw, noise_key, seed_state
from tidemill.rollout.sequence import Sequence

_GROUP = 16
"""Largest number of samples that read a prefix together; more are several groups, which are computed in parallel."""


@dataclass(slots=True, eq=False)
class _Running:
    """A running sample. Its row has the keys and values of all tokens after those that it reads from `prefix_row`."""

    sequence: Sequence
    row: int
    prefix_row: int
    prefix_length: int
    complete: bool = False  # its row has the keys and values of all tokens
    drawn_at: int = -1  # its entry in the newest step, whose token the host has not read

    @property
    def seen(self) -> int:
        """Tokens that the device knows."""
        return self.sequence.known + (self.drawn_at >= 0)

    @property
    def prefix(self) -> tuple[int, int]:
        return self.prefix_row, self.prefix_length


class _Draws:
    """Tokens of a launched step, on their way to the host."""

    def __init__(self, sequences: Seq[Sequence], *drawn: Tensor) -> None:
        self._sequences, on_gpu = sequences, drawn[0].is_cuda
        self._drawn = [torch.empty(each.shape, dtype=each.dtype, pin_memory=on_gpu) for each in drawn]
        for target, source in zip(self._drawn, drawn, strict=True):
            target.copy_(source, non_blocking=True)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[DrawnToken]:
        """Wait for the step; returns the tokens of samples that had not ended before."""
        if self._copied is not None:
            self._copied.synchronize()
        values = (each.tolist() for each in self._drawn)
        tokens = [each for each in zip(self._sequences, *values, strict=False) if each[0].finish is None]
        for sequence, *_ in tokens:
            sequence.computed = sequence.known
        return tokens


def _decode(model: PreTrainedModel, cache: SlotCache, state: DecodeState, kernels: StepKernels, size: int) -> None:
    decode_step(model, cache, state.entries(size), kernels)


class StaticScheduler(TreeScheduler):
    """A sample keeps its row until it ends. Samples with the same prompt read it from the row of one of them; when that
    one ends before the others, its prompt is copied to the row of another.
    """

    def __init__(
        self, model: PreTrainedModel, *, slots: int, context: int, prefill_chunk_tokens: int, kernels: StepKernels
    ) -> None:
        super().__init__(
            model, slots=slots, context=context, prefill_chunk_tokens=prefill_chunk_tokens, fixed_memory=True
        )
        self._kernels = kernels
        self._running: list[_Running] = []
        self._admitted: list[_Running] = []  # in this step, one for each new row
        self._free_rows = dict.fromkeys(range(slots))  # those that were freed first come first
        # Padding writes to the last position of the staging row, which no prompt has.
        self._state = DecodeState(slots, (slots, context - 1), self._device)
        self._on_device: list[_Running] | None = None  # the entries; None: they must be uploaded
        self._draws: _Draws | None = None  # of the newest step
        # Not a method: in a reference cycle with this scheduler the cache and the graphs would outlive it.
        self._decode = partial(_decode, model, self._cache, self._state, kernels)
        self._graphs = DecodeGraphs(self._decode, self._state.sizes) if self._device.type == "cuda" else None
        self._may_have_moved = True

    @property
    def running(self) -> list[Sequence]:
        return [each.sequence for each in self._running]

    def step(self, waiting: deque[Sequence], version: int) -> Step:
        """Launch the next token of the running samples, compute prompts, then read the tokens of the step before."""
        if self._running and self._graphs is not None and self._may_have_moved:
            self._capture(self._graphs)
        previous, self._draws = self._draws, None
        contexts = self._launch()
        jobs, admitted = self._admit(waiting, version)
        computed = jobs or self._stage(waiting, version)
        drawn = self._first_tokens(computed, admitted) if computed else []
        return Step(drawn + (previous.read() if previous else []), contexts, bool(computed) + bool(contexts))

    def _new_row(self, sequence: Sequence, number: int) -> int | None:
        prompt = sequence.prompt_length
        source, shared = self._cache.longest_prefix(sequence.tokens)
        row = self._take_row(source if shared >= prompt else -1)
        owner = self._owner(sequence.tokens[:prompt])
        complete = owner is None or sequence.known > prompt
        prefix = (row, sequence.known) if owner is None else (owner, prompt)
        self._admitted.append(_Running(sequence, row, *prefix, complete))
        return row if complete else None

    def _owner(self, prompt: Tokens) -> int | None:
        """The row of a sample with this prompt, if its row has all its keys and values, by the newest weights."""
        for each in (*self._running, *self._admitted):
            tokens = each.sequence.tokens[: each.sequence.prompt_length]
            usable = each.complete and not each.sequence.has_old_keys
            if usable and np.array_equal(tokens[: len(prompt)], prompt):
                return each.row
        return None

    def _take_row(self, preferred: int = -1) -> int:
        row = preferred if preferred in self._free_rows else next(iter(self._free_rows))
        del self._free_rows[row]
        return row

    def _first_tokens(self, jobs: Seq[Job], admitted: Seq[Seq[Sequence]]) -> list[DrawnToken]:
        """Compute prompts, and give each sample a row."""
        logits = packed_forward(self._model, self._cache, jobs, [], self._device)
        for first, (_, *others) in zip(self._admitted, admitted, strict=True):
            known = first.sequence.known
            first.sequence.computed = known
            self._running.append(first)
            self._cache.keep(first.row, first.sequence.tokens[: known if first.complete else 0])
            prefix = (first.row, known) if first.complete else first.prefix
            for sequence in others:
                sequence.computed = known
                row = self._take_row()
                self._cache.keep(row, sequence.tokens[:0])
                self._running.append(_Running(sequence, row, *prefix))
        self._admitted.clear()
        return draw_next([group for job in jobs for group in job.groups], logits)  # none of a staged prompt

    def _launch(self) -> list[int]:
        """Launch the next token of the samples that do not end by their limit before; returns their numbers of
        tokens."""
        # Entries of a group are adjacent.
        entries = sorted(
            (each for each in self._running if each.sequence.room > (each.drawn_at >= 0)), key=lambda each: each.prefix
        )
        if not entries:
            return []
        sequences, contexts = [each.sequence for each in entries], [each.seen for each in entries]
        if entries != self._on_device:
            self._upload(entries)
            self._on_device = entries
        size = bucket(len(entries))
        views = self._state.entries(size)
        if any(sequence.request.sampling.top_k or sequence.request.sampling.top_p < 1 for sequence in sequences):
            self._draw_restricted(sequences, contexts, views)
        elif self._graphs is not None:
            self._graphs.run(size)
        else:
            self._decode(size)
        self._draws = _Draws(sequences, views.tokens, views.logprobs)
        for each in self._running:
            each.drawn_at = -1
        for number, each in enumerate(entries):
            each.drawn_at = number
        return contexts

    def _draw_restricted(self, sequences: Seq[Sequence], known: Seq[int], entries: Entries) -> None:
        """A step with top-k and top-p."""
        logits = decode_logits(self._model, self._cache, entries, self._kernels)[: len(sequences)]
        keys = [noise_key(sequence.seed, length - 1) for sequence, length in zip(sequences, known, strict=True)]
        drawn = draw(logits, keys, [sequence.request.sampling for sequence in sequences])
        padding = (0, len(entries.tokens) - len(sequences))
        entries.advance(functional.pad(drawn.token_ids, padding), functional.pad(drawn.logprobs, padding))

    def _capture(self, graphs: DecodeGraphs) -> None:
        """Capture graphs that read the memory of now, if it moved."""
        self._may_have_moved = False
        addresses = [parameter.data_ptr() for parameter in self._model.parameters()]
        if graphs.outdated([*addresses, self._cache.rows]):
            self._read_from_host()
            self._state.upload(self._state.sizes[0], {})
            graphs.capture()

    def _upload(self, entries: Seq[_Running]) -> None:
        groups = list[tuple[int, int]]()  # first entry, size
        for _, members in groupby(range(len(entries)), lambda number: entries[number].prefix):
            first, *others = members
            end = first + len(others) + 1
            groups += [(start, min(_GROUP, end - start)) for start in range(first, end, _GROUP)]
        columns: dict[str, npt.ArrayLike] = {
            "rows": [each.row for each in entries],
            "lengths": [each.seen for each in entries],
            "prefix_rows": [each.prefix_row for each in entries],
            "prefix_lengths": [each.prefix_length for each in entries],
            "group_first": [first for first, _ in groups],
            "group_size": [size for _, size in groups],
            "tokens": [int(each.sequence.tokens[-1]) for each in entries],
            "positions": [each.seen - 1 for each in entries],
            "seeds": np.array([seed_state(each.sequence.seed) for each in entries], np.uint32).view(np.int32),
            "temperatures": [each.sequence.request.sampling.temperature for each in entries],
        }
        self._state.upload(bucket(len(entries)), columns, [each.drawn_at for each in entries])

    def _read_from_host(self) -> None:
        """Drop the newest step, whose tokens will be drawn again: the noise is a function of the position."""
        self._draws, self._on_device = None, None
        for each in self._running:
            each.drawn_at = -1

    def release(self) -> None:
        ended = [each for each in self._running if each.sequence.finish is not None]
        if not ended:
            return
        self._running = [each for each in self._running if each.sequence.finish is None]
        rows = self._cache.rows
        for each in ended:
            if each.sequence.request.resumes and not each.complete:
                self._cache.copy(each.prefix_row, each.row, each.prefix_length)
            self._parking.park(each.row, each.sequence, shared=each.sequence.computed)
        for each in ended:
            self._hand_on(each.row)
            self._free_rows[each.row] = None
        self._may_have_moved |= rows != self._cache.rows
        if not self._running:
            self._draws = None

    def _hand_on(self, row: int) -> None:
        """Copy the prefix in a row to one of the samples that read it."""
        heirs = [each for each in self._running if each.prefix_row == row]
        if not heirs:
            return
        heir = max(heirs, key=lambda each: each.prefix_length)
        self._cache.copy(row, heir.row, heir.prefix_length)
        heir.complete = True
        for each in heirs:
            each.prefix_row = heir.row
        self._on_device = None

    def forget(self) -> list[Sequence]:
        self._cache.forget()
        self._parking.forget()
        self._read_from_host()
        self._may_have_moved = True
        running, self._running = self.running, []
        self._free_rows = dict.fromkeys(range(self._slots))
        return running

    def keep_running(self) -> list[Sequence]:
        self._read_from_host()
        self._may_have_moved = True
        return super().keep_running()
