"""Reads the state of samples from journal entries, independently of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.controller.ledger import Accepted, AnyEntry, Dropped, Opened, Published, Restarted, Rewarded, Trained
from tidemill.core.records import Finish, LogprobBuffer, PolicyVersion, Reward


@dataclass(slots=True)
class DurableSample:
    """The durable state of a sample."""

    from_version: int
    token_ids: bytes = b""
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)  # and the first token of each
    finish: Finish | None = None
    reward: Reward | None = None
    published: dict[int, LogprobBuffer] = field(default_factory=dict)  # by version, of the tokens older ones had made


class DurableState:
    """The durable state after a sequence of entries.

    Raises (from `take`):
        ValueError: an entry contradicts earlier ones.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self.samples: dict[int, DurableSample] = {}  # by ordinal
        self.learned: dict[int, tuple[int, ...]] = {}  # by step
        self.dropped: set[int] = set()
        self.tokens = 0  # accepted, over all entries

    @property
    def positions(self) -> set[int]:
        return {ordinal // self._group_size for ordinal in self.samples}

    def group(self, position: int) -> list[DurableSample]:
        return [self.samples[ordinal] for ordinal in self._of(position)]

    def take(self, entry: AnyEntry) -> None:
        if isinstance(entry, Opened):
            for group in entry.groups:
                self.dropped.discard(group.position)
                self.samples |= {ordinal: DurableSample(group.from_version) for ordinal in self._of(group.position)}
        elif isinstance(entry, Accepted):
            self._accept(entry)
        elif isinstance(entry, Rewarded):
            self._reward(entry)
        elif isinstance(entry, Published):
            for ordinal, logprobs in entry.logprobs:
                self.samples[ordinal].published[entry.version] = logprobs
        elif isinstance(entry, Restarted):
            self.samples |= {at: DurableSample(self.samples[at].from_version) for at in entry.ordinals}
        elif isinstance(entry, Dropped):
            self.dropped.add(entry.position)
            for ordinal in self._of(entry.position):
                del self.samples[ordinal]
        elif isinstance(entry, Trained):
            self.learned[entry.step] = entry.positions

    def _of(self, position: int) -> range:
        """The samples of a group."""
        return range(position * self._group_size, (position + 1) * self._group_size)

    def _reward(self, entry: Rewarded) -> None:
        for ordinal, reward in entry.rewards:
            sample = self.samples[ordinal]
            if sample.finish is None or sample.reward is not None:
                raise ValueError(f"sample {ordinal} was rewarded too early")
            sample.reward = reward

    def _accept(self, entry: Accepted) -> None:
        for tokens in entry.samples:
            sample = self.samples[tokens.ordinal]
            if sample.finish is not None or tokens.start * 4 != len(sample.token_ids):
                raise ValueError(f"sample {tokens.ordinal} has misplaced tokens")
            version = entry.versions[tokens.version]
            if tokens.token_ids and (not sample.versions or sample.versions[-1][0] != version):
                sample.versions.append((version, tokens.start))
            sample.token_ids += tokens.token_ids
            sample.finish = tokens.finish
            self.tokens += len(tokens.token_ids) // 4
