"""What the ledger writes to its journal: one msgpack blob per message, samples named by their place among all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from tidemill.controller.in_flight import Plan, PlannedGroup
from tidemill.core.buffers import LogprobBuffer
from tidemill.core.decoding import decode_msgpack
from tidemill.core.records import PolicyVersion, Record, Reward, TokenDelta, Trajectory


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

    plan: Plan
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


class Piece(Entry, frozen=True):
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
    pieces: tuple[Piece, ...]


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
                Piece(
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
