"""The ledger: the truth about samples, journalled message by message, and rebuilt from the journal after a kill.

Memory is changed first and the journal awaited before anybody acts on the change. That is safe because a journal keeps
the order of its appends: what a kill loses is always the newest part of the event_log, never a piece out of its middle.

An entry is filed under the *round* of its groups: the step whose planned prompts they are. Groups begin round by round,
so that what a checkpoint makes superfluous is a number of whole rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from tidemill.controller.in_flight import InFlight, PlannedGroup, plan_groups
from tidemill.controller.journal_entries import (
    Achieved,
    AnyEntry,
    Covered,
    Dropped,
    EvalResult,
    Evaluated,
    Learned,
    Opened,
    Published,
    Restarted,
    Rewarded,
    accepted,
    batches_after,
    decoded,
    encode,
    learned_through,
    replay,
    tells_of_lost_versions,
)
from tidemill.controller.samples import Sample
from tidemill.core.protocols import Journal
from tidemill.core.records import LogprobBuffer, Prompt, Reward, TokenDelta, Trajectory, WorkerReport

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
