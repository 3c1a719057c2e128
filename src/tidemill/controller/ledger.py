"""The journal of samples: its entries, writing them, and rebuilding samples in flight from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

import msgspec

from tidemill.controller.in_flight import InFlight, PlannedGroup, SamplingPlan, plan_groups
from tidemill.controller.samples import IllegalTransition, Sample, SampleState
from tidemill.core.errors import UserError
from tidemill.core.protocols import Journal
from tidemill.core.records import (
    LogprobBuffer,
    PolicyVersion,
    Prompt,
    Record,
    Reward,
    TokenDelta,
    Trajectory,
    WorkerReport,
    decode_msgpack,
)


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


OUTLIVES_CHECKPOINTS = 2**62
"""The journal step of entries that no checkpoint makes superfluous."""


class Ledger:
    """Samples in flight, what each batch consisted of, and what is known of earlier evaluations.

    Args:
        journal: None keeps nothing: for evaluations, whose samples are cheaper to make again than to store.
        round_size: groups of one round: those planned for one step.
    """

    def __init__(self, journal: Journal | None, *, round_size: int = 1) -> None:
        self._journal, self._round_size = journal, round_size
        self.evaluations: dict[int, Evaluated] = {}  # by step, the newest of each
        self.rewards: dict[
            int, float | None
        ] = {}  # by step, the mean of its batch; also of steps that are now repeated
        self.learned: dict[int, tuple[int, ...]] = {}  # by step beyond the newest checkpoint: positions, in order
        self.next_position = 0  # of the group that is begun next
        self._covered = 0  # the step of the newest checkpoint

    async def load(
        self, in_flight: InFlight, prompt_of: Callable[[int], tuple[int, Prompt]], *, after_step: int
    ) -> int:
        """Fill `in_flight` with what the journal has beyond the newest checkpoint, which is of `after_step`.

        Finished and scored samples are kept, partial ones wait with their tokens, the others wait empty. A history that
        did not survive (its checkpoint is gone) is forgotten.

        Args:
            prompt_of: the (epoch, prompt) at a position.

        Returns:
            How many batches beyond the checkpoint were learned from, whole or in part.

        Raises:
            UserError: the journal cannot be read, holds other prompts, or entries that make no sense.
        """
        stored = await self._journal.load() if self._journal else []
        self._covered, self.next_position = after_step, after_step * self._round_size
        entries = [(filed, decoded(blob, filed)) for filed, blob in stored]
        for _, entry in sorted(entries, key=lambda filed: filed[0] != OUTLIVES_CHECKPOINTS):  # those with samples last
            if isinstance(entry, Evaluated):
                self.evaluations[entry.result.step] = entry
            elif isinstance(entry, Achieved):
                self.rewards[entry.step] = entry.reward_mean
        self.learned = batches_after(entries, after_step)
        covered = [entry for _, entry in entries if isinstance(entry, Covered)]
        if tells_of_lost_versions(entries, after_step, through=max(self.learned, default=after_step)):
            self.learned = {}
            await self._begin_again(in_flight, prompt_of, entries)
            return 0
        for filed, entry in entries:
            replay(in_flight, entry, filed, prompt_of)
            if isinstance(entry, Opened):
                self.next_position = max(self.next_position, entry.groups[-1].position + 1)
        in_flight.recovered()
        for position in learned_through(entries, after_step) & in_flight.groups.keys():
            in_flight.close(position)
        if after_step > (covered[-1].step if covered else 0):  # killed before it was noted
            await self._cover(in_flight)
        beyond = in_flight.groups.keys() - {p for positions in self.learned.values() for p in positions}
        return len(self.learned) + bool(beyond)

    async def _begin_again(
        self,
        in_flight: InFlight,
        prompt_of: Callable[[int], tuple[int, Prompt]],
        entries: Sequence[tuple[int, AnyEntry]],
    ) -> None:
        """Forget a history, and begin again with what the weights of the newest checkpoint have not learned from."""
        step = self._covered
        known = [entry for _, entry in entries if isinstance(entry, Covered) and entry.step == step]
        if self._journal is not None:
            rounds = [filed for filed, _ in entries if filed != OUTLIVES_CHECKPOINTS]
            await self._journal.prune(max(rounds, default=0))
        if known:
            pairs = {position: prompt_of(position) for position in known[-1].open}
            groups = [plan_groups([pair], first_position=at, from_version=step)[0] for at, pair in pairs.items()]
            if groups:
                await self.open(in_flight, groups, [prompt for _, prompt in pairs.values()])
            self.next_position = known[-1].next_position
        await self._cover(in_flight)

    async def open(self, in_flight: InFlight, groups: Sequence[PlannedGroup], prompts: Sequence[Prompt]) -> None:
        """Begin groups, durably.

        Raises:
            UserError: a prompt is in flight already.
        """
        in_flight.open(groups, prompts)
        self.next_position = groups[-1].position + 1
        rounds = groupby(groups, key=lambda group: self._round(group.position))
        await self._append([(filed, encode(Opened(in_flight.plan, tuple(part)))) for filed, part in rounds])

    async def accept(self, in_flight: InFlight, reports: Sequence[WorkerReport]) -> list[Sample]:
        """Apply every delta that fits and make it durable; returns the samples that finished and may be acted on."""
        blobs: list[tuple[int, bytes]] = []
        finished: list[Sample] = []
        per_round = self._round_size * in_flight.plan.group_size
        for report in reports:
            applied: defaultdict[int, list[tuple[int, TokenDelta]]] = defaultdict(list)
            for delta in report.deltas:
                sample = in_flight.apply(delta)
                if sample is not None:
                    applied[sample.ordinal // per_round + 1].append((sample.ordinal, delta))
                    if delta.finish in ("stop", "length"):
                        finished.append(sample)
            if self._journal is None:
                continue
            for filed, pieces in applied.items():
                if (entry := accepted(pieces)) is not None:
                    blobs.append((filed, encode(entry)))
        await self._append(blobs)
        return finished

    async def reward(self, in_flight: InFlight, rewards: Sequence[tuple[Sample, Reward]]) -> None:
        """Note rewards and make them durable; only then may their samples be trained on."""
        for sample, reward in rewards:
            in_flight.score(sample, reward)
        size = in_flight.plan.group_size
        await self._file([(s.ordinal // size, Rewarded(((s.ordinal, reward),))) for s, reward in rewards])

    async def note_learned(
        self, in_flight: InFlight, step: int, positions: Sequence[int], *, reward_mean: float | None
    ) -> list[Sample]:
        """A batch was committed: its groups leave; returns their samples."""
        if step not in self.learned:
            self.learned[step], self.rewards[step] = tuple(positions), reward_mean
            achieved, learned = Achieved(step, reward_mean), Learned(step, tuple(positions))
            # In this order: a batch that is known to be learned is not noted again.
            filed = self._round(max(positions))
            await self._append([(OUTLIVES_CHECKPOINTS, encode(achieved)), (filed, encode(learned))])
        return [sample for position in positions for sample in in_flight.close(position)]

    def rewards_through(self, step: int) -> list[float | None]:
        """The mean reward of each batch up to a step; None for one without a valid reward."""
        return [self.rewards[each] for each in sorted(self.rewards) if each <= step]

    def has_learned_from(self, position: int) -> bool:
        """Whether a batch beyond the newest checkpoint, which is now repeated, had this group."""
        return any(position in positions for positions in self.learned.values())

    async def drop(self, in_flight: InFlight, position: int) -> None:
        """Give a group up."""
        in_flight.close(position)
        await self._file([(position, Dropped(position))])

    async def restart(self, in_flight: InFlight, samples: Sequence[Sample]) -> None:
        """Let samples of a group begin again."""
        in_flight.restart(samples)
        position = samples[0].ordinal // in_flight.plan.group_size
        await self._file([(position, Restarted(tuple(sample.ordinal for sample in samples)))])

    async def note_published(
        self, in_flight: InFlight, version: int, logprobs: Sequence[tuple[Sample, LogprobBuffer]]
    ) -> None:
        """Keep what a published version says of the first tokens of samples."""
        per_round = self._round_size * in_flight.plan.group_size
        by_round: defaultdict[int, list[tuple[int, LogprobBuffer]]] = defaultdict(list)
        for sample, said in logprobs:
            sample.note_published(version, said)
            by_round[sample.ordinal // per_round + 1].append((sample.ordinal, said))
        await self._append([(filed, encode(Published(version, tuple(part)))) for filed, part in by_round.items()])

    async def evaluated(self, result: EvalResult, samples: Sequence[Trajectory]) -> None:
        """Remember an evaluation: its figures for ever, its samples until a checkpoint covers its step.

        (A run resumed from an earlier step writes its samples files after that step again.)
        """
        self.evaluations[result.step] = Evaluated(result)
        if result.step > self._covered:
            await self._append([(result.step, encode(Evaluated(result, tuple(samples))))])
        await self._append([(OUTLIVES_CHECKPOINTS, encode(Evaluated(result)))])

    async def prune(self, in_flight: InFlight, through_step: int) -> None:
        """Forget the rounds of which a durable checkpoint has learned all."""
        self._covered = through_step
        self.learned = {step: positions for step, positions in self.learned.items() if step > through_step}
        needed = [*in_flight.groups, *(position for positions in self.learned.values() for position in positions)]
        if self.next_position > through_step * self._round_size:  # it is known from the last group alone
            needed.append(self.next_position - 1)
        if self._journal is not None:
            await self._cover(in_flight)
            await self._journal.prune(self._round(min(needed)) - 1 if needed else through_step)

    async def _cover(self, in_flight: InFlight) -> None:
        entry = Covered(self._covered, self.next_position, tuple(in_flight.groups))
        await self._append([(OUTLIVES_CHECKPOINTS, encode(entry))])

    def _round(self, position: int) -> int:
        return position // self._round_size + 1

    async def _file(self, entries: Iterable[tuple[int, AnyEntry]]) -> None:
        """Append entries about single groups, each given with its position."""
        await self._append([(self._round(position), encode(entry)) for position, entry in entries])

    async def _append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        if self._journal is not None and blobs:
            await self._journal.append(blobs)
