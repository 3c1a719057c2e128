"""What the entries of a journal make of samples in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tidemill.controller.entries import (
    Accepted,
    AnyEntry,
    Covered,
    Dropped,
    Learned,
    Opened,
    Published,
    Restarted,
    Rewarded,
    decode,
)
from tidemill.controller.in_flight import InFlight, Plan, PlannedGroup, plan_groups
from tidemill.controller.samples import IllegalTransition, SampleState
from tidemill.core.errors import UserError
from tidemill.core.records import Prompt


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
        cure="delete ledger.sqlite: the run goes on from its last checkpoint and generates later samples again",
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
    different = [name for name in Plan.__struct_fields__ if getattr(entry.plan, name) != getattr(in_flight.plan, name)]
    for group, (epoch, prompt) in zip(entry.groups, pairs, strict=True):
        (planned,) = plan_groups([(epoch, prompt)], first_position=group.position, from_version=group.from_version)
        different += [name for name in PlannedGroup.__struct_fields__ if getattr(planned, name) != getattr(group, name)]
    if different:
        raise UserError(
            f"step {filed} was begun with another batch (different: {', '.join(dict.fromkeys(different))})",
            where="ledger.sqlite",
            cure="resume with the task, batch, sampling and seed settings the run was started with; or delete "
            "ledger.sqlite to generate the samples since the last checkpoint again",
        )
    for group in entry.groups:
        if group.position in in_flight.groups:  # begun again, after a history that did not survive
            in_flight.close(group.position)
    in_flight.open(entry.groups, [prompt for _, prompt in pairs])
