"""Reads the state of samples from journal entries, independently of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fault_simulation.episodes import FINISHES
from tidemill.controller.entries import (
    Accepted,
    AnyEntry,
    CallEnded,
    CallStarted,
    Checkpointed,
    Decided,
    Dropped,
    Judged,
    Observed,
    Opened,
    Published,
    Restarted,
    Rewarded,
    RoundClosed,
    Trained,
)
from tidemill.controller.in_flight import PlannedGroup
from tidemill.controller.turns import AgentLimits
from tidemill.core.evidence import Evidence, GuardDecision
from tidemill.core.records import Call, EpisodeLimit, Finish, LogprobBuffer, PolicyVersion, Reward


@dataclass(slots=True)
class DurableSample:
    """The durable state of a sample."""

    from_version: int
    token_ids: bytes = b""
    versions: list[tuple[PolicyVersion, int]] = field(default_factory=list)  # and the first token of each
    finish: Finish | EpisodeLimit | None = None
    reward: Reward | None = None
    published: dict[int, LogprobBuffer] = field(default_factory=dict)  # by version, of the tokens older ones had made
    turns: int = 0  # of an agent, that ended
    acting: bool = False
    observed: list[tuple[int, int]] = field(default_factory=list)  # completion positions of observations
    context_start: int | None = None  # of the branch; None: at the prompt
    started: list[int] = field(default_factory=list)  # calls of the acting turn
    finished: dict[int, Call] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.token_ids) // 4 - sum(end - start for start, end in self.observed)

    def context(self, prompt_ids: bytes) -> bytes:
        """What the policy sees."""
        if self.context_start is None:
            return prompt_ids + self.token_ids
        return self.token_ids[self.context_start * 4 :]


class DurableState:
    """The durable state after a sequence of entries.

    Raises (from `take`):
        ValueError: an entry contradicts earlier ones.
    """

    def __init__(
        self, group_size: int, *, limits: AgentLimits | None = None, most: int = 0, prompt_tokens: int = 0
    ) -> None:
        self._group_size = group_size
        self._limits, self._most, self._prompt_tokens = limits, most, prompt_tokens  # of agents
        self.samples: dict[int, DurableSample] = {}  # by ordinal
        self.groups: dict[int, PlannedGroup] = {}  # by position, also of groups that have ended
        self.learned: dict[int, tuple[int, ...]] = {}  # by step
        self.rounds: dict[int, RoundClosed] = {}  # that count, by step
        self.dropped: set[int] = set()
        self.tokens = 0  # accepted, over all entries
        self.evidence: dict[int, Evidence] = {}  # that counts, by step
        self.decisions: list[GuardDecision] = []
        self.live = False  # entries are taken as they are written
        self._returning = False  # the return to a checkpoint is decided, and not stored yet

    @property
    def positions(self) -> set[int]:
        return {ordinal // self._group_size for ordinal in self.samples}

    @property
    def rollbacks(self) -> int:
        return sum(decision.action == "rollback" for decision in self.decisions)

    def group(self, position: int) -> list[DurableSample]:
        return [self.samples[ordinal] for ordinal in self._of(position)]

    def take(self, entry: AnyEntry) -> None:
        if isinstance(entry, Judged):
            self.evidence[entry.evidence.step] = entry.evidence
        elif isinstance(entry, Decided):
            self._decide(entry.decision)
        elif isinstance(entry, RoundClosed):
            self.rounds[entry.step] = entry
        elif isinstance(entry, Checkpointed):
            self._returning = False
            if entry.returned:
                self.evidence = {step: each for step, each in self.evidence.items() if step <= entry.step}
                self.rounds = {step: each for step, each in self.rounds.items() if step <= entry.step}
        elif isinstance(entry, Opened) or self.live or not self._returning:  # others are of the abandoned history
            self._take_of_samples(entry)

    def _decide(self, decision: GuardDecision) -> None:
        self.decisions.append(decision)
        last = 0 if decision.forgets else decision.target
        self.evidence = {step: each for step, each in self.evidence.items() if step <= last}
        if decision.action == "rollback":
            self._returning = True
            if not self.live:  # else the samples remain until the loop has ended
                self.samples, self.learned, self.dropped = {}, {}, set()

    def _take_of_samples(self, entry: AnyEntry) -> None:
        if isinstance(entry, Opened):
            for group in entry.groups:
                self.dropped.discard(group.position)
                self.groups[group.position] = group
                self.samples |= {ordinal: DurableSample(group.from_version) for ordinal in self._of(group.position)}
        elif isinstance(entry, Accepted):
            self._accept(entry)
        elif isinstance(entry, CallStarted | CallEnded | Observed):
            self._act(entry)
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
            if sample.finish is not None or sample.acting or tokens.start * 4 != len(sample.token_ids):
                raise ValueError(f"sample {tokens.ordinal} has misplaced tokens")
            version = entry.versions[tokens.version]
            if tokens.token_ids and (not sample.versions or sample.versions[-1][0] != version):
                sample.versions.append((version, tokens.start))
            sample.token_ids += tokens.token_ids
            self.tokens += len(tokens.token_ids) // 4
            if self._limits is None or tokens.finish is None:
                sample.finish = tokens.finish
                continue
            sample.turns += 1
            if tokens.finish == "length" and self._full(sample, 0):
                sample.finish = "length"
            else:
                sample.acting = True

    def _full(self, sample: DurableSample, added: int) -> bool:
        """Whether an agent's sample has reached a limit."""
        assert self._limits is not None
        seen = len(sample.context(bytes(4 * self._prompt_tokens))) // 4 + added
        return sample.generated >= self._most or seen >= self._limits.context_tokens

    def _act(self, entry: CallStarted | CallEnded | Observed) -> None:
        sample = self.samples[entry.ordinal]
        if not sample.acting or entry.turn != sample.turns - 1:
            raise ValueError(f"sample {entry.ordinal} has turn {sample.turns - 1}, not {entry.turn} of {entry!r}")
        if isinstance(entry, CallStarted):
            if entry.index in sample.started:
                raise ValueError(f"sample {entry.ordinal} started call {entry.index} twice")
            sample.started.append(entry.index)
        elif isinstance(entry, CallEnded):
            if entry.index in sample.finished:
                raise ValueError(f"sample {entry.ordinal} ended call {entry.index} twice")
            sample.finished[entry.index] = entry.call
        else:
            self._observe(sample, entry)

    def _observe(self, sample: DurableSample, entry: Observed) -> None:
        answer, start, added = entry.answer, len(sample.token_ids) // 4, len(entry.answer.token_ids) // 4
        if entry.start != start:
            raise ValueError(f"sample {entry.ordinal} is observed at {entry.start}, not {start}")
        sample.acting, sample.started, sample.finished = False, [], {}
        if answer.end:
            sample.finish = FINISHES.get(answer.end, "stop")
        elif sample.generated >= self._most or (
            added >= self._limits.context_tokens if answer.new_branch and self._limits else self._full(sample, added)
        ):
            sample.finish = "length"
        else:
            sample.token_ids += answer.token_ids
            sample.observed.append((start, start + added))
            if answer.new_branch:
                sample.context_start = start
