"""What frozen models are told of samples under way, and asked of finished ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidemill.controller.in_flight import InFlight
from tidemill.controller.samples import Sample
from tidemill.core.protocols import Reader
from tidemill.core.records import ITEM_BYTES, Growth, LogprobBuffer, SampleId, Trajectory, WorkerReport, count


class Reading:
    """Between the samples and whoever reads them.

    Args:
        readers: told which tokens are certain whenever there is another chunk of them; the reference may be one.
        reference: asked for the logprobs of every finished sample; None where the trainer measures them.
        chunk_tokens: what readers compute at a time.
        ahead: they are told at all.
    """

    def __init__(
        self, readers: Sequence[Reader], *, reference: Reader | None, chunk_tokens: int, ahead: bool = True
    ) -> None:
        self._readers, self.reference, self._chunk_tokens, self._ahead = readers, reference, chunk_tokens, ahead
        self._told: dict[SampleId, int] = {}  # tokens of prompt and completion, of samples under way

    def grown(self, in_flight: InFlight, reports: Iterable[WorkerReport]) -> None:
        """Tell of what these reports added, chunk by chunk; of a new sample at once, for its prompt is known."""
        if not self._ahead:
            return
        news = []
        for report in reports:
            for delta in report.deltas:
                sample = in_flight.get(delta.sample_id)
                if sample is not None and sample.finish is None and (growth := self._growth(sample)) is not None:
                    news.append(growth)
        if news:
            for reader in self._readers:
                reader.grow(news)

    def forget(self, samples: Iterable[Sample]) -> None:
        """Samples that begin again, or were given up."""
        told = [sample.sample_id for sample in samples if self._told.pop(sample.sample_id, None) is not None]
        if told:
            for reader in self._readers:
                reader.forget(told)

    def finished(self, sample: Sample) -> None:
        """It will be read as a whole: there is nothing more to tell."""
        self._told.pop(sample.sample_id, None)

    async def ref_logprobs(self, trajectory: Trajectory) -> LogprobBuffer:
        """float32 [T], of the trained tokens; empty where the trainer measures them.

        Raises:
            ReaderLost: the reference is gone and does not come back.
        """
        if self.reference is None:
            return b""
        read = await self.reference.read(trajectory.sample_id, trajectory.token_ids, trajectory.prompt_length)
        after = trajectory.prompt_length
        return b"".join(
            read.numbers[(segment.start - after) * ITEM_BYTES : (segment.end - after) * ITEM_BYTES]
            for segment in trajectory.segments
            if segment.trained
        )

    def take_figures(self) -> dict[str, float]:
        """Of the step; names are those of docs/metrics.md."""
        counts = [reader.take_counts() for reader in self._readers]
        return {
            "tokens_read_ahead": float(sum(ahead for ahead, _ in counts)),
            "tokens_read_late": float(sum(late for _, late in counts)),
        }

    def _growth(self, sample: Sample) -> Growth | None:
        prompt_tokens = count(sample.prompt.token_ids)
        certain = prompt_tokens + sample.length // self._chunk_tokens * self._chunk_tokens
        told = self._told.get(sample.sample_id, 0)
        if certain <= told:
            return None
        self._told[sample.sample_id] = certain
        end = (certain - prompt_tokens) * ITEM_BYTES
        if told == 0:
            ids = sample.prompt.token_ids + bytes(sample.token_ids[:end])
        else:
            ids = bytes(sample.token_ids[(told - prompt_tokens) * ITEM_BYTES : end])
        return Growth(sample_id=sample.sample_id, prompt_tokens=prompt_tokens, start=told, token_ids=ids)
