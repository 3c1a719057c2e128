"""Token logprobs and reward scores of samples, computed for whole samples or chunk by chunk.

A `ChunkedScorer` cuts samples at fixed positions: the prompt from its start, the completion from its start. Each chunk
is a separate forward pass, so results have the same bits whether chunks were computed during generation, afterwards, or
again (overlap within a step as in OPPO, arXiv 2509.25762). Samples of a group share the chunks of their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.core.records import ITEM_BYTES, Completion, LogprobBuffer, ModelScores, SampleId, TokenBuffer, count
from tidemill.models.attention import KVChunk, prefill_chunk, vocabulary_logits
from tidemill.models.reward_model import RewardModel, sequence_scores
from tidemill.models.token_logprobs import FLOAT_BYTES, Statistic, Targets
from tidemill.models.token_tree import Tokens, TokenTree
from tidemill.models.tree_forward import TreeForward, TreeOutput
from tidemill.trainer.packing import MaskedCompletion, pack_completions, split_by_sample, split_by_tokens, tokens_of


class Predictions(Protocol):
    """T tokens and the tree nodes that predict them, in node order."""

    @property
    def tree(self) -> TokenTree: ...
    @property
    def head_nodes(self) -> Tensor: ...  # int64 [H], distinct, ascending
    @property
    def head_rows(self) -> Tensor: ...  # int64 [T], indices into `head_nodes`, ascending
    @property
    def targets(self) -> Tensor: ...  # int64 [T]


def token_logprobs(
    forward: TreeForward,
    predictions: Predictions,
    *,
    temperature: float,
    logits_budget_bytes: int,
    statistic: Statistic = "entropy",
) -> TreeOutput:
    """States at `head_nodes`, and logprobs [T] and a statistic [T] of the target tokens, with gradient if enabled."""
    targets = Targets(predictions.head_rows, predictions.targets, temperature, logits_budget_bytes, statistic)
    output: TreeOutput = forward(predictions.tree, predictions.head_nodes, targets)
    return output


class SampleScorer(Protocol):
    """Computes the result of a sample from its hidden states."""

    def score_chunk(self, states: Tensor, token_ids: Tokens) -> Tensor | None:
        """Result of N completion tokens and the states [N, hidden] that predict them; None if none is needed."""

    def score_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        """Result of a sample, float32, from those of its chunks and the state [1, hidden] of its last token."""


class RewardModelScorer:
    """Reward model score, float32 [1]."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head

    def score_chunk(self, states: Tensor, token_ids: Tokens) -> None:
        return None

    def score_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        score: Tensor = self._head(last)
        return score.float()


class LogprobScorer:
    """Logprobs of the completion tokens, float32 [T].

    Args:
        logits_budget_bytes: largest [tokens, vocabulary] block.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, logits_budget_bytes: int) -> None:
        self._model, self._temperature = model, temperature
        vocabulary = model.get_output_embeddings().weight.shape[0]
        self._rows_at_once = max(1, logits_budget_bytes // (FLOAT_BYTES * vocabulary))

    def score_chunk(self, states: Tensor, token_ids: Tokens) -> Tensor:
        targets = torch.from_numpy(token_ids.astype("int64")).to(states.device)
        blocks = zip(states.split(self._rows_at_once), targets.split(self._rows_at_once), strict=True)
        logprobs = []
        for block_states, block_targets in blocks:
            logits = vocabulary_logits(self._model, block_states) / self._temperature
            logprobs.append(logits.gather(1, block_targets[:, None])[:, 0] - logits.logsumexp(-1))
        return torch.cat(logprobs)

    def score_sample(self, chunks: Sequence[Tensor], last: Tensor) -> Tensor:
        return torch.cat(list(chunks)) if chunks else last.new_empty(0, dtype=torch.float32)


@dataclass(slots=True)
class _Prompt:
    """The chunks of a prompt computed so far."""

    token_ids: TokenBuffer
    chunks: list[KVChunk] = field(default_factory=list)
    users: int = 0  # open samples

    @property
    def computed(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


@dataclass(slots=True)
class _OpenSample:
    """A sample that is partly computed."""

    prompt: _Prompt
    token_ids: bytes = b""  # computed tokens of the completion
    chunks: list[KVChunk] = field(default_factory=list)  # of the completion
    scores: list[Tensor] = field(default_factory=list)  # of the chunks
    tokens_ahead: int = 0  # computed before the sample was finished, including prompt chunks computed for it
    tokens_late: int = 0  # computed afterwards

    @property
    def computed(self) -> int:
        return self.prompt.computed + count(self.token_ids)


class ChunkedScorer:
    """Computes scores of samples with one model, also while they are being generated. Not thread-safe.

    Args:
        chunk_tokens: tokens per chunk; the last chunk of a prompt or a completion is shorter.
        cache_tokens: limit of the tokens whose keys and values are kept for open samples and their prompts. A sample
            that does not fit is computed when it is finished, exceeding the limit by its own tokens.
        autocast: dtype of the forward passes; None for the dtype of the weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scorer: SampleScorer,
        *,
        chunk_tokens: int,
        cache_tokens: int,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model, self._scorer, self._autocast = model, scorer, autocast
        self._chunk_tokens, self._cache_tokens = chunk_tokens, cache_tokens
        self._device = next(model.parameters()).device
        self._open: dict[SampleId, _OpenSample] = {}
        self._prompts: dict[TokenBuffer, _Prompt] = {}  # least recently used first
        self.tokens_held = 0  # tokens whose keys and values are in memory

    def compute_ahead(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> bool:
        """Compute one more chunk of a sample that is still being generated.

        Args:
            token_ids: int32 [P + T], prompt and completion so far.

        Returns:
            Whether a chunk was computed; False if the next one is incomplete or does not fit the cache.
        """
        self._forget_if_different(sample_id, token_ids, prompt_tokens)
        prompt_ids = token_ids[: prompt_tokens * ITEM_BYTES]
        known = self._open.get(sample_id) or self._prompts.get(prompt_ids)
        start = known.computed if known else 0
        end = self._chunk_end(start, prompt_tokens, count(token_ids))
        if end == start or (end - start < self._chunk_tokens and end != prompt_tokens):
            return False
        if not self._evict_prompts(end - start, keep=prompt_ids):
            return False
        sample = self._get_or_open(sample_id, prompt_ids)
        sample.tokens_ahead += self._compute(sample, token_ids, end)
        return True

    def score_finished(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores | None:
        """Compute one more chunk of a finished sample, int32 [P + T]. After the last chunk, forget the sample and
        return its result."""
        self._forget_if_different(sample_id, token_ids, prompt_tokens)
        sample = self._get_or_open(sample_id, token_ids[: prompt_tokens * ITEM_BYTES])
        if sample.computed < count(token_ids):
            end = self._chunk_end(sample.computed, prompt_tokens, count(token_ids))
            sample.tokens_late += self._compute(sample, token_ids, end)
        if sample.computed < count(token_ids):
            return None
        last = (sample.chunks or sample.prompt.chunks)[-1].last
        with (
            torch.inference_mode(),
            torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None),
        ):
            values = self._scorer.score_sample(sample.scores, last).float().cpu().numpy().tobytes()
        scores = ModelScores(values=values, tokens_ahead=sample.tokens_ahead, tokens_late=sample.tokens_late)
        self.forget(sample_id)
        return scores

    def forget(self, sample_id: SampleId) -> None:
        """Drop the state of a sample that was restarted, dropped or completely scored."""
        sample = self._open.pop(sample_id, None)
        if sample is None:
            return
        sample.prompt.users -= 1
        self.tokens_held -= count(sample.token_ids)
        if self._evict_prompts(0):
            return
        # The last sample completed its prompt above the limit: drop the newest sample that is not finished.
        newest = next((name for name in reversed(self._open) if not self._open[name].tokens_late), None)
        if newest is not None:
            self.forget(newest)

    def _chunk_end(self, start: int, prompt_tokens: int, known: int) -> int:
        """End of the chunk that starts at `start`, for a sample with `known` tokens."""
        return min(start + self._chunk_tokens, prompt_tokens if start < prompt_tokens else known)

    def _forget_if_different(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> None:
        """Drop the state of a sample that was restarted with other tokens."""
        sample, edge = self._open.get(sample_id), prompt_tokens * ITEM_BYTES
        if sample is None:
            return
        if token_ids[:edge] != sample.prompt.token_ids or not token_ids[edge:].startswith(sample.token_ids):
            self.forget(sample_id)

    def _get_or_open(self, sample_id: SampleId, prompt_ids: TokenBuffer) -> _OpenSample:
        if sample_id not in self._open:
            prompt = self._prompts.pop(prompt_ids, None) or _Prompt(prompt_ids)
            self._prompts[prompt_ids] = prompt
            prompt.users += 1
            self._open[sample_id] = _OpenSample(prompt)
        return self._open[sample_id]

    def _evict_prompts(self, tokens: int, *, keep: TokenBuffer = b"") -> bool:
        """Drop unused prompts, least recently used first, until `tokens` more fit; returns whether they do."""
        for prompt_ids in [ids for ids, prompt in self._prompts.items() if not prompt.users and ids != keep]:
            if self.tokens_held + tokens <= self._cache_tokens:
                break
            self.tokens_held -= self._prompts.pop(prompt_ids).computed
        return self.tokens_held + tokens <= self._cache_tokens

    def _compute(self, sample: _OpenSample, token_ids: TokenBuffer, end: int) -> int:
        """Compute the chunk that ends at `end`; returns its length."""
        start, past = sample.computed, [*sample.prompt.chunks, *sample.chunks]
        chunk_ids = token_ids[start * ITEM_BYTES : end * ITEM_BYTES]
        self.tokens_held += end - start
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            chunk, states = prefill_chunk(self._model, past, tokens_of(chunk_ids))
            if start < count(sample.prompt.token_ids):
                sample.prompt.chunks.append(chunk)
                return end - start
            with torch.inference_mode():
                score = self._scorer.score_chunk(torch.cat([past[-1].last, states[:-1]]), tokens_of(chunk_ids))
        if score is not None:
            sample.scores.append(score)
        sample.chunks.append(chunk)
        sample.token_ids += chunk_ids
        return end - start


@torch.no_grad()
def completion_logprobs(
    forward: TreeForward,
    completions: Sequence[Completion],
    *,
    budget: int,
    temperature: float,
    logits_budget_bytes: int,
) -> list[LogprobBuffer]:
    """Logprobs float32 [N] of the tokens of each completion, in the given order.

    Args:
        completions: completions of the same prompt must be adjacent to share its computation.
        budget: packed tokens per forward pass; a longer completion gets its own.
        logits_budget_bytes: as for `token_logprobs`.
    """
    device = forward.device
    logprobs: list[LogprobBuffer] = []
    for run in split_by_tokens(completions, lambda each: [tokens_of(each.prompt_ids + each.token_ids)[:-1]], budget):
        packed = pack_completions([MaskedCompletion(each.prompt_ids, each.token_ids) for each in run], device)
        output = token_logprobs(
            forward, packed, temperature=temperature, logits_budget_bytes=logits_budget_bytes, statistic="none"
        )
        logprobs += [values.tobytes() for values in split_by_sample(output.logprobs, packed.samples)]
    return logprobs


@torch.inference_mode()
def reward_scores(
    reward: RewardModel, samples: Sequence[TokenBuffer], *, budget: int, autocast: torch.dtype | None = None
) -> list[float]:
    """Reward model scores of samples (int32 [P + T]), in the given order.

    Args:
        budget: packed tokens per forward pass; a longer sample gets its own.
    """
    forward = TreeForward(reward.model, autocast=autocast)
    # Lexicographic order puts samples of the same prompt next to each other.
    order = sorted(range(len(samples)), key=lambda index: tokens_of(samples[index]).astype(">i4").tobytes())
    scores = [0.0] * len(samples)
    for run in split_by_tokens(order, lambda index: [tokens_of(samples[index])], budget):
        run_scores, _ = sequence_scores(forward, reward.head, [tokens_of(samples[index]) for index in run])
        for index, score in zip(run, run_scores.tolist(), strict=True):
            scores[index] = score
    return scores
