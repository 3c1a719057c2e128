"""Scoring by frozen models: sends tokens of samples in flight to reward models and the reference, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.controller.samples import Sample, TokenObserver
from tidemill.core.protocols import FrozenScorer
from tidemill.core.records import ITEM_BYTES, LogprobBuffer, NewTokens, SampleId, Trajectory, count


class FrozenScoring(TokenObserver):
    """Connects samples in flight with the frozen models that score them.

    Args:
        models: receive tokens chunk by chunk; may include the reference.
        reference: computes the logprobs of finished samples; None if the trainer does.
        chunk_tokens: chunk size of the models.
        ahead: whether models receive tokens before a sample is finished.
    """

    def __init__(
        self, models: Sequence[FrozenScorer], *, reference: FrozenScorer | None, chunk_tokens: int, ahead: bool = True
    ) -> None:
        self._models = models
        self.reference = reference
        self._chunk_tokens = chunk_tokens
        self._ahead = ahead
        self._sent: dict[SampleId, int] = {}  # tokens of prompt and completion, of unfinished samples

    def tokens_added(self, samples: Sequence[Sample]) -> None:
        """Send the whole chunks that new tokens completed; of a new sample, the prompt at once."""
        if not self._ahead:
            return
        added = list[NewTokens]()
        for sample in samples:
            prompt_tokens, sample_id = count(sample.prompt.token_ids), sample.sample_id
            complete = prompt_tokens + sample.length // self._chunk_tokens * self._chunk_tokens
            sent = self._sent.get(sample_id, 0)
            if sample.finish is None and complete > sent:
                self._sent[sample_id] = complete
                first = max(sent - prompt_tokens, 0)
                ids = bytes(sample.token_ids[first * ITEM_BYTES : (complete - prompt_tokens) * ITEM_BYTES])
                ids = ids if sent else sample.prompt.token_ids + ids
                added.append(NewTokens(sample_id=sample_id, prompt_tokens=prompt_tokens, start=sent, token_ids=ids))
        if added:
            for model in self._models:
                model.receive(added)

    def forget(self, samples: Sequence[Sample]) -> None:
        """Discard the tokens of restarted and dropped samples."""
        sent = [sample.sample_id for sample in samples if self._sent.pop(sample.sample_id, None) is not None]
        if sent:
            for model in self._models:
                model.forget(sent)

    def finished(self, sample: Sample) -> None:
        """Send no more chunks; the models score the whole sample."""
        self._sent.pop(sample.sample_id, None)

    async def ref_logprobs(self, trajectory: Trajectory) -> LogprobBuffer:
        """float32 [T], of the trained tokens; empty if the trainer computes them.

        Raises:
            ScorerLost: the reference is gone and could not be restarted.
        """
        if self.reference is None:
            return b""
        scores = await self.reference.score(trajectory.sample_id, trajectory.token_ids, trajectory.prompt_length)
        after = trajectory.prompt_length
        return b"".join(
            scores.values[(segment.start - after) * ITEM_BYTES : (segment.end - after) * ITEM_BYTES]
            for segment in trajectory.segments
            if segment.trained
        )

    def take_figures(self) -> dict[str, float]:
        """Metrics of the step; the names are those of docs/reference/metrics.md."""
        counts = [model.take_counts() for model in self._models]
        return {
            "tokens_read_ahead": float(sum(ahead for ahead, _ in counts)),
            "tokens_read_late": float(sum(late for _, late in counts)),
        }
