"""State and tokens of one sample.

```
            assign                     finish "stop" or "length"             score
 waiting ───────────▶ running ──────────────────────────▶ finished ───────────────▶ scored
    ▲                  │   │                                  ▲
    │◀─────────────────┘   │ a turn of an agent ends          │ the environment ends the episode, or a limit does
    │  aborted, error,     ▼                                  │
    └──────────────────── acting ─────────────────────────────┘
       observation
```
An attempt that is aborted, fails, or loses its lease keeps its tokens. An acting sample holds no lease.
A sample whose environment acts first starts as acting. `Sample.restart` returns a sample from any state to its first,
without tokens. Every other transition raises `IllegalTransition`.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, TypeVar

from tidemill.controller.turns import AgentLimits, Decode, Turns
from tidemill.core.records import (
    ITEM_BYTES,
    Completion,
    Episode,
    EpisodeLimit,
    Finish,
    GenerateRequest,
    LogprobBuffer,
    Observation,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    SamplingParams,
    SourceRun,
    TokenDelta,
    Trajectory,
    VersionRun,
    count,
    view_tokens,
)

T = TypeVar("T")

Verdict: TypeAlias = Literal[
    "applied",
    "unknown_sample",
    "not_running",
    "stale_lease",
    "stale_attempt",
    "malformed",
    "wrong_version",
    "overlap",
    "gap",
]
"""Result of checking a delta; all but "applied" are counted and the delta is ignored."""


class SampleState(enum.StrEnum):
    """State of a sample."""

    WAITING = "waiting"  # not assigned; may hold tokens of an earlier attempt
    RUNNING = "running"  # assigned to a lease
    ACTING = "acting"  # the environment works on its last turn
    FINISHED = "finished"  # all tokens received
    SCORED = "scored"  # reward received


RUNNING = SampleState.RUNNING
"""For `Sample.check`, which runs once per delta: looking up an enum member is slow before Python 3.12."""

TRANSITIONS: dict[SampleState, frozenset[SampleState]] = {
    SampleState.WAITING: frozenset({SampleState.RUNNING}),
    SampleState.RUNNING: frozenset({SampleState.WAITING, SampleState.ACTING, SampleState.FINISHED}),
    SampleState.ACTING: frozenset({SampleState.WAITING, SampleState.FINISHED}),
    SampleState.FINISHED: frozenset({SampleState.SCORED}),
    SampleState.SCORED: frozenset(),
}
NO_LOGPROBS: Mapping[int, LogprobBuffer] = MappingProxyType({})


class IllegalTransition(RuntimeError):
    """A state change that `TRANSITIONS` does not allow: a bug in the controller, never bad input."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """Tokens and state of one sample."""

    sample_id: SampleId
    ordinal: int  # canonical index in the run: group position * group size + index
    prompt: Prompt
    from_version: int = 0  # older weights may not generate it
    sampling: SamplingParams | None = None  # None: those of all samples in flight
    opens: bool = False  # its environment acts first
    state: SampleState = SampleState.WAITING
    needed: bool = True  # False: its group is complete without it
    lease_id: str = ""
    attempt: int = 0
    assigned_version: int = 0  # newest version at the time of assignment
    assigned_length: int = 0  # tokens at the time of assignment
    assigned_s: float = 0.0  # on the run's clock
    executed_s: float | None = None  # time in a slot before an eviction; None if it only was in the worker's queue
    stalls: int = 0  # attempts in a row that an eviction ended without a new token; queued ones do not count
    stalled_s: float = 0.0  # the longest of these attempts
    moves: int = 0  # times it was aborted to balance the load
    restarts: int = 0
    failures: int = 0  # attempts that ended in an engine error; for an agent, of the current turn
    last_error: str = ""
    token_ids: bytearray | memoryview = field(default_factory=bytearray)  # int32 [T]; of a finished sample a view
    logprobs: bytearray | bytes = field(default_factory=bytearray)  # float32 [T]; 0 for tokens of observations
    version_starts: tuple[tuple[PolicyVersion, int], ...] = ()  # each version with the first token it generated
    source_starts: tuple[tuple[tuple[str, str], int], ...] = ()  # each engine and worker, and its lease, likewise
    published: Mapping[int, LogprobBuffer] = field(default_factory=lambda: NO_LOGPROBS)  # of older tokens, by version
    turns: Turns = field(default_factory=Turns)  # of an agent
    finish: Finish | EpisodeLimit | None = None
    decoded: Trajectory | None = None  # cached trajectory of the finished sample
    reward: Reward | None = None
    ref_logprobs: LogprobBuffer = b""  # float32 [T] if a separate reference computed them; not journalled
    recovered: int = 0  # tokens read from the journal
    finished_s: float = 0.0  # on the run's clock
    scored_s: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        """Version of the first token; while running without tokens, the version at assignment; otherwise None."""
        if self.version_starts:
            return self.version_starts[0][0].number
        return self.assigned_version if self.state is SampleState.RUNNING else None

    @property
    def min_version(self) -> int:
        """Oldest version that may generate the next token."""
        return max(self.from_version, self.version_starts[-1][0].number if self.version_starts else 0)

    @property
    def length(self) -> int:
        """Completion tokens so far."""
        return len(self.token_ids) // ITEM_BYTES

    @property
    def generated(self) -> int:
        """Completion tokens that were generated."""
        return self.turns.generated(self.length)

    @property
    def versions(self) -> list[VersionRun]:
        """Token ranges by version, contiguous and in order."""
        ranges = _ranges(self.version_starts, self.length)
        return [VersionRun(version=version, start=start, end=end) for version, start, end in ranges]

    @property
    def sources(self) -> list[SourceRun]:
        """Token ranges by lease, contiguous and in order."""
        ranges = _ranges(self.source_starts, self.length)
        return [SourceRun(source=name, lease=lease, start=start, end=end) for (name, lease), start, end in ranges]

    def uses(self, leases: Container[str]) -> bool:
        """Whether one of these leases generated tokens of it, or runs it."""
        running = self.state is RUNNING and self.lease_id in leases
        return running or any(lease in leases for (_, lease), _ in self.source_starts)

    @property
    def publish_logprobs(self) -> tuple[LogprobBuffer, ...]:
        """float32 [T] of the generated tokens per published version, oldest first; tokens generated later keep their
        rollout logprob."""
        published = sorted(self.published.items())
        return tuple(self.turns.trained(known + self.logprobs[len(known) :]) for _, known in published)

    def tokens_before(self, version: int) -> int:
        """Number of leading tokens generated by versions older than `version`."""
        return next((start for found, start in self.version_starts if found.number >= version), self.length)

    def completion(self, tokens: int) -> Completion:
        """The prompt and the first `tokens` completion tokens."""
        return Completion(prompt_ids=self.prompt.token_ids, token_ids=bytes(self.token_ids[: tokens * ITEM_BYTES]))

    def move(self, state: SampleState) -> None:
        """Change state.

        Raises:
            IllegalTransition: `TRANSITIONS` does not allow it.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.sample_id}: {self.state.value} -> {state.value}")
        self.state = state

    def assign(self, lease_id: str, version: int) -> None:
        """Start an attempt on a lease, with `version` as the newest; deltas of earlier attempts become stale."""
        self.move(SampleState.RUNNING)
        self.lease_id, self.assigned_version = lease_id, version
        self.assigned_length, self.executed_s = self.length, None
        self.attempt += 1
        self.turns.returning = False

    def request(
        self, sampling: SamplingParams, exact_version: int | None, limits: AgentLimits | None
    ) -> GenerateRequest:
        """What its engine is asked for: to continue the completion, or the current turn of an agent."""
        prompt_ids, start = self.prompt.token_ids, 0
        if self.turns.contexts:
            context, start = self.turns.base()
            prompt_ids = bytes(self.token_ids[context * ITEM_BYTES : start * ITEM_BYTES])
        return GenerateRequest(
            sample_id=self.sample_id,
            lease_id=self.lease_id,
            attempt=self.attempt,
            prompt_ids=prompt_ids,
            sampling=sampling,
            prefix_ids=bytes(self.token_ids[start * ITEM_BYTES :]),
            exact_version=exact_version,
            min_version=self.min_version,
            branch=len(self.turns.contexts),
            offset=start,
            observations=tuple((a - start, b - start) for a, b in self.turns.observations if a >= start),
            limit=self.turns.limit(sampling.max_new_tokens, limits) if limits else 0,
            resumes=limits is not None,
        )

    def restart(self) -> None:
        """Discard all tokens and the reward."""
        self.state, self.restarts = SampleState.ACTING if self.opens else SampleState.WAITING, self.restarts + 1
        self.token_ids, self.logprobs = bytearray(), bytearray()
        self.version_starts = self.source_starts = ()
        self.published, self.turns = NO_LOGPROBS, Turns()
        self.finish = self.decoded = self.reward = None
        self.ref_logprobs, self.recovered = b"", 0
        self.stalls, self.stalled_s = 0, 0.0

    def check(self, delta: TokenDelta, newest: int) -> Verdict:
        """Whether a delta can be applied, `newest` being the last published version. Does not change the sample."""
        if self.state is not RUNNING:
            return "not_running"
        if delta.lease_id != self.lease_id:
            return "stale_lease"
        if delta.attempt != self.attempt:
            return "stale_attempt"
        nbytes, beyond = len(delta.token_ids), delta.start * ITEM_BYTES - len(self.token_ids)
        if nbytes != len(delta.logprobs) or nbytes % ITEM_BYTES:
            return "malformed"
        if nbytes and not self.from_version <= delta.version.number <= newest:
            return "wrong_version"
        if beyond:
            return "overlap" if beyond < 0 else "gap"
        return "applied"

    def extend(
        self, token_ids: bytes, logprobs: bytes, version: PolicyVersion, source: str = "", lease: str = ""
    ) -> None:
        """Append tokens that `version` generated on `source`, a worker with this lease."""
        origin = (source, lease)
        if token_ids and (not self.version_starts or self.version_starts[-1][0] != version):
            self.version_starts += _begun(version, self.length)
        if token_ids and (not self.source_starts or self.source_starts[-1][0] != origin):
            self.source_starts += _begun(origin, self.length)
        if token_ids and self.stalls:
            self.stalls, self.stalled_s = 0, 0.0
        assert isinstance(self.token_ids, bytearray), "a sample with a trajectory takes no tokens"
        self.token_ids += token_ids
        self.logprobs += logprobs

    def set_published(self, version: int, logprobs: LogprobBuffer) -> None:
        """Store the logprobs of the first tokens (float32 [N], N <= T) under a published version.

        Raises:
            IllegalTransition: the sample has fewer than N tokens.
        """
        if len(logprobs) > len(self.logprobs) or len(logprobs) % ITEM_BYTES:
            raise IllegalTransition(f"{self.sample_id}: {len(logprobs)} bytes of logprobs for {self.length} tokens")
        self.published = {**self.published, version: logprobs}

    def end_attempt(
        self, finish: Finish, error: str, sampling: SamplingParams, limits: AgentLimits | None = None
    ) -> None:
        """Finish the sample, or return it to waiting with its tokens if it was aborted or failed.

        With `limits` the turn ends, and the environment acts unless a limit of the sample is reached.
        """
        if finish in ("stop", "length"):
            if limits is not None and not self.turns.end_turn(finish, **self._sizes(sampling), limits=limits):
                self.move(SampleState.ACTING)
                self.failures = 0
                return
            self.move(SampleState.FINISHED)
            self.finish = finish
            return
        if finish == "error" or error:  # an engine that refuses a sample aborts it with an error
            self.move(SampleState.WAITING)
            self.failures += 1
            self.last_error = error
        else:
            self.interrupt()

    def interrupt(self) -> None:
        """Return the running sample to waiting with its tokens: it moves to another worker."""
        self.move(SampleState.WAITING)
        if self.length == self.assigned_length and self.executed_s is not None:
            self.stalls += 1
            self.stalled_s = max(self.stalled_s, self.executed_s)

    def observe(self, answer: Observation, sampling: SamplingParams, limits: AgentLimits) -> None:
        """Append the environment's answer: the sample waits for its next turn, or the episode ends."""
        added = self.turns.observe(answer, **self._sizes(sampling), limits=limits)
        assert isinstance(self.token_ids, bytearray), "a sample with a trajectory takes no tokens"
        self.token_ids += added
        self.logprobs += bytes(len(added))
        if self.turns.episode_end:
            self.move(SampleState.FINISHED)
            match self.turns.episode_end:
                case "turns" | "calls" | "seconds" as limit:
                    self.finish = limit
                case "tokens" | "context":
                    self.finish = "length"
                case _:
                    self.finish = "stop"
        else:
            self.move(SampleState.WAITING)

    def _sizes(self, sampling: SamplingParams) -> dict[str, int]:
        return {
            "length": self.length,
            "prompt_tokens": count(self.prompt.token_ids),
            "max_new_tokens": sampling.max_new_tokens,
        }

    def episode(self, decode: Decode) -> Episode:
        """What the environment needs to answer the last turn."""
        start, _ = self.turns.base()
        before = b"" if self.turns.contexts else self.prompt.token_ids
        tokens = view_tokens(bytes(self.token_ids))
        return Episode(
            sample_id=self.sample_id,
            prompt=self.prompt,
            turns=tuple(turn.record(decode, tokens) for turn in self.turns.ended),
            token_ids=before + bytes(self.token_ids[start * ITEM_BYTES :]),
            finished=dict(self.turns.finished_calls),
            started=self.turns.started_calls,
            restarts=self.restarts,
            completion_ids=bytes(self.token_ids),
            completion_logprobs=bytes(self.logprobs),
            branch_starts=tuple(start for start, _ in self.turns.contexts),
        )

    def score(self, reward: Reward) -> None:
        self.move(SampleState.SCORED)
        self.reward = reward

    def trajectory(self, decode: Decode) -> Trajectory:
        """The finished sample with its decoded completion; what the policy generated is trained.

        The sample keeps its tokens and logprobs as parts of the trajectory, so that they are in memory once.
        """
        assert self.finish is not None, f"{self.sample_id} has not finished"
        prompt_ids = self.prompt.token_ids
        token_ids = prompt_ids + self.token_ids
        self.token_ids, self.logprobs = memoryview(token_ids)[len(prompt_ids) :], bytes(self.logprobs)
        tokens = view_tokens(self.token_ids)
        last = self.turns.ended[-1].observation if self.turns.ended else self.turns.opening
        ended_by = last or Observation()
        return Trajectory(
            sample_id=self.sample_id,
            token_ids=token_ids,
            segments=self.turns.segments(count(prompt_ids), self.length),
            rollout_logprobs=self.turns.trained(self.logprobs),
            versions=tuple(self.versions),
            sources=tuple(self.sources),
            finish=self.finish,
            text=decode(tokens),
            turns=tuple(turn.record(decode, tokens) for turn in self.turns.ended if turn.chosen),
            episode_end=self.turns.episode_end,
            outcome=ended_by.outcome,
            fault=(ended_by.reason or "fault") if ended_by.end == "fault" else "",
        )


@lru_cache(maxsize=4096)
def _begun(what: T, at: int) -> tuple[tuple[T, int]]:
    """One object for all samples that begin alike."""
    return ((what, at),)


def _ranges(starts: tuple[tuple[T, int], ...], length: int) -> list[tuple[T, int, int]]:
    """(name, start, end) of contiguous ranges up to `length`."""
    cuts = [*(start for _, start in starts), length]
    return [(name, start, end) for (name, _), (start, end) in zip(starts, pairwise(cuts), strict=True)]


class TokenObserver(Protocol):
    """Follows the tokens of samples in flight."""

    def tokens_added(self, samples: Sequence[Sample]) -> None:
        """Samples have new tokens, or have finished. Never waits."""
