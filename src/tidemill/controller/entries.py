"""Entries of the ledger's journal, and what they say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from tidemill.controller.in_flight import PlannedGroup, SamplingPlan
from tidemill.core.errors import UserError
from tidemill.core.evidence import Evidence, GuardDecision
from tidemill.core.records import (
    Call,
    LogprobBuffer,
    Observation,
    PolicyVersion,
    Record,
    Reward,
    TokenDelta,
    Trajectory,
)

NEVER_PRUNED = 2**62
"""Journal step of entries that `Ledger.prune` keeps."""


class EvalResult(Record, omit_defaults=True):
    """Figures of one evaluation."""

    name: str
    step: int  # batches committed before it
    version: PolicyVersion
    greedy_accuracy: float | None  # share of correct samples; None for graded rewards
    n: int
    invalid: int  # samples whose reward failed; left out of the mean, counted as incorrect
    truncated_fraction: float
    completion_tokens_mean: float
    duration_s: float
    reward_mean: float | None = None  # over samples with a valid reward; None without any
    reward_stderr: float | None = None  # of that mean, over prompts
    samples_per_prompt: int = 0  # drawn in addition to the greedy completion
    pass_at: dict[int, float] = {}  # pass@k of the drawn samples by k; empty for graded rewards
    drawn_reward_mean: float | None = None  # of the drawn samples, mean over prompts
    reward_interval: tuple[float, float] | None = None  # 95 % of the mean reward; None if the sample tells none


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Base of journal entries; packed as arrays to keep the journal small."""


class Opened(Entry, frozen=True, tag="opened"):
    """Groups were started."""

    plan: SamplingPlan
    groups: tuple[PlannedGroup, ...]


class Trained(Entry, frozen=True, tag="trained"):
    """The groups of a committed batch, in training order."""

    step: int
    positions: tuple[int, ...]


class TrainedGroup(Entry, frozen=True):
    """A trained prompt and the generated tokens of its samples."""

    place: int
    prompt_id: str
    prompt_tokens: int
    lengths: tuple[int, ...]


class ReturnedGroup(Entry, frozen=True):
    """A group that was started and not trained on: its prompt is started again in a later round."""

    place: int
    seen: tuple[int, ...]  # tokens of each sample until the round closed, on the nominal clock
    ended: tuple[bool, ...]  # by then
    first_in_short: bool  # else it waits for a long round
    restarts: int  # most of its samples, this one included: environments start again


class RoundClosed(Entry, frozen=True, tag="round"):
    """The groups of a batch are decided. Never pruned: prompts and predicted lengths of later batches depend on it."""

    step: int
    positions: tuple[int, ...]  # of the batch, in training order
    trained: tuple[TrainedGroup, ...]
    returned: tuple[ReturnedGroup, ...] = ()
    next_place: int = 0  # of the first prompt that was never started
    redrawn: tuple[int, ...] = ()  # places of prompts without reward signal, which are not trained on
    set_aside: tuple[int, ...] = ()  # ordinals of samples that the batch's groups do not need


class BatchReward(Entry, frozen=True, tag="batch_reward"):
    """Mean reward of a batch. Never pruned: an adaptive overcommit depends on the trend since the start."""

    step: int
    reward_mean: float | None  # over samples with a valid reward; None without any


class Checkpointed(Entry, frozen=True, tag="checkpointed"):
    """A checkpoint was written and earlier rounds were pruned. Lists what a resume from it must start again when
    later checkpoints are lost."""

    step: int
    next_position: int
    open: tuple[int, ...]  # earlier positions that the checkpoint was not trained on
    returned: bool = False  # later steps do not count any more; else their batches may be replayed


class Dropped(Entry, frozen=True, tag="dropped"):
    """A group was dropped: no reward signal, over the lag limit, or not in the batch of its round."""

    position: int


class Restarted(Entry, frozen=True, tag="restarted"):
    """The tokens of these samples were discarded."""

    ordinals: tuple[int, ...]


class AcceptedTokens(Entry, frozen=True):
    """New tokens of one sample."""

    ordinal: int  # group position * group size + index
    attempt: int
    start: int
    token_ids: bytes
    logprobs: bytes
    version: int  # index into `Accepted.versions`
    finish: Literal["stop", "length"] | None


class Accepted(Entry, frozen=True, tag="tokens"):
    """The accepted deltas of one report."""

    versions: tuple[PolicyVersion, ...]
    samples: tuple[AcceptedTokens, ...]
    source: str = ""  # engine and worker
    lease: str = ""


class CallStarted(Entry, frozen=True, tag="call_started"):
    """A call that must not be repeated is about to start."""

    ordinal: int
    turn: int
    index: int


class CallEnded(Entry, frozen=True, tag="call_ended"):
    """The result of a call."""

    ordinal: int
    turn: int
    index: int
    call: Call


class Observed(Entry, frozen=True, tag="observed"):
    """The environment answered the last turn of a sample, whose completion had `start` tokens."""

    ordinal: int
    turn: int
    start: int
    answer: Observation


class Published(Entry, frozen=True, tag="published"):
    """For tokens that older versions generated: their logprobs under a newly published version."""

    version: int
    logprobs: tuple[tuple[int, LogprobBuffer], ...]  # by ordinal: float32 [N] of the sample's first tokens


class Rewarded(Entry, frozen=True, tag="rewards"):
    """Rewards by sample ordinal."""

    rewards: tuple[tuple[int, Reward], ...]


class Evaluated(Entry, frozen=True, tag="evaluation"):
    """A finished evaluation; its samples are pruned with the next checkpoint."""

    result: EvalResult
    samples: tuple[Trajectory, ...] = ()


class Judged(Entry, frozen=True, tag="judged"):
    """What the guard saw in a step. Never pruned: its decisions depend on all steps."""

    evidence: Evidence


class Decided(Entry, frozen=True, tag="decided"):
    """The guard decided. Never pruned: a rollback that was interrupted is done again."""

    decision: GuardDecision


AnyEntry: TypeAlias = (
    Opened
    | Accepted
    | CallStarted
    | CallEnded
    | Observed
    | Rewarded
    | Trained
    | BatchReward
    | RoundClosed
    | Checkpointed
    | Dropped
    | Restarted
    | Published
    | Evaluated
    | Judged
    | Decided
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    return _encoder.encode(entry)


def decode(blob: bytes, step: int = 0) -> AnyEntry:
    """Decode an entry stored under `step`.

    Raises:
        UserError: the blob is not an entry.
    """
    try:
        return _decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unreadable(step, str(error)) from error


def unreadable(step: int, why: str) -> UserError:
    """The error for an entry stored under `step` that cannot be used."""
    return UserError(
        f"the ledger's entries of step {step} are not readable ({why})",
        where="ledger.sqlite",
        hint="delete ledger.sqlite: the run resumes from its last checkpoint and generates later samples again",
    )


def accepted_entry(deltas: Iterable[tuple[int, TokenDelta]], source: str, lease: str) -> Accepted | None:
    """The entry for (ordinal, applied delta) pairs of one worker; None when no delta has tokens or a finish."""
    versions: dict[PolicyVersion, int] = {}
    samples = []
    for ordinal, delta in deltas:
        finish = delta.finish if delta.finish in ("stop", "length") else None
        if delta.token_ids or finish:
            version = versions.setdefault(delta.version, len(versions))
            tokens = AcceptedTokens(
                ordinal, delta.attempt, delta.start, delta.token_ids, delta.logprobs, version, finish
            )
            samples.append(tokens)
    return Accepted(tuple(versions), tuple(samples), source, lease) if samples else None


def batches_after(entries: Sequence[tuple[int, AnyEntry]], step: int) -> dict[int, tuple[int, ...]]:
    """Group positions of the consecutive batches after `step`, by step."""
    known = {entry.step: entry.positions for _, entry in entries if isinstance(entry, Trained)}
    following = dict[int, tuple[int, ...]]()
    while (step := step + 1) in known:
        following[step] = known[step]
    return following


def since_rollback(entries: Sequence[tuple[int, AnyEntry]]) -> tuple[list[tuple[int, AnyEntry]], bool]:
    """The entries without the rounds before the last rollback, and whether the return to its checkpoint is not stored
    yet."""
    decided = [
        at
        for at, (_, entry) in enumerate(entries)
        if isinstance(entry, Decided) and entry.decision.action == "rollback"
    ]
    if not decided:
        return list(entries), False
    known = [pair for pair in entries[: decided[-1]] if pair[0] == NEVER_PRUNED]
    later = entries[decided[-1] :]
    return [*known, *later], not any(isinstance(entry, Checkpointed) for _, entry in later)


def has_lost_versions(entries: Sequence[tuple[int, AnyEntry]], checkpoint: int, *, newest: int) -> bool:
    """Whether entries refer to versions that cannot be recomputed because their checkpoint is lost.

    Args:
        checkpoint: step of the newest checkpoint.
        newest: newest version that can be recomputed from it.
    """
    checkpointed = [entry.step for _, entry in entries if isinstance(entry, Checkpointed)]
    return bool(checkpointed and checkpointed[-1] > checkpoint) or any(
        (isinstance(entry, Trained) and entry.step > newest)
        or (isinstance(entry, Opened) and any(group.from_version > newest for group in entry.groups))
        for _, entry in entries
    )
