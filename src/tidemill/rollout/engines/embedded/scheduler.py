"""Schedulers of the embedded engine: assign samples to cache rows and run one step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel

from tidemill.rollout.engines.embedded.cache import Parking, SlotCache
from tidemill.rollout.engines.embedded.forwards import CHUNK, Job, chunk_forward, decode_forward, packed_forward
from tidemill.rollout.sampling import draw, noise_key
from tidemill.rollout.sequence import Sequence

_CACHED_PROMPTS = 64  # prompts whose last logits are kept for siblings (one vocabulary row each)


DrawnToken: TypeAlias = tuple[Sequence, int, float]
"""A sample, its next token and the logprob of that."""


class Step(NamedTuple):
    """What a scheduler did in a step."""

    drawn: list[DrawnToken]
    contexts: list[int]  # of each decoded row, its tokens
    passes: int = 1  # of the model


def draw_next(groups: Seq[Seq[Sequence]], logits: torch.Tensor) -> list[DrawnToken]:
    """Draw the next token of each sequence; those of a group have one row of `logits`, float32 [groups, V]."""
    sequences = [sequence for group in groups for sequence in group]
    if not sequences:
        return []
    if len(sequences) > len(groups):
        sizes = torch.tensor([len(group) for group in groups], device=logits.device)
        logits = logits.repeat_interleave(sizes, 0)
    keys = [noise_key(s.seed, s.known - 1) for s in sequences]
    drawn = draw(logits, keys, [s.request.sampling for s in sequences])
    return list(zip(sequences, drawn.token_ids.tolist(), drawn.logprobs.tolist(), strict=True))


class TreeScheduler(ABC):
    """Computes the prompts of waiting samples as trees, up to a budget of tokens in each step.

    A longer prompt is computed in chunks in the row after the last slot (the staging row), from which samples copy it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        context: int,
        prefill_chunk_tokens: int,
        fixed_memory: bool = False,
    ) -> None:
        self._model, self._slots, self._budget = model, slots, prefill_chunk_tokens
        self._device = next(model.parameters()).device
        self._cache = SlotCache(rows=slots + 1, context=context, device=self._device, fixed=fixed_memory)
        self._parking = Parking(self._cache, slots=slots)
        self.prompt_tokens_computed = 0
        self.prompt_tokens_reused = 0

    @property
    @abstractmethod
    def running(self) -> list[Sequence]: ...

    @property
    def free(self) -> int:
        return self._slots - len(self.running)

    @abstractmethod
    def step(self, waiting: deque[Sequence], version: int) -> Step: ...

    @abstractmethod
    def release(self) -> None:
        """Free what ended samples used."""

    @abstractmethod
    def forget(self) -> list[Sequence]:
        """Drop all keys and values; returns the samples that were running."""

    @abstractmethod
    def _new_row(self, sequence: Sequence, number: int) -> int | None:
        """The row for the keys and values of the sample of the step's new row `number`; None: keep none."""

    def _admit(self, waiting: deque[Sequence], version: int) -> tuple[list[Job], list[list[Sequence]]]:
        """Move waiting samples into free slots while their new tokens fit the budget of the step; returns the new
        rows."""
        jobs: dict[tuple[int, int], Job] = {}
        admitted: list[list[Sequence]] = []
        budget, free = self._budget, self.free
        while waiting and free and waiting[0].request.min_version <= version:
            tokens = waiting[0].tokens
            source, past = self._cache.longest_prefix(tokens[:-1])  # always compute the logits of the last token
            job = jobs.get((source, past)) or Job(source, past)
            cost = job.cost(tokens[past:])
            if cost > budget:
                break
            budget, free = budget - cost, free - 1
            jobs[source, past] = job
            sequence = waiting.popleft()
            same = next((row for row in admitted if np.array_equal(row[0].tokens, tokens)), None)
            if same is not None:
                same.append(sequence)
            else:
                job.suffixes.append(tokens[past:].copy())
                job.rows.append(self._new_row(sequence, len(admitted)))
                job.groups.append([sequence])
                admitted.append(job.groups[-1])
            self._parking.take(sequence)  # `source`, if its tokens are the longest prefix
            self.prompt_tokens_computed += cost
            self.prompt_tokens_reused += len(tokens) - cost
        return list(jobs.values()), admitted

    def _stage(self, waiting: deque[Sequence], version: int) -> list[Job]:
        """The next chunk of a prompt that exceeds the budget of a step, if a slot is free for it."""
        if not waiting or not self.free or waiting[0].request.min_version > version:
            return []
        sequence = waiting[0]
        source, past = self._cache.longest_prefix(sequence.tokens[:-1])
        chunk = sequence.tokens[past : past + self._budget].copy()
        self.prompt_tokens_computed += len(chunk)
        self.prompt_tokens_reused -= len(chunk)  # admission counts them as reused
        self._cache.keep(self._slots, sequence.tokens[: past + len(chunk)])
        return [Job(source, past, [chunk], [self._slots])]

    def keep_running(self) -> list[Sequence]:
        """Keep the keys and values of running samples, of which all have drawn a token, for these samples only."""
        self._cache.forget_prefixes()
        self._parking.forget()
        for sequence in self.running:
            sequence.has_old_keys = True
        return []


class PackedScheduler(TreeScheduler):
    """Samples with the same tokens so far share a row of the cache, and are computed once, until they draw different
    tokens. The rows in use are 0..R-1, so that decoding reads a slice of the cache.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int, prefill_chunk_tokens: int) -> None:
        super().__init__(model, slots=slots, context=context, prefill_chunk_tokens=prefill_chunk_tokens)
        self._rows: list[list[Sequence]] = []  # the samples of each row, at least one

    @property
    def running(self) -> list[Sequence]:
        return [sequence for row in self._rows for sequence in row]

    def step(self, waiting: deque[Sequence], version: int) -> Step:
        """Run the model once, and draw a token for each sample whose known tokens are computed."""
        running = list(self._rows)
        contexts = [row[0].known for row in running]
        jobs, admitted = self._admit(waiting, version)
        staged = [] if jobs else self._stage(waiting, version)
        first = [row[0] for row in running]
        logits = packed_forward(self._model, self._cache, [*jobs, *staged], first, self._device)
        for number, row in enumerate([*running, *admitted]):
            for sequence in row:
                sequence.computed = sequence.known if number >= len(running) else sequence.computed + 1
        for number, row in enumerate(admitted, len(running)):
            self._cache.keep(number, row[0].tokens)
        self._rows = [*running, *admitted]
        groups = [*(group for job in jobs for group in job.groups), *running]
        return Step(draw_next(groups, logits[1:] if staged else logits), contexts)  # a staged prompt is incomplete

    def _new_row(self, sequence: Sequence, number: int) -> int:
        return len(self._rows) + number

    def release(self) -> None:
        """Free ended samples, give samples that drew different tokens rows of their own, and use the rows 0..R-1."""
        parts = list[list[list[Sequence]]]()  # of each row: its running samples by their newest token
        for number, row in enumerate(self._rows):
            by_token: dict[int, list[Sequence]] = {}
            for sequence in row:
                if sequence.finish is not None:
                    self._parking.park(number, sequence, shared=sequence.computed)
                else:
                    by_token.setdefault(int(sequence.tokens[-1]), []).append(sequence)
            parts.append(list(by_token.values()))
        count = sum(map(len, parts))
        rows = [of[0] if of else None for of in parts[:count]]
        rows += [None] * (count - len(rows))
        moving = [(number, part) for number, of in enumerate(parts) for part in of[int(number < count) :]]
        targets = [number for number, row in enumerate(rows) if row is None]
        for (source, part), target in zip(moving, targets, strict=True):
            self._cache.copy(source, target, part[0].computed)
            rows[target] = part
        self._rows = [row for row in rows if row is not None]

    def forget(self) -> list[Sequence]:
        self._cache.forget()
        self._parking.forget()
        running, self._rows = self.running, []
        return running


class FixedScheduler:
    """Samples keep their rows. A step computes prompts and observations one chunk at a time, then decodes all rows
    together."""

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int, prefill_chunk_tokens: int) -> None:
        self._model = model
        self._chunks = max(1, prefill_chunk_tokens // CHUNK)
        self._device = next(model.parameters()).device
        self._cache = SlotCache(rows=slots, context=context, device=self._device)
        self._parking = Parking(self._cache, slots=slots)
        self._rows: list[Sequence | None] = [None] * slots
        self._last_logits: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.prompt_tokens_computed = 0
        self.prompt_tokens_reused = 0

    @property
    def running(self) -> list[Sequence]:
        return [sequence for sequence in self._rows if sequence is not None]

    @property
    def free(self) -> int:
        return self._rows.count(None)

    def step(self, waiting: deque[Sequence], version: int) -> Step:
        """Compute chunks up to the budget, then decode the rows whose next token was generated, and draw tokens."""
        contexts = [sequence.known for sequence in self.running]
        drawing: list[Sequence] = []
        logits: list[torch.Tensor] = []
        chunks = self._chunks
        for row in self._admissible(waiting, version):
            sequence = self._rows[row]
            assert sequence is not None
            while chunks and sequence.span_end:
                found = self._continue_span(row, sequence)
                if found is not None and sequence.computed == sequence.known:
                    drawing.append(sequence)
                    logits.append(found)
                chunks -= 1
        decoding = [s if s is not None and s.computed < s.known and not s.span_end else None for s in self._rows]
        if any(decoding):
            decoded = decode_forward(self._model, self._cache, decoding, self._device)
            for row, sequence in enumerate(decoding):
                if sequence is not None and sequence.computed == sequence.known:  # not while a prefix is recomputed
                    drawing.append(sequence)
                    logits.append(decoded[row])
        found = torch.stack(logits) if logits else torch.empty(0, 0)
        return Step(draw_next([[sequence] for sequence in drawing], found), contexts)

    def _admissible(self, waiting: deque[Sequence], version: int) -> Iterable[int]:
        """Rows with an incomplete prompt or observation: rows in use, then newly admitted samples."""
        yield from (r for r, s in enumerate(self._rows) if s is not None and s.span_end)
        for row, sequence in enumerate(self._rows):
            if sequence is None and waiting and waiting[0].request.min_version <= version:
                self._rows[row] = admitted = waiting.popleft()
                self._resume(row, admitted)
                yield row

    def _resume(self, row: int, sequence: Sequence) -> None:
        """Copy the sample's parked row, if all its tokens would be computed with the same shapes again."""
        if (found := self._parking.take(sequence)) is None:
            return
        source, before = found
        past = before.computed
        same = np.array_equal(before.tokens[:past], sequence.tokens[: sequence.known - 1][:past])
        if same and [span for span in sequence.spans if span[0] < past] == before.spans:
            self._cache.copy(source, row, past)
            sequence.computed = past
            self.prompt_tokens_reused += past

    def _continue_span(self, row: int, sequence: Sequence) -> torch.Tensor | None:
        """Copy a prefix of a prompt from another row, or compute one chunk; returns the last logits if the prompt or
        observation is complete."""
        if sequence.computed >= sequence.prompt_length:
            return self._compute_chunk(row, sequence)
        prompt = sequence.tokens[: sequence.prompt_length]
        name = prompt.tobytes()
        source, past = self._cache.longest_prefix(prompt)
        if past == len(prompt) and name not in self._last_logits:
            past -= 1  # recompute the last token for its logits
        if past <= sequence.computed:
            found = self._compute_chunk(row, sequence)
        else:
            self.prompt_tokens_reused += past - sequence.computed
            self._cache.copy(source, row, past)
            sequence.computed = past
            found = self._last_logits.get(name) if past == len(prompt) else None
        self._cache.keep(row, prompt[: sequence.computed])
        if found is not None:
            self._last_logits[name] = found
            self._last_logits.move_to_end(name)
            while len(self._last_logits) > _CACHED_PROMPTS:
                self._last_logits.popitem(last=False)
        return found

    def _compute_chunk(self, row: int, sequence: Sequence) -> torch.Tensor | None:
        before = sequence.computed
        found = chunk_forward(self._model, self._cache, row, sequence, self._device)
        self.prompt_tokens_computed += sequence.computed - before
        return found

    def release(self) -> None:
        """Free the rows of ended samples."""
        for row, sequence in enumerate(self._rows):
            if sequence is not None and sequence.finish is not None:
                self._parking.park(row, sequence, shared=sequence.prompt_length)
                self._rows[row] = None

    def forget(self) -> list[Sequence]:
        """Drop all keys and values; returns the samples that were running."""
        self._cache.forget()
        self._parking.forget()
        self._last_logits.clear()
        running, self._rows = self.running, [None] * len(self._rows)
        return running

    def keep_running(self) -> list[Sequence]:
        """Keep the keys and values of running samples that have drawn a token, for these samples only; returns the
        others."""
        self._cache.forget_prefixes()
        self._parking.forget()
        self._last_logits.clear()
        restarted = [sequence for sequence in self.running if not sequence.has_drawn]
        self._rows = [sequence if sequence is not None and sequence.has_drawn else None for sequence in self._rows]
        for sequence in self.running:
            sequence.has_old_keys = True
        return restarted
