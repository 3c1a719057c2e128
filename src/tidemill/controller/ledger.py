"""The ledger: a durable journal of samples and batches, from which a resumed run restores its samples in flight.

Memory changes first, and the append is awaited before anything acts on the change. That is safe because a journal keeps
the order of its appends: a kill loses only its newest entries.

An entry is stored under the *round* of its groups, that is the step for which they are planned. Groups are started
round by round, so that a checkpoint allows whole rounds to be pruned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

from tidemill.controller.entries import (
    NEVER_PRUNED,
    Accepted,
    AnyEntry,
    BatchReward,
    CallEnded,
    CallStarted,
    Checkpointed,
    Decided,
    Dropped,
    EvalResult,
    Evaluated,
    Judged,
    Observed,
    Opened,
    Published,
    Restarted,
    Rewarded,
    RoundClosed,
    Trained,
    accepted_entry,
    batches_after,
    decode,
    encode,
    has_lost_versions,
    since_rollback,
    unreadable,
)
from tidemill.controller.in_flight import InFlight, PlannedGroup, SamplingPlan, plan_groups
from tidemill.controller.samples import IllegalTransition, Sample, SampleState
from tidemill.core.errors import UserError
from tidemill.core.evidence import Evidence, GuardDecision
from tidemill.core.protocols import Journal
from tidemill.core.records import Call, LogprobBuffer, Observation, Prompt, Reward, TokenDelta, Trajectory, WorkerReport

PromptAt: TypeAlias = Callable[[int], tuple[int, Prompt]]
"""Returns the (epoch, prompt) at a place in the source."""


class Ledger:
    """Journals what happens to samples in flight, batches and evaluations.

    Args:
        journal: None stores nothing, as in evaluations, which are repeated instead.
        round_size: most groups per round.
    """

    def __init__(self, journal: Journal | None, *, round_size: int = 1) -> None:
        self._journal, self._round_size = journal, round_size
        self.evaluations: dict[tuple[int, str], Evaluated] = {}  # by step and name, the newest of each
        self.rewards: dict[int, float | None] = {}  # mean by step, also of batches that will be replayed
        self.batches: dict[int, tuple[int, ...]] = {}  # positions by step, after the newest checkpoint
        self.rounds: dict[int, RoundClosed] = {}  # by step, of the whole run
        self.evidence: dict[int, Evidence] = {}  # of the guard, by step
        self.decisions: list[GuardDecision] = []
        self.next_position = 0  # of the next group to start
        self._checkpoint = 0  # step of the newest checkpoint

    async def load(
        self, in_flight: InFlight, prompt_at: PromptAt, *, after_step: int, restart_open: bool = True
    ) -> int:
        """Restore `in_flight` from the entries after the newest checkpoint, which is at `after_step`.

        Finished and scored samples are kept; partial samples wait with their tokens. Entries that depend on a lost
        checkpoint are discarded.

        Args:
            restart_open: after a checkpoint was lost, start the groups again that were open at the previous one. With
                tail batching the next round does.

        Returns:
            Number of batches after the checkpoint that the journal has, the last of them possibly in part.

        Raises:
            UserError: the journal is not readable, or belongs to other prompts or settings.
        """
        stored = await self._journal.load() if self._journal else []
        self._checkpoint, self.next_position = after_step, after_step * self._round_size
        entries = [(step, decode(blob, step)) for step, blob in stored]
        for _, entry in sorted(entries, key=lambda pair: pair[0] != NEVER_PRUNED):  # those with samples last
            if isinstance(entry, Evaluated):
                self.evaluations[entry.result.step, entry.result.name] = entry
            elif isinstance(entry, BatchReward):
                self.rewards[entry.step] = entry.reward_mean
        self._load_guard([entry for _, entry in entries])
        self._load_rounds([entry for _, entry in entries])
        entries, rolled_back = since_rollback(entries)
        self.batches = batches_after(entries, after_step)
        checkpointed = [entry.step for _, entry in entries if isinstance(entry, Checkpointed)]
        if rolled_back or has_lost_versions(entries, after_step, newest=max(self.batches, default=after_step)):
            self.batches = {}
            self.evidence = {step: each for step, each in self.evidence.items() if step <= after_step}
            self.rounds = {step: each for step, each in self.rounds.items() if step <= after_step}
            await self._restart_from_checkpoint(in_flight, prompt_at, entries, restart_open=restart_open)
            return 0
        for step, entry in entries:
            replay(in_flight, entry, step, prompt_at)
            if isinstance(entry, Checkpointed) and entry.step == after_step:  # a return to it leaves no other trace
                self.next_position = entry.next_position
            elif isinstance(entry, Opened):
                self.next_position = max(self.next_position, entry.groups[-1].position + 1)
        in_flight.finish_replay()
        trained = [entry for _, entry in entries if isinstance(entry, Trained) and entry.step <= after_step]
        for position in {at for entry in trained for at in entry.positions} & in_flight.groups.keys():
            in_flight.close(position)
        if after_step > (checkpointed[-1] if checkpointed else 0):  # killed before the entry was written
            await self._append_checkpointed(in_flight)
        unbatched = in_flight.groups.keys() - {at for positions in self.batches.values() for at in positions}
        return len(self.batches) + bool(unbatched)

    def _load_guard(self, entries: Iterable[AnyEntry]) -> None:
        """Evidence that counts, and all decisions."""
        for entry in entries:
            if isinstance(entry, Judged):
                self.evidence[entry.evidence.step] = entry.evidence
            elif isinstance(entry, Checkpointed) and entry.returned:
                self.evidence = {step: each for step, each in self.evidence.items() if step <= entry.step}
            elif isinstance(entry, Decided):
                self._apply_decision(entry.decision)

    def _load_rounds(self, entries: Iterable[AnyEntry]) -> None:
        """Closed rounds, without those after a checkpoint to which the run returned."""
        for entry in entries:
            if isinstance(entry, RoundClosed):
                self.rounds[entry.step] = entry
            elif isinstance(entry, Checkpointed) and entry.returned:
                self.rounds = {step: each for step, each in self.rounds.items() if step <= entry.step}

    def _apply_decision(self, decision: GuardDecision) -> None:
        self.decisions.append(decision)
        last = 0 if decision.forgets else decision.target
        self.evidence = {step: each for step, each in self.evidence.items() if step <= last}

    async def record_evidence(self, evidence: Evidence) -> None:
        """Store what the guard saw in a step; when this returns, it may decide."""
        self.evidence[evidence.step] = evidence
        await self._append([(NEVER_PRUNED, encode(Judged(evidence)))])

    async def record_decision(self, decision: GuardDecision) -> None:
        """Store a decision; when this returns, it may be carried out."""
        self._apply_decision(decision)
        await self._append([(NEVER_PRUNED, encode(Decided(decision)))])

    async def _restart_from_checkpoint(
        self, in_flight: InFlight, prompt_at: PromptAt, entries: Sequence[tuple[int, AnyEntry]], *, restart_open: bool
    ) -> None:
        """Discard all rounds, and start the groups that the newest checkpoint was not trained on."""
        step = self._checkpoint
        known = [entry for _, entry in entries if isinstance(entry, Checkpointed) and entry.step == step]
        if self._journal is not None:
            await self._journal.prune(NEVER_PRUNED - 1)
        if known:
            pairs = {position: prompt_at(position) for position in known[-1].open if restart_open}
            groups = [plan_groups([pair], first_position=at, from_version=step)[0] for at, pair in pairs.items()]
            if groups:
                await self.open(in_flight, groups, [prompt for _, prompt in pairs.values()])
            self.next_position = known[-1].next_position
        await self._append_checkpointed(in_flight, returned=True)

    async def open(self, in_flight: InFlight, groups: Sequence[PlannedGroup], prompts: Sequence[Prompt]) -> None:
        """Start groups. Raises UserError: a prompt is already in flight."""
        in_flight.open(groups, prompts)
        self.next_position = groups[-1].position + 1
        rounds = groupby(groups, key=lambda group: self._round(group.position))
        await self._append([(step, encode(Opened(in_flight.plan, tuple(part)))) for step, part in rounds])

    async def accept(self, in_flight: InFlight, reports: Sequence[WorkerReport]) -> list[Sample]:
        """Apply the deltas that fit; returns the samples that finished, or whose turn ended."""
        blobs: list[tuple[int, bytes]] = []
        finished: list[Sample] = []
        for report in reports:
            applied: defaultdict[int, list[tuple[int, TokenDelta]]] = defaultdict(list)
            for delta in report.deltas:
                sample = in_flight.apply(delta, report.status.source)
                if sample is not None:
                    applied[self._round(in_flight.position(sample))].append((sample.ordinal, delta))
                    if delta.finish in ("stop", "length"):
                        finished.append(sample)
            if self._journal is None:
                continue
            for step, deltas in applied.items():
                if (entry := accepted_entry(deltas, report.status.source, report.lease_id)) is not None:
                    blobs.append((step, encode(entry)))
        await self._append(blobs)
        return finished

    async def record_call_started(self, in_flight: InFlight, sample: Sample, index: int) -> None:
        """When this returns, it is durable that a call which must not be repeated is about to start."""
        sample.turns.started_calls += (index,)
        entry = CallStarted(sample.ordinal, len(sample.turns.ended) - 1, index)
        await self._append_by_position([(in_flight.position(sample), entry)])

    async def record_call(self, in_flight: InFlight, sample: Sample, index: int, call: Call) -> None:
        """Store a call's result."""
        sample.turns.finished_calls = {**sample.turns.finished_calls, index: call}
        entry = CallEnded(sample.ordinal, len(sample.turns.ended) - 1, index, call)
        await self._append_by_position([(in_flight.position(sample), entry)])

    async def observe(self, in_flight: InFlight, answers: Sequence[tuple[Sample, Observation]]) -> None:
        """Append environments' answers to acting samples; when this returns, engines may continue them."""
        entries = []
        for sample, answer in answers:
            entry = Observed(sample.ordinal, len(sample.turns.ended) - 1, sample.length, answer)
            entries.append((in_flight.position(sample), entry))
            in_flight.observe(sample, answer)
        await self._append_by_position(entries)

    async def record_rewards(self, in_flight: InFlight, rewards: Sequence[tuple[Sample, Reward]]) -> None:
        """Store rewards; when this returns, the samples may be trained on."""
        for sample, reward in rewards:
            in_flight.score(sample, reward)
        await self._append_by_position(
            [(in_flight.position(sample), Rewarded(((sample.ordinal, reward),))) for sample, reward in rewards]
        )

    async def close_round(self, in_flight: InFlight, closed: RoundClosed, dropped: Sequence[int]) -> None:
        """Store which groups a batch has; close those that it does not have, whose prompts are started again unless
        they are redrawn. When this returns, a resumed run has the same batch."""
        again = {group.place for group in closed.returned}
        for position in dropped:
            if in_flight.groups[position].place in again:
                in_flight.return_group(position)
            else:
                in_flight.close(position)
        blobs = [(self._round(position), encode(Dropped(position))) for position in dropped]
        if closed.step not in self.rounds:
            self.rounds[closed.step] = closed
            blobs = [(NEVER_PRUNED, encode(closed)), *blobs]
        await self._append(blobs)

    async def record_batch(
        self, in_flight: InFlight, step: int, positions: Sequence[int], *, reward_mean: float | None
    ) -> list[Sample]:
        """Store a committed batch and close its groups; returns their samples."""
        if step not in self.batches:
            self.batches[step], self.rewards[step] = tuple(positions), reward_mean
            reward, trained = BatchReward(step, reward_mean), Trained(step, tuple(positions))
            # The reward first: a replayed batch is not stored again.
            await self._append([(NEVER_PRUNED, encode(reward)), (self._round(max(positions)), encode(trained))])
        return [sample for position in positions for sample in in_flight.close(position)]

    def rewards_through(self, step: int) -> list[float | None]:
        """Mean reward of each batch up to `step`; None for one without a valid reward."""
        return [self.rewards[each] for each in sorted(self.rewards) if each <= step]

    def in_stored_batch(self, position: int) -> bool:
        """Whether a group is in a batch after the newest checkpoint, one that is replayed after a resume."""
        return any(position in positions for positions in self.batches.values())

    async def drop(self, in_flight: InFlight, position: int) -> None:
        """Close a group without training on it."""
        in_flight.close(position)
        await self._append_by_position([(position, Dropped(position))])

    async def restart(self, in_flight: InFlight, samples: Sequence[Sample]) -> None:
        """Discard the tokens of samples of one group."""
        in_flight.restart(samples)
        position = in_flight.position(samples[0])
        await self._append_by_position([(position, Restarted(tuple(sample.ordinal for sample in samples)))])

    async def record_published(
        self, in_flight: InFlight, version: int, logprobs: Sequence[tuple[Sample, LogprobBuffer]]
    ) -> None:
        """Store logprobs under a published version of samples' first tokens."""
        by_round: defaultdict[int, list[tuple[int, LogprobBuffer]]] = defaultdict(list)
        for sample, buffer in logprobs:
            sample.set_published(version, buffer)
            by_round[self._round(in_flight.position(sample))].append((sample.ordinal, buffer))
        await self._append([(step, encode(Published(version, tuple(part)))) for step, part in by_round.items()])

    async def record_evaluation(self, result: EvalResult, samples: Sequence[Trajectory]) -> None:
        """Store an evaluation: its figures permanently, its samples until the next checkpoint.

        A run resumed from an earlier step writes the samples to its files again.
        """
        self.evaluations[result.step, result.name] = Evaluated(result)
        if result.step > self._checkpoint:
            await self._append([(result.step, encode(Evaluated(result, tuple(samples))))])
        await self._append([(NEVER_PRUNED, encode(Evaluated(result)))])

    async def prune(self, in_flight: InFlight, through_step: int) -> None:
        """Delete the rounds whose groups are all covered by the checkpoint at `through_step`."""
        self._checkpoint = through_step
        self.batches = {step: positions for step, positions in self.batches.items() if step > through_step}
        needed = [*in_flight.groups, *(position for positions in self.batches.values() for position in positions)]
        if self.next_position > through_step * self._round_size:  # only the last group's entry records it
            needed.append(self.next_position - 1)
        if self._journal is not None:
            await self._append_checkpointed(in_flight)
            await self._journal.prune(self._round(min(needed)) - 1 if needed else through_step)

    async def _append_checkpointed(self, in_flight: InFlight, *, returned: bool = False) -> None:
        groups, step = in_flight.groups, self._checkpoint
        # Groups of batches that are still to be replayed were started after this checkpoint.
        later = [position for position, group in groups.items() if group.from_version > step]
        first = min([self.next_position, *later])
        entry = Checkpointed(step, first, tuple(position for position in groups if position < first), returned)
        await self._append([(NEVER_PRUNED, encode(entry))])

    def _round(self, position: int) -> int:
        return position // self._round_size + 1

    async def _append_by_position(self, entries: Iterable[tuple[int, AnyEntry]]) -> None:
        await self._append([(self._round(position), encode(entry)) for position, entry in entries])

    async def _append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        if self._journal is not None and blobs:
            await self._journal.append(blobs)


def replay(in_flight: InFlight, entry: AnyEntry, step: int, prompt_at: PromptAt) -> None:
    """Apply a stored entry to samples in flight, as when it was written.

    Raises:
        UserError: it contradicts earlier entries, or belongs to other prompts or settings.
    """
    try:
        if isinstance(entry, Opened):
            _replay_opened(in_flight, entry, step, prompt_at)
        elif isinstance(entry, Accepted):
            _replay_accepted(in_flight, entry, step)
        elif isinstance(entry, CallStarted | CallEnded | Observed):
            _replay_acting(in_flight, entry, step)
        elif isinstance(entry, Rewarded):
            for ordinal, reward in entry.rewards:
                in_flight.samples[ordinal].score(reward)
        elif isinstance(entry, Published):
            for ordinal, logprobs in entry.logprobs:
                in_flight.samples[ordinal].set_published(entry.version, logprobs)
        elif isinstance(entry, Restarted):
            for ordinal in entry.ordinals:
                in_flight.samples[ordinal].restart()
        elif isinstance(entry, Dropped):
            in_flight.close(entry.position)
    except (LookupError, IllegalTransition) as error:
        raise unreadable(step, str(error)) from error


def _replay_accepted(in_flight: InFlight, entry: Accepted, step: int) -> None:
    for tokens in entry.samples:
        sample = in_flight.samples[tokens.ordinal]
        if sample.state is SampleState.WAITING:
            sample.move(SampleState.RUNNING)
        if sample.state is not SampleState.RUNNING or tokens.start != sample.length:
            raise unreadable(step, f"sample {tokens.ordinal}: tokens at {tokens.start}, expected {sample.length}")
        sample.attempt, sample.turns.returning = tokens.attempt, False
        version = entry.versions[tokens.version]
        sample.extend(tokens.token_ids, tokens.logprobs, version, entry.source, entry.lease)
        if tokens.finish:
            sample.end_attempt(tokens.finish, "", in_flight.plan.sampling, in_flight.plan.agent)


def _replay_acting(in_flight: InFlight, entry: CallStarted | CallEnded | Observed, step: int) -> None:
    sample = in_flight.samples[entry.ordinal]
    turns, agent = sample.turns, in_flight.plan.agent
    if sample.state is not SampleState.ACTING or agent is None or len(turns.ended) - 1 != entry.turn:
        raise unreadable(step, f"sample {entry.ordinal}: {type(entry).__name__} of turn {entry.turn} does not fit")
    if isinstance(entry, CallStarted):
        turns.started_calls += (entry.index,)
    elif isinstance(entry, CallEnded):
        turns.finished_calls = {**turns.finished_calls, entry.index: entry.call}
    elif entry.start != sample.length:
        raise unreadable(step, f"sample {entry.ordinal}: observation at {entry.start}, expected {sample.length}")
    else:
        sample.observe(entry.answer, in_flight.plan.sampling, agent)


def _replay_opened(in_flight: InFlight, entry: Opened, step: int, prompt_at: PromptAt) -> None:
    pairs = [prompt_at(group.place) for group in entry.groups]
    different = [
        name for name in SamplingPlan.__struct_fields__ if getattr(entry.plan, name) != getattr(in_flight.plan, name)
    ]
    for group, (epoch, prompt) in zip(entry.groups, pairs, strict=True):
        (planned,) = plan_groups([(epoch, prompt)], first_position=group.position, from_version=group.from_version)
        names = ("epoch", "prompt_id", "prompt_digest")
        different += [name for name in names if getattr(planned, name) != getattr(group, name)]
    if different:
        raise UserError(
            f"step {step} was started with other prompts or settings (different: "
            f"{', '.join(dict.fromkeys(different))})",
            where="ledger.sqlite",
            hint="resume with the task, batch, sampling and seed settings the run was started with; or delete "
            "ledger.sqlite to generate the samples since the last checkpoint again",
        )
    for group in entry.groups:
        if group.position in in_flight.groups:  # opened a second time after a checkpoint was lost
            in_flight.close(group.position)
    in_flight.open(entry.groups, [prompt for _, prompt in pairs])
