"""The entries of the ledger's journal, and how they are replayed into samples in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from tidemill.controller.in_flight import InFlight, PlannedGroup, SamplingPlan, plan_groups
from tidemill.controller.samples import IllegalTransition, SampleState
from tidemill.core.decoding import decode_msgpack
from tidemill.core.errors import UserError
from tidemill.core.records import LogprobBuffer, PolicyVersion, Prompt, Record, Reward, TokenDelta, Trajectory


class EvalResult(Record):
    """One evaluation's figures."""

    name: str
    step: int  # committed batches behind the weights
    version: PolicyVersion
    greedy_accuracy: float | None  # share of right samples; None where rewards are graded
    n: int
    invalid: int  # samples whose reward failed; not in the mean, and wrong
    truncated_fraction: float
    completion_tokens_mean: float
    duration_s: float
    reward_mean: float | None = None  # over samples whose reward is valid; None without any, and in older journals
    reward_stderr: float | None = None  # of that mean, over prompts


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """Base of all entries; packed as arrays because there is one per tick."""


class Opened(Entry, frozen=True, tag="opened"):
    """Groups were begun."""

    plan: SamplingPlan
    groups: tuple[PlannedGroup, ...]


class Learned(Entry, frozen=True, tag="learned"):
    """What a batch consisted of, in the order it was learned from. Its groups' samples are of no more use once a
    checkpoint covers the step."""

    step: int
    positions: tuple[int, ...]


class Achieved(Entry, frozen=True, tag="achieved"):
    """The mean reward of a batch, kept for ever: the trend that an adaptive overcommit follows begins with the run."""

    step: int
    reward_mean: float | None  # over samples whose reward is valid; None without any, and 0 in older journals


class Covered(Entry, frozen=True, tag="covered"):
    """The history goes on from a checkpoint, and what its weights have learned from is forgotten. Should a later
    checkpoint be lost, this says which groups there are to begin again with."""

    step: int
    next_position: int
    open: tuple[int, ...]  # positions before it that those weights have not learned from


class Dropped(Entry, frozen=True, tag="dropped"):
    """A group was given up: it had no signal, or had grown too old."""

    position: int


class Restarted(Entry, frozen=True, tag="restarted"):
    """Samples began again: they have none of the tokens that came before."""

    ordinals: tuple[int, ...]


class AcceptedTokens(Entry, frozen=True):
    """New tokens of one sample."""

    ordinal: int  # group position * group size + index
    attempt: int
    start: int
    token_ids: bytes
    logprobs: bytes
    version: int  # index into the message's versions
    finish: Literal["stop", "length"] | None


class Accepted(Entry, frozen=True, tag="tokens"):
    """What was accepted of one worker's report."""

    versions: tuple[PolicyVersion, ...]
    pieces: tuple[AcceptedTokens, ...]


class Published(Entry, frozen=True, tag="published"):
    """What a version said, when it was published, of tokens that older ones had made."""

    version: int
    logprobs: tuple[tuple[int, LogprobBuffer], ...]  # by ordinal: float32 [N] of the sample's first tokens


class Rewarded(Entry, frozen=True, tag="rewards"):
    """Rewards that arrived together, with the ordinals of their samples."""

    rewards: tuple[tuple[int, Reward], ...]


class Evaluated(Entry, frozen=True, tag="evaluation"):
    """An evaluation was finished. Its samples are kept only until a checkpoint covers them."""

    result: EvalResult
    samples: tuple[Trajectory, ...] = ()


AnyEntry: TypeAlias = (
    Opened | Accepted | Rewarded | Learned | Achieved | Covered | Dropped | Restarted | Published | Evaluated
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)


def encode(entry: AnyEntry) -> bytes:
    return _encoder.encode(entry)


def decode(blob: bytes) -> AnyEntry:
    """Read an entry back.

    Raises:
        msgspec.DecodeError: the blob is not one of ours.
    """
    return decode_msgpack(blob, _decoder)


def accepted(deltas: Iterable[tuple[int, TokenDelta]]) -> Accepted | None:
    """The entry for (ordinal, applied delta) pairs; None when they hold nothing that must survive."""
    versions: dict[PolicyVersion, int] = {}
    pieces = []
    for ordinal, delta in deltas:
        finish = delta.finish if delta.finish in ("stop", "length") else None
        if delta.token_ids or finish:
            pieces.append(
                AcceptedTokens(
                    ordinal,
                    delta.attempt,
                    delta.start,
                    delta.token_ids,
                    delta.logprobs,
                    versions.setdefault(delta.version, len(versions)),
                    finish,
                )
            )
    return Accepted(tuple(versions), tuple(pieces)) if pieces else None


def batches_after(entries: Sequence[tuple[int, AnyEntry]], after_step: int) -> dict[int, tuple[int, ...]]:
    """What the batches after a step consisted of, without a hole."""
    known = {entry.step: entry.positions for _, entry in entries if isinstance(entry, Learned)}
    following, step = dict[int, tuple[int, ...]](), after_step + 1
    while step in known:
        following[step] = known[step]
        step += 1
    return following


def learned_through(entries: Sequence[tuple[int, AnyEntry]], step: int) -> set[int]:
    """Groups learned from up to a step."""
    learned = (entry for _, entry in entries if isinstance(entry, Learned) and entry.step <= step)
    return {position for entry in learned for position in entry.positions}


def tells_of_lost_versions(entries: Sequence[tuple[int, AnyEntry]], after_step: int, *, through: int) -> bool:
    """Whether they tell of versions that will not be made again: of a history whose checkpoint is gone.

    Args:
        after_step: of the newest checkpoint there is.
        through: the newest version that can be made from it again.
    """
    covered = [entry.step for _, entry in entries if isinstance(entry, Covered)]
    return bool(covered and covered[-1] > after_step) or any(
        (isinstance(entry, Learned) and entry.step > through)
        or (isinstance(entry, Opened) and any(group.from_version > through for group in entry.groups))
        for _, entry in entries
    )


def decoded(blob: bytes, filed: int) -> AnyEntry:
    try:
        return decode(blob)
    except msgspec.DecodeError as error:
        raise _unreadable(filed, str(error)) from error


def _unreadable(filed: int, why: str) -> UserError:
    return UserError(
        f"the ledger's entries of step {filed} make no sense ({why})",
        where="ledger.sqlite",
        hint="delete ledger.sqlite: the run goes on from its last checkpoint and generates later samples again",
    )


def replay(in_flight: InFlight, entry: AnyEntry, filed: int, prompt_of: Callable[[int], tuple[int, Prompt]]) -> None:
    """Apply a stored entry.

    Raises:
        UserError: it does not fit what came before it, or tells of other prompts.
    """
    try:
        if isinstance(entry, Opened):
            _open_again(in_flight, entry, filed, prompt_of)
        elif isinstance(entry, Accepted):
            _accept_again(in_flight, entry, filed)
        elif isinstance(entry, Rewarded):
            for ordinal, reward in entry.rewards:
                in_flight.samples[ordinal].score(reward)
        elif isinstance(entry, Published):
            for ordinal, logprobs in entry.logprobs:
                in_flight.samples[ordinal].note_published(entry.version, logprobs)
        elif isinstance(entry, Restarted):
            for ordinal in entry.ordinals:
                in_flight.samples[ordinal].restart()
        elif isinstance(entry, Dropped):
            in_flight.close(entry.position)
    except (LookupError, IllegalTransition) as error:
        raise _unreadable(filed, str(error)) from error


def _accept_again(in_flight: InFlight, entry: Accepted, filed: int) -> None:
    for piece in entry.pieces:
        sample = in_flight.samples[piece.ordinal]
        if sample.state is SampleState.WAITING:
            sample.move(SampleState.RUNNING)
        if sample.state is not SampleState.RUNNING or piece.start != sample.length:
            raise _unreadable(filed, f"sample {piece.ordinal} has a piece out of place")
        sample.attempt = piece.attempt
        sample.extend(piece.token_ids, piece.logprobs, entry.versions[piece.version])
        if piece.finish:
            sample.end_attempt(piece.finish, "")


def _open_again(in_flight: InFlight, entry: Opened, filed: int, prompt_of: Callable[[int], tuple[int, Prompt]]) -> None:
    pairs = [prompt_of(group.position) for group in entry.groups]
    different = [
        name for name in SamplingPlan.__struct_fields__ if getattr(entry.plan, name) != getattr(in_flight.plan, name)
    ]
    for group, (epoch, prompt) in zip(entry.groups, pairs, strict=True):
        (planned,) = plan_groups([(epoch, prompt)], first_position=group.position, from_version=group.from_version)
        different += [name for name in PlannedGroup.__struct_fields__ if getattr(planned, name) != getattr(group, name)]
    if different:
        raise UserError(
            f"step {filed} was begun with another batch (different: {', '.join(dict.fromkeys(different))})",
            where="ledger.sqlite",
            hint="resume with the task, batch, sampling and seed settings the run was started with; or delete "
            "ledger.sqlite to generate the samples since the last checkpoint again",
        )
    for group in entry.groups:
        if group.position in in_flight.groups:  # begun again, after a history that did not survive
            in_flight.close(group.position)
    in_flight.open(entry.groups, [prompt for _, prompt in pairs])
