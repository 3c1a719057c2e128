"""The scheduler for GPUs: memory that never moves, CUDA graphs, and tokens that the host reads one step late.

The sequences on the host are the truth. The device runs ahead by one step: the next step is launched with tokens that
the host has not seen, and a token that was computed after its sample's last one is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from tidemill.rollout.engines.embedded.forwards import packed_forward
from tidemill.rollout.engines.embedded.graphs import DecodeGraphs
from tidemill.rollout.engines.embedded.scheduler import DrawnToken, Step, TreeScheduler
from tidemill.rollout.engines.embedded.static_decode import (
    DecodeState,
    HostEntries,
    StepKernels,
    bucket,
    buckets,
    decode_logits,
    decode_step,
    to_device,
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
    drawn_at: int = -1  # its entry in the newest step, whose token is on the device only

    @property
    def is_ahead(self) -> bool:
        return self.drawn_at >= 0

    @property
    def seen(self) -> int:
        """Tokens that the device knows."""
        return self.sequence.known + self.is_ahead


class _Draws:
    """Tokens of a launched step, on their way to the host."""

    def __init__(self, sequences: Seq[Sequence], token_ids: Tensor, logprobs: Tensor) -> None:
        self._sequences = sequences
        self._event: torch.cuda.Event | None = None
        pinned = token_ids.is_cuda
        self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=pinned)
        self._logprobs = torch.empty(logprobs.shape, dtype=logprobs.dtype, pin_memory=pinned)
        self._token_ids.copy_(token_ids, non_blocking=True)
        self._logprobs.copy_(logprobs, non_blocking=True)
        if pinned:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Iterator[DrawnToken]:
        """Wait for the step; yields the tokens of samples that had not ended before."""
        if self._event is not None:
            self._event.synchronize()
        for sequence, token_id, logprob in zip(
            self._sequences, self._token_ids.tolist(), self._logprobs.tolist(), strict=False
        ):
            if sequence.finish is None:
                sequence.computed = sequence.known
                yield DrawnToken(sequence, token_id, logprob)


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
        self._kernels, self._context = kernels, context
        self._running: list[_Running] = []
        self._admitted: list[_Running] = []  # in this step, one for each new row
        self._free_rows = dict.fromkeys(range(slots))  # those that were freed first come first
        self._state = DecodeState(slots, self._device)
        self._on_device: list[_Running] | None = None  # the entries; None: they must be uploaded
        self._draws: _Draws | None = None  # of the newest step
        self._graphs = DecodeGraphs(self._decode, buckets(slots)) if self._device.type == "cuda" else None
        self._may_have_moved = True

    @property
    def running(self) -> list[Sequence]:
        return [each.sequence for each in self._running]

    @property
    def free(self) -> int:
        return self._slots - len(self._running)

    def step(self, waiting: deque[Sequence], version: int) -> Step:
        """Compute prompts, launch the next token of the samples that ran before, then read the tokens of the prompts
        and of the previous step."""
        running = list(self._running)
        if running and self._graphs is not None and self._may_have_moved:
            self._capture(self._graphs)
        jobs, admitted = self._admit(waiting, version)
        staged = self._must_stage(jobs, waiting, version)
        if staged:
            jobs = [self._stage(waiting[0])]
        first: _Draws | None = None
        if jobs:
            logits = packed_forward(self._model, self._cache, jobs, [], self._device)
            if staged:
                self._keep_staged(jobs[0], waiting[0])
            else:
                first = self._first_tokens([group for job in jobs for group in job.groups], logits)
                self._place(admitted)
        previous, self._draws = self._draws, None
        contexts = self._launch(running)
        drawn = [token for draws in (first, previous) if draws is not None for token in draws.read()]
        return Step(drawn, contexts, bool(jobs) + bool(contexts))

    def _new_row(self, sequence: Sequence, number: int) -> int | None:
        prompt = sequence.prompt_length
        source, shared = self._cache.longest_prefix(sequence.tokens)
        row = self._take_row(source)
        if shared >= prompt and any(each.row == source for each in self._running):
            complete = sequence.known > prompt
            self._admitted.append(_Running(sequence, row, source, prompt, complete))
            return row if complete else None
        self._admitted.append(_Running(sequence, row, row, sequence.known, complete=True))
        return row

    def _take_row(self, preferred: int = -1) -> int:
        row = preferred if preferred in self._free_rows else next(iter(self._free_rows))
        del self._free_rows[row]
        return row

    def _place(self, admitted: Seq[Seq[Sequence]]) -> None:
        """Declare what the new rows contain, and give the other samples of each row rows of their own."""
        for first, (_, *others) in zip(self._admitted, admitted, strict=True):
            self._running.append(first)
            self._cache.keep(first.row, first.sequence.tokens[: first.sequence.known * first.complete])
            prefix = (first.row, first.sequence.known) if first.complete else (first.prefix_row, first.prefix_length)
            for sequence in others:
                row = self._take_row()
                self._cache.keep(row, sequence.tokens[:0])
                self._running.append(_Running(sequence, row, *prefix))
        self._admitted.clear()

    def _first_tokens(self, groups: Seq[Seq[Sequence]], logits: Tensor) -> _Draws:
        """Draw for the samples of each group, whose logits are one row of [groups, V]."""
        index = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        if len(index) > len(groups):
            logits = logits[to_device(index, self._device)]
        sequences = [sequence for group in groups for sequence in group]
        if any(map(_restricted, sequences)):
            return _Draws(sequences, *_drawn_by_torch(sequences, [s.known for s in sequences], logits))
        seeds = to_device(_seeds(sequences), self._device)
        positions = to_device(np.array([s.known - 1 for s in sequences], np.int64), self._device)
        temperatures = to_device(_temperatures(sequences), self._device)
        return _Draws(sequences, *self._kernels.draw_tokens(logits, seeds, positions, temperatures))

    def _launch(self, running: Seq[_Running]) -> list[int]:
        """Launch the next token of the samples that do not end by their limit before; returns their numbers of
        tokens."""
        entries = [each for each in running if each.sequence.room > each.is_ahead]
        if not entries:
            return []
        entries.sort(key=_prefix)
        sequences, contexts = [each.sequence for each in entries], [each.seen for each in entries]
        if entries != self._on_device:
            self._upload(entries)
            self._on_device = entries
        size = bucket(len(entries))
        views = self._state.entries(size)
        if any(map(_restricted, sequences)):
            logits = decode_logits(self._model, self._cache, views, self._kernels)[: len(entries)]
            token_ids, logprobs = _drawn_by_torch(sequences, contexts, logits)
            padding = (0, size - len(entries))
            views.advance(functional.pad(token_ids, padding), functional.pad(logprobs, padding))
        elif self._graphs is not None:
            self._graphs.run(size)
        else:
            self._decode(size)
        self._draws = _Draws(sequences, views.tokens, views.logprobs)
        for each in running:
            each.drawn_at = -1
        for number, each in enumerate(entries):
            each.drawn_at = number
        return contexts

    def _capture(self, graphs: DecodeGraphs) -> None:
        """Capture graphs that read the memory of now, if it moved."""
        self._may_have_moved = False
        addresses = [parameter.data_ptr() for parameter in self._model.parameters()]
        if graphs.outdated([*addresses, self._cache.rows]):
            self._read_from_host()
            self._state.upload(HostEntries(self._state.size, padding=self._padding))
            graphs.capture()

    def _decode(self, size: int) -> None:
        decode_step(self._model, self._cache, self._state.entries(size), self._kernels)

    @property
    def _padding(self) -> tuple[int, int]:
        """The last position of the staging row, which no prompt has."""
        return self._slots, self._context - 1

    def _upload(self, entries: Seq[_Running]) -> None:
        count, sequences = len(entries), [each.sequence for each in entries]
        host = HostEntries(bucket(count), padding=self._padding)
        host.tokens[:count] = [s.tokens[-1] for s in sequences]
        host.sources[:count] = [each.drawn_at for each in entries]
        host.lengths[:count] = [each.seen for each in entries]
        host.positions[:count] = host.lengths[:count] - 1
        host.rows[:count] = [each.row for each in entries]
        host.prefix_rows[:count] = [each.prefix_row for each in entries]
        host.prefix_lengths[:count] = [each.prefix_length for each in entries]
        host.seeds[:count] = _seeds(sequences)
        host.temperatures[:count] = _temperatures(sequences)
        first = group = 0
        for _, members in groupby(entries, _prefix):
            end = first + len(list(members))
            for start in range(first, end, _GROUP):
                host.group_first[group], host.group_size[group] = start, min(_GROUP, end - start)
                group += 1
            first = end
        self._state.upload(host)

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
        heir = max(heirs, key=_prefix)
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


def _prefix(each: _Running) -> tuple[int, int]:
    return each.prefix_row, each.prefix_length


def _restricted(sequence: Sequence) -> bool:
    """Whether only the torch function draws as its sampling parameters demand."""
    params = sequence.request.sampling
    return bool(params.top_k) or params.top_p < 1


def _drawn_by_torch(sequences: Seq[Sequence], known: Seq[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    keys = [noise_key(sequence.seed, length - 1) for sequence, length in zip(sequences, known, strict=True)]
    drawn = draw(logits, keys, [sequence.request.sampling for sequence in sequences])
    return drawn.token_ids, drawn.logprobs


def _seeds(sequences: Seq[Sequence]) -> npt.NDArray[np.int32]:
    return np.array([seed_state(sequence.seed) for sequence in sequences], np.uint32).view(np.int32)


def _temperatures(sequences: Seq[Sequence]) -> npt.NDArray[np.float32]:
    return np.array([sequence.request.sampling.temperature for sequence in sequences], np.float32)
