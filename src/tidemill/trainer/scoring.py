"""Frozen models read samples, whole or chunk by chunk: logprobs and reward scores.

A sample is cut at fixed places: its prompt from the front, its completion from where it begins. Each chunk is one
forward pass of its own, so that a result has the same bits whether chunks were computed ahead, at the end, or twice
(OPPO's overlap within a step, arXiv 2509.25762). The samples of a group share the chunks of their prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tidemill.core.records import ITEM_BYTES, Completion, LogprobBuffer, Read, SampleId, TokenBuffer, count
from tidemill.models.attention import KVChunk, TreePlan, hidden_states, prefill_chunk, vocabulary_logits
from tidemill.models.reward_model import RewardModel, sequence_scores
from tidemill.models.token_tree import Tokens, TokenTree
from tidemill.trainer.packing import by_sample, pack_completions, tokens_of
from tidemill.trainer.supervised_loop import split_by_tokens

FLOAT_BYTES = 4


class Predictions(Protocol):
    """Which nodes of a tree predict which T tokens, in order of the node."""

    @property
    def tree(self) -> TokenTree: ...
    @property
    def head_nodes(self) -> Tensor: ...  # int64 [H], distinct, ascending
    @property
    def head_rows(self) -> Tensor: ...  # int64 [T], which of them predicts the token, ascending
    @property
    def targets(self) -> Tensor: ...  # int64 [T]


Figure: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits [H, vocabulary], normalizers [H], rows [T], targets [T]) -> [T]: something else to know of the tokens."""


def entropy(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """In nats, of the distributions that predicted the tokens."""
    return (normalizers - (torch.softmax(logits, -1) * logits).sum(-1))[rows]


def hits(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """1 where the token is the most probable one, else 0."""
    return (logits.argmax(-1)[rows] == targets).float()


def predicting_states(model: PreTrainedModel, predictions: Predictions) -> Tensor:
    """Hidden states [H, hidden] at the nodes that predict something, with gradient where enabled."""
    device, tree = predictions.targets.device, predictions.tree
    tokens, positions = (torch.from_numpy(array).to(device) for array in (tree.token_ids, tree.depths))
    return hidden_states(model, tokens, positions, TreePlan(tree, device))[predictions.head_nodes]


def token_logprobs(
    model: PreTrainedModel,
    predictions: Predictions,
    *,
    temperature: float,
    logits_budget_bytes: int,
    states: Tensor | None = None,
    figure: Figure = entropy,
    learn_figure: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs float32 [T] of the trained tokens at `temperature` (with gradient, where enabled), and `figure` [T] of
    them.

    Args:
        states: what `predicting_states` gave, where it is known already.
        learn_figure: the figure has a gradient, too, and costs the memory of one.

    When one block of logits would pass the budget, the vocabulary is computed in chunks of rows, and again in the
    backward pass.
    """
    device = predictions.targets.device
    hidden = predicting_states(model, predictions) if states is None else states
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows_at_once = max(1, logits_budget_bytes // (FLOAT_BYTES * vocabulary))

    def chunk(states: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = vocabulary_logits(model, states)
        if temperature != 1.0:
            logits = logits / temperature
        normalizers = logits.logsumexp(-1)
        with torch.set_grad_enabled(learn_figure and torch.is_grad_enabled()):
            known = figure(logits, normalizers, rows, targets)
        return logits[rows, targets] - normalizers[rows], known

    if len(hidden) <= rows_at_once:
        return chunk(hidden, predictions.head_rows, predictions.targets)
    logprobs, figures = [], []
    for start in range(0, len(hidden), rows_at_once):
        first, last = torch.searchsorted(
            predictions.head_rows, torch.tensor([start, start + rows_at_once], device=device)
        ).tolist()
        part = checkpoint(
            chunk,
            hidden[start : start + rows_at_once],
            predictions.head_rows[first:last] - start,
            predictions.targets[first:last],
            use_reentrant=False,
        )
        logprobs.append(part[0])
        figures.append(part[1])
    return torch.cat(logprobs), torch.cat(figures)


class Gauge(Protocol):
    """What a reader wants to know of a sample."""

    def of_chunk(self, states: Tensor, token_ids: Tokens) -> Tensor | None:
        """Of N completion tokens and the states [N, hidden] that predict them; None where nothing is to be known."""

    def of_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        """float32, of what its chunks gave and the state [1, hidden] of its last token."""


class ScoreGauge:
    """Implements `Gauge`: float32 [1], a reward model's score."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def of_chunk(self, states: Tensor, token_ids: Tokens) -> None:
        return None

    def of_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        score: Tensor = self._head(last)
        return score.float()


class LogprobGauge:
    """Implements `Gauge`: float32 [T], the logprob of every token after the prompt.

    Args:
        logits_budget_bytes: of the largest [tokens, vocabulary] block.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, logits_budget_bytes: int) -> None:
        self._model, self._temperature = model, temperature
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._rows_at_once = max(1, logits_budget_bytes // (FLOAT_BYTES * vocabulary))

    def of_chunk(self, states: Tensor, token_ids: Tokens) -> Tensor:
        targets = torch.from_numpy(token_ids.astype("int64")).to(states.device)
        blocks = zip(states.split(self._rows_at_once), targets.split(self._rows_at_once), strict=True)
        return torch.cat([self._logprobs(rows, wanted) for rows, wanted in blocks])

    def of_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        return torch.cat(list(chunks)) if chunks else last.new_empty(0, dtype=torch.float32)

    def _logprobs(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = vocabulary_logits(self._model, states) / self._temperature
        return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


@dataclass(slots=True)
class _Prompt:
    """The chunks of a prompt, as far as they are computed."""

    token_ids: TokenBuffer
    pieces: list[KVChunk] = field(default_factory=list)
    users: int = 0  # open samples

    @property
    def computed(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(slots=True)
class _Open:
    """A sample that is being read."""

    prompt: _Prompt
    token_ids: bytes = b""  # of its completion, as far as they are computed
    pieces: list[KVChunk] = field(default_factory=list)  # of its completion
    found: list[Tensor] = field(default_factory=list)  # by the gauge, a chunk each
    ahead: int = 0  # tokens computed for it before it was finished, those of the prompt it was the first to need too
    late: int = 0

    @property
    def computed(self) -> int:
        return self.prompt.computed + count(self.token_ids)

    def fits(self, token_ids: TokenBuffer, prompt_tokens: int) -> bool:
        """Whether what is computed is the beginning of this sample."""
        edge = prompt_tokens * ITEM_BYTES
        return token_ids[:edge] == self.prompt.token_ids and token_ids[edge:].startswith(self.token_ids)


class ChunkedReader:
    """Reads samples with one model. Not for use from two threads at once.

    Args:
        chunk_tokens: tokens of a chunk; the last one of a prompt or a sample is shorter.
        cache_tokens: so many tokens' keys and values are kept for samples under way and their prompts. A sample for
            which there is no room is computed when it is finished; its own keys and values then come on top.
        autocast: dtype of the forward passes; None computes in the weights' own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gauge: Gauge,
        *,
        chunk_tokens: int,
        cache_tokens: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model, self._gauge, self._autocast = model, gauge, autocast
        self._chunk_tokens, self._cache_tokens = chunk_tokens, cache_tokens
        self._device = next(model.parameters()).device
        self._open: dict[SampleId, _Open] = {}
        self._prompts: dict[TokenBuffer, _Prompt] = {}  # the one used last stands last
        self.tokens_held = 0  # whose keys and values are in memory

    def read_ahead(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> bool:
        """Compute one more chunk of a sample that is still being generated.

        Args:
            token_ids: int32 [P + T], prompt and completion so far.

        Returns:
            Whether one was computed: not if the next one is not complete yet, or there is no room to keep it.
        """
        self._drop_other(sample_id, token_ids, prompt_tokens)
        start = self._computed(sample_id, token_ids, prompt_tokens)
        end = self._next_end(start, prompt_tokens, count(token_ids))
        if end == start or (end - start < self._chunk_tokens and end != prompt_tokens):
            return False
        if not self._make_room(end - start, keep=token_ids[: prompt_tokens * ITEM_BYTES]):
            return False
        sample = self._opened(sample_id, token_ids, prompt_tokens)
        sample.ahead += self._compute(sample, token_ids, end)
        return True

    def read_on(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read | None:
        """Compute one more chunk of a finished sample (int32 [P + T]); with the last one, what is to be known of it,
        and the sample is forgotten."""
        self._drop_other(sample_id, token_ids, prompt_tokens)
        sample = self._opened(sample_id, token_ids, prompt_tokens)
        if sample.computed < count(token_ids):
            end = self._next_end(sample.computed, prompt_tokens, count(token_ids))
            sample.late += self._compute(sample, token_ids, end)
        if sample.computed < count(token_ids):
            return None
        read = Read(numbers=self._numbers(sample), tokens_ahead=sample.ahead, tokens_late=sample.late)
        self.forget(sample_id)
        return read

    def forget(self, sample_id: SampleId) -> None:
        """Let go of a sample: it begins again, was given up, or is read."""
        sample = self._open.pop(sample_id, None)
        if sample is not None:
            sample.prompt.users -= 1
            self.tokens_held -= count(sample.token_ids)
            if not self._make_room(0):  # a prompt was completed at the end of a sample, and others still need it
                self._give_up_newest()

    def _next_end(self, start: int, prompt_tokens: int, known: int) -> int:
        """Where the chunk that begins at `start` ends, of a sample with so many known tokens."""
        return min(start + self._chunk_tokens, prompt_tokens if start < prompt_tokens else known)

    def _drop_other(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> None:
        """What was told before was of other tokens under this name: nothing of it counts."""
        sample = self._open.get(sample_id)
        if sample is not None and not sample.fits(token_ids, prompt_tokens):
            self.forget(sample_id)

    def _computed(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> int:
        if sample_id in self._open:
            return self._open[sample_id].computed
        prompt = self._prompts.get(token_ids[: prompt_tokens * ITEM_BYTES])
        return prompt.computed if prompt else 0

    def _opened(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> _Open:
        if sample_id not in self._open:
            prompt_ids = token_ids[: prompt_tokens * ITEM_BYTES]
            prompt = self._prompts.pop(prompt_ids, None) or _Prompt(prompt_ids)
            self._prompts[prompt_ids] = prompt
            prompt.users += 1
            self._open[sample_id] = _Open(prompt)
        return self._open[sample_id]

    def _make_room(self, tokens: int, *, keep: TokenBuffer = b"") -> bool:
        """Give up prompts that no open sample needs, the longest unused first, until so many tokens more fit."""
        for prompt_ids in [ids for ids, prompt in self._prompts.items() if not prompt.users and ids != keep]:
            if self.tokens_held + tokens <= self._cache_tokens:
                break
            self.tokens_held -= self._prompts.pop(prompt_ids).computed
        return self.tokens_held + tokens <= self._cache_tokens

    def _give_up_newest(self) -> None:
        """Of the samples read ahead; one that is being read to its end stays, over the limit."""
        newest = next((name for name in reversed(self._open) if not self._open[name].late), None)
        if newest is not None:
            self.forget(newest)

    def _compute(self, sample: _Open, token_ids: TokenBuffer, end: int) -> int:
        """Compute the chunk up to `end`; returns its tokens."""
        start, past = sample.computed, [*sample.prompt.pieces, *sample.pieces]
        here = token_ids[start * ITEM_BYTES : end * ITEM_BYTES]
        self.tokens_held += end - start
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            piece, states = prefill_chunk(self._model, past, tokens_of(here))
            if start < count(sample.prompt.token_ids):
                sample.prompt.pieces.append(piece)
                return end - start
            with torch.inference_mode():
                found = self._gauge.of_chunk(torch.cat([past[-1].last, states[:-1]]), tokens_of(here))
        if found is not None:
            sample.found.append(found)
        sample.pieces.append(piece)
        sample.token_ids += here
        return end - start

    @torch.inference_mode()
    def _numbers(self, sample: _Open) -> LogprobBuffer:
        last = (sample.pieces or sample.prompt.pieces)[-1].last
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            numbers = self._gauge.of_sample(sample.found, last)
        return numbers.float().cpu().numpy().tobytes()


@torch.no_grad()
def completion_logprobs(
    model: PreTrainedModel,
    completions: Sequence[Completion],
    *,
    budget: int,
    temperature: float,
    logits_budget_bytes: int,
    autocast: torch.dtype | None = None,
) -> list[LogprobBuffer]:
    """float32 [N] of each completion's tokens, in the order given.

    Args:
        completions: those of one prompt side by side, or it is computed again.
        budget: packed tokens of one forward pass; a longer completion runs alone.
        temperature: of the distribution asked about.
        logits_budget_bytes: as for `token_logprobs`.
    """
    device = next(model.parameters()).device
    found: list[LogprobBuffer] = []
    for run in split_by_tokens(completions, _inputs, budget):
        packed = pack_completions([(completion.prompt_ids, completion.token_ids) for completion in run], device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logprobs, _ = token_logprobs(
                model,
                packed,
                temperature=temperature,
                logits_budget_bytes=logits_budget_bytes,
                figure=_nothing_else,
            )
        found += [values.tobytes() for values in by_sample(logprobs, packed.samples)]
    return found


def _nothing_else(logits: Tensor, normalizers: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    """A figure that costs nothing."""
    return targets


def _inputs(completion: Completion) -> tuple[Tokens]:
    """Every token but the last, which predicts nothing."""
    return (tokens_of(completion.prompt_ids + completion.token_ids)[:-1],)


@torch.inference_mode()
def reward_scores(
    reward: RewardModel, samples: Sequence[TokenBuffer], *, budget: int, autocast: torch.dtype | None = None
) -> list[float]:
    """One score a sample (int32 [P + T]), in the order given.

    Args:
        budget: packed tokens of one forward pass; a longer sample runs alone.
    """
    device = next(reward.model.parameters()).device
    # In lexicographic order samples of one prompt stand together, whoever finished in between.
    order = sorted(range(len(samples)), key=lambda index: tokens_of(samples[index]).astype(">i4").tobytes())
    scores = [0.0] * len(samples)

    def tokens(index: int) -> tuple[Tokens]:
        return (tokens_of(samples[index]),)

    for run in split_by_tokens(order, tokens, budget):
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            found, _ = sequence_scores(reward.model, reward.head, [tokens_of(samples[index]) for index in run])
        for index, score in zip(run, found.tolist(), strict=True):
            scores[index] = score
    return scores
