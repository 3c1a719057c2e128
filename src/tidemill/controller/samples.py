"""One sample's state, token by token, and the only legal ways it changes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias

from tidemill.core.records import (
    ITEM_BYTES,
    Completion,
    Finish,
    LogprobBuffer,
    PolicyVersion,
    Prompt,
    Reward,
    SampleId,
    Segment,
    TokenDelta,
    Trajectory,
    VersionRun,
    count,
)

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
"""What became of a delta; everything but "applied" is counted and otherwise ignored."""


class SampleState(enum.StrEnum):
    """Where a sample stands."""

    WAITING = "waiting"  # nobody generates it; it may already hold tokens
    RUNNING = "running"  # assigned to a lease
    FINISHED = "finished"  # all its tokens are there
    SCORED = "scored"  # and its reward


RUNNING = SampleState.RUNNING
"""For `Sample.judge`, which is called for every delta: before Python 3.12 naming a state takes a sixth of it."""

LEGAL: dict[SampleState, frozenset[SampleState]] = {
    SampleState.WAITING: frozenset({SampleState.RUNNING}),
    SampleState.RUNNING: frozenset({SampleState.WAITING, SampleState.FINISHED}),
    SampleState.FINISHED: frozenset({SampleState.SCORED}),
    SampleState.SCORED: frozenset(),
}
"""Besides, any sample may begin again (`Sample.restart`)."""


class IllegalTransition(RuntimeError):
    """The controller tried to move a sample in a way its state does not allow: a bug, never bad input."""


@dataclass(slots=True, kw_only=True)
class Sample:
    """The tokens of one sample and who is generating it. Buffers only ever grow."""

    sample_id: SampleId
    ordinal: int  # canonical place among all: group position * group size + index
    prompt: Prompt
    from_version: int = 0  # no older weights may generate it
    state: SampleState = SampleState.WAITING
    lease_id: str = ""
    attempt: int = 0
    assigned_version: int = 0  # the newest when it was given to its lease: no older weights go on with it
    moves: int = 0  # times it was called back to even out the load
    failures: int = 0  # attempts that ended in an engine error
    last_error: str = ""
    token_ids: bytearray = field(default_factory=bytearray)  # int32 [T]
    logprobs: bytearray = field(default_factory=bytearray)  # float32 [T]
    made_by: tuple[tuple[PolicyVersion, int], ...] = ()  # a version and the first token it made
    published: dict[int, LogprobBuffer] = field(default_factory=dict)  # by version: of the tokens older ones had made
    finish: Finish | None = None
    judged: Trajectory | None = None  # the finished sample, once somebody asked for it
    reward: Reward | None = None
    ref_logprobs: LogprobBuffer = b""  # float32 [T], where a reader of the reference gave them; not journalled
    recovered: int = 0  # tokens that came from the journal
    finished_s: float = 0.0  # when its last token was accepted, on the run's clock
    scored_s: float = 0.0

    @property
    def oldest_version(self) -> int | None:
        """Of the weights that made its tokens, or may have made tokens that are not here yet; None for none at all."""
        if self.made_by:
            return self.made_by[0][0].number
        return self.assigned_version if self.state is SampleState.RUNNING else None

    @property
    def min_version(self) -> int:
        """Only these weights and newer ones may go on with it."""
        return max(self.from_version, self.made_by[-1][0].number if self.made_by else 0)

    @property
    def length(self) -> int:
        """Completion tokens so far."""
        return len(self.token_ids) // ITEM_BYTES

    @property
    def versions(self) -> list[VersionRun]:
        """Which version made which tokens, in order and without a hole."""
        cuts = [*(start for _, start in self.made_by), self.length]
        return [
            VersionRun(version=version, start=start, end=end)
            for (version, _), (start, end) in zip(self.made_by, pairwise(cuts), strict=True)
        ]

    @property
    def publish_logprobs(self) -> tuple[LogprobBuffer, ...]:
        """float32 [T] each, oldest version first; a token that was not made yet has its rollout logprob there."""
        return tuple(known + self.logprobs[len(known) :] for _, known in sorted(self.published.items()))

    def made_before(self, version: int) -> int:
        """Tokens that older weights made: the first so many."""
        return next((start for made_by, start in self.made_by if made_by.number >= version), self.length)

    def completion(self, tokens: int) -> Completion:
        """Its prompt and its first so many tokens."""
        return Completion(prompt_ids=self.prompt.token_ids, token_ids=bytes(self.token_ids[: tokens * ITEM_BYTES]))

    def move(self, state: SampleState) -> None:
        """Change state.

        Raises:
            IllegalTransition: when `LEGAL` does not have it.
        """
        if state not in LEGAL[self.state]:
            raise IllegalTransition(f"{self.sample_id}: {self.state.value} -> {state.value}")
        self.state = state

    def assign(self, lease_id: str, version: int) -> None:
        """Hand the sample to a lease, whose weights are of this version; whatever an earlier attempt still sends is
        stale from now on."""
        self.move(SampleState.RUNNING)
        self.lease_id, self.assigned_version = lease_id, version
        self.attempt += 1

    def restart(self) -> None:
        """Forget all its tokens, and its reward."""
        self.state = SampleState.WAITING
        self.token_ids, self.logprobs, self.made_by = bytearray(), bytearray(), ()
        self.published = {}
        self.finish = self.judged = self.reward = None
        self.ref_logprobs, self.recovered = b"", 0

    def judge(self, delta: TokenDelta, newest: int) -> Verdict:
        """What `apply` would make of a delta, `newest` being the last published version; the sample is not changed."""
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

    def extend(self, token_ids: bytes, logprobs: bytes, version: PolicyVersion) -> None:
        """Append tokens and note which version made them."""
        if token_ids and (not self.made_by or self.made_by[-1][0] != version):
            self.made_by += ((version, self.length),)
        self.token_ids += token_ids
        self.logprobs += logprobs

    def note_published(self, version: int, logprobs: LogprobBuffer) -> None:
        """Keep what a version says of the first tokens (float32 [N], N <= T).

        Raises:
            IllegalTransition: there are not so many tokens.
        """
        if len(logprobs) > len(self.logprobs) or len(logprobs) % ITEM_BYTES:
            raise IllegalTransition(f"{self.sample_id}: {len(logprobs)} bytes of logprobs for {self.length} tokens")
        self.published[version] = logprobs

    def end_attempt(self, finish: Finish, error: str) -> None:
        """A finished sample is finished; one called back or failed keeps its tokens and waits for its next attempt."""
        if finish in ("stop", "length"):
            self.move(SampleState.FINISHED)
            self.finish = finish
            return
        self.move(SampleState.WAITING)
        if finish == "error" or error:  # an engine that refuses a sample aborts it and says why
            self.failures += 1
            self.last_error = error

    def score(self, reward: Reward) -> None:
        self.move(SampleState.SCORED)
        self.reward = reward

    def trajectory(self, text: str) -> Trajectory:
        """The finished sample as the scorer sees it; its only trained segment is the completion."""
        assert self.finish is not None, f"{self.sample_id} has not finished"
        prompt_length = count(self.prompt.token_ids)
        total = prompt_length + self.length
        return Trajectory(
            sample_id=self.sample_id,
            token_ids=self.prompt.token_ids + self.token_ids,
            segments=(
                Segment(role="prompt", start=0, end=prompt_length, trained=False),
                Segment(role="action", start=prompt_length, end=total, trained=True),
            ),
            rollout_logprobs=bytes(self.logprobs),
            versions=tuple(self.versions),
            finish=self.finish,
            text=text,
        )
