"""Invariants of tail batching: what each round starts, which of its groups are trained on, and in which order.

Computed from closed rounds and complete lengths, with schedules written for readability instead of speed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from tests.fault_simulation.invariants import require
from tests.fault_simulation.journal_reading import DurableState
from tidemill.config.schema import RunSpec
from tidemill.controller.entries import AnyEntry, Opened, ReturnedGroup, RoundClosed, encode
from tidemill.controller.in_flight import TRAIN, PlannedGroup
from tidemill.controller.length_model import LengthModel
from tidemill.core.records import SampleId, count


@dataclass(slots=True)
class Queue:
    """Returned prompts, and how many fresh ones were started."""

    long: list[ReturnedGroup] = field(default_factory=list)
    short: list[ReturnedGroup] = field(default_factory=list)
    next_place: int = 0
    redrawn: int = 0

    @property
    def returned(self) -> dict[int, ReturnedGroup]:
        return {group.place: group for group in (*self.long, *self.short)}


@dataclass(slots=True)
class Ranking:
    """How a round must close."""

    taken: list[int] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)  # ordinals by position
    redrawn: list[int] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # by ordinal
    ended: set[int] = field(default_factory=set)
    clock: int = 0


class TailInvariants:
    """Checks rounds over all lives of a run.

    Args:
        length: of a sample; None if it depends on more than the sample, as that of an agent.
        prompt_ids: of every prompt.
    """

    def __init__(self, spec: RunSpec, length: Callable[[SampleId], int] | None, prompt_ids: bytes) -> None:
        self._spec, self._length, self._prompt_tokens = spec, length, count(prompt_ids)
        self._size, self._drawn = spec.batch.prompts, spec.batch.group_size + spec.schedule.extra_samples
        self._most = math.ceil(spec.schedule.oversample * self._size)
        self._range = spec.round_groups
        self._checked: set[bytes] = set()  # closed rounds
        self.steps = spec.trainer.steps  # of the current life
        self.tainted = False  # a worker was found to compute wrongly since the last round closed
        self.was_tainted = False  # ever
        self.rounds = 0  # checked

    def take(self, entry: AnyEntry, durable: DurableState, *, live: bool) -> None:
        """An entry is durable, after those that `durable` has; `live` when it is written."""
        if isinstance(entry, Opened) and live:
            self._check_opened(entry.groups, durable)
        elif isinstance(entry, RoundClosed) and (live or encode(entry) not in self._checked):
            self._checked.add(encode(entry))
            self._check_closed(entry, durable)
            self.tainted = False

    # What a round starts.

    def queue(self, durable: DurableState, step: int) -> Queue:
        """After all rounds before `step`."""
        queue = Queue()
        for earlier in range(1, step):
            require(earlier in durable.rounds, f"round {earlier} is not in the journal")
            closed = durable.rounds[earlier]
            started = {group.place for group in closed.trained} | {group.place for group in closed.returned}
            started |= set(closed.redrawn)
            queue.long = [group for group in queue.long if group.place not in started]
            queue.short = [group for group in queue.short if group.place not in started]
            queue.long += [group for group in closed.returned if not group.first_in_short]
            queue.short += [group for group in closed.returned if group.first_in_short]
            queue.next_place = closed.next_place
            queue.redrawn += len(closed.redrawn)
        return queue

    def places(self, queue: Queue) -> list[int]:
        """Of the next round's prompts, in order."""
        fresh = max(0, self.steps * self._size + queue.redrawn - queue.next_place)
        is_long = len(queue.long) >= self._size or len(queue.short) + fresh < self._size
        groups = [*queue.long, *queue.short] if is_long else queue.short
        most = self._size if is_long else self._most
        places = [group.place for group in groups] + list(range(queue.next_place, queue.next_place + fresh))
        return places[:most]

    def _check_opened(self, groups: Sequence[PlannedGroup], durable: DurableState) -> None:
        step = max(durable.rounds, default=0) + 1
        first, name = (step - 1) * self._range, f"round {step}"
        positions, places = [group.position for group in groups], [group.place for group in groups]
        inside = all(first <= position < first + self._range for position in positions)
        require(inside, f"{name} starts groups {positions}, which are not in [{first}, {first + self._range})")
        versions = {group.from_version for group in groups}
        require(versions == {step - 1}, f"{name} starts groups of versions {versions}")
        queue, used = self.queue(durable, step), self._open(step, durable)
        if not used:
            right = self.places(queue)
            require(places == right, f"{name} starts the prompts {places}, not {right}")
            require(positions == list(range(first, first + len(right))), f"{name} starts the groups {positions}")
            return
        last = max(queue.next_place - 1, *(durable.groups[at].place for at in used))
        more = first + self._most + sum(at >= first + self._most for at in used)
        said = positions, places
        require(said == ([more], [last + 1]), f"{name} starts {said} after {used}, not {more}: {last + 1}")

    def _open(self, step: int, durable: DurableState) -> list[int]:
        first = (step - 1) * self._range
        return sorted(at for at in durable.positions if first <= at < first + self._range)

    def _order(self, step: int, places: Sequence[int], queue: Queue, durable: DurableState) -> list[int]:
        """Ordinals of the samples in the order in which they start."""
        model, limit = LengthModel(), self._spec.sampling.max_new_tokens
        for earlier in range(1, step):
            for group in durable.rounds[earlier].trained:
                model.observe(group.prompt_id, group.prompt_tokens, group.lengths)
        expectations = list[list[float]]()
        for at, place in enumerate(places):
            position, before = (step - 1) * self._range + at, queue.returned.get(place)
            name = durable.groups[position].prompt_id
            expectations.append([])
            for index in range(self._drawn):
                if before is None:
                    expected = model.expected_remaining(name, self._prompt_tokens, 0, limit, [])
                elif before.ended[index]:
                    expected = before.seen[index]
                else:
                    seen = before.seen[index]
                    known = [tokens for tokens, ended in zip(before.seen, before.ended, strict=True) if ended]
                    expected = seen + model.expected_remaining(name, self._prompt_tokens, seen, limit, known)
                expectations[at].append(expected)
        everything = [expected for of_group in expectations for expected in of_group]
        early, late, extra = list[tuple[float, int]](), list[tuple[float, int]](), list[tuple[bool, float, int]]()
        for at, (place, of_group) in enumerate(zip(places, expectations, strict=True)):
            for index, expected in enumerate(of_group):
                ordinal = ((step - 1) * self._range + at) * self._drawn + index
                is_early = place in queue.returned and expected > fmean(everything)
                rank = -expected if is_early else -max(of_group)
                if at >= self._size:
                    extra.append((not is_early, rank, ordinal))
                else:
                    (early if is_early else late).append((rank, ordinal))
        first = [ordinal for _, ordinal in (*sorted(early), *sorted(late))]
        return [*first, *(ordinal for *_, ordinal in sorted(extra))]

    # How it closes.

    def _lengths(self, step: int, durable: DurableState) -> dict[int, int]:
        """By ordinal: complete if they are functions of the sample, otherwise so far."""
        lengths = {}
        for position in self._open(step, durable):
            group = durable.groups[position]
            for index in range(self._drawn):
                ordinal = position * self._drawn + index
                if self._length is None:
                    lengths[ordinal] = durable.samples[ordinal].generated
                    continue
                sample_id = SampleId(
                    run_seed=self._spec.run.seed,
                    purpose=TRAIN,
                    prompt_id=group.prompt_id,
                    epoch=group.epoch,
                    index=index,
                )
                lengths[ordinal] = min(self._length(sample_id), self._spec.sampling.max_new_tokens)
        return lengths

    def _ranking(self, step: int, order: Sequence[int], lengths: Mapping[int, int], durable: DurableState) -> Ranking:
        """List scheduling of the round until its batch is full."""
        ranking, pending, running = Ranking(), list(order), set[int]()
        slots, first = self._spec.nominal_slots or math.inf, (step - 1) * self._range
        most_redraws = self._spec.algorithm.max_redraws * self._size if self._spec.algorithm.dynamic_sampling else 0
        while len(ranking.taken) < self._size:
            while pending and len(running) < slots:
                ranking.starts[pending[0]] = ranking.clock
                running.add(pending.pop(0))
            require(bool(running), f"round {step} closes before its batch is full")
            ranking.clock, ended = min((ranking.starts[ordinal] + lengths[ordinal], ordinal) for ordinal in running)
            finished = self._length is not None or durable.samples[ended].finish is not None
            require(finished, f"round {step} closes although sample {ended} could end before others that count")
            running.remove(ended)
            ranking.ended.add(ended)
            position = ended // self._drawn
            kept = ranking.kept.setdefault(position, [])
            kept.append(ended)
            if len(kept) < self._spec.batch.group_size:
                continue
            pending = [ordinal for ordinal in pending if ordinal // self._drawn != position]
            running = {ordinal for ordinal in running if ordinal // self._drawn != position}
            if len(ranking.redrawn) < most_redraws and not self._has_signal(kept, durable):
                ranking.redrawn.append(position)
                other = first + self._most + len(ranking.redrawn) - 1
                require(other in durable.positions, f"round {step} replaces group {position} by no other")
                pending += range(other * self._drawn, (other + 1) * self._drawn)
            else:
                ranking.taken.append(position)
        return ranking

    def _has_signal(self, ordinals: Sequence[int], durable: DurableState) -> bool:
        rewards = [durable.samples[ordinal].reward for ordinal in ordinals]
        require(None not in rewards, f"samples {ordinals} count before their rewards are durable")
        return len({reward.value for reward in rewards if reward is not None and reward.valid}) > 1

    def _check_closed(self, said: RoundClosed, durable: DurableState) -> None:
        step, name = said.step, f"round {said.step}"
        require(step == max(durable.rounds, default=0) + 1, f"{name} closes after rounds {sorted(durable.rounds)}")
        opened, queue = self._open(step, durable), self.queue(durable, step)
        places = {at: durable.groups[at].place for at in opened}
        first = (step - 1) * self._range
        trained = [group.place for group in said.trained]
        require(trained == [places.get(at) for at in said.positions], f"{name} trains the prompts {trained}")
        gone = set(places.values()) - set(trained) - {group.place for group in said.returned}
        require(gone == set(said.redrawn), f"{name} loses the prompts {sorted(gone)}: {said.redrawn} are redrawn")
        require(len(set(trained)) == self._size, f"{name} trains the prompts {trained}")
        if self.tainted and (self._length is None or self._drawn > self._spec.batch.group_size):
            return  # lengths of an agent differ the second time, and trained groups keep the samples that they have
        self.rounds += 1
        initial = [places[at] for at in opened if at < first + self._most]
        lengths = self._lengths(step, durable)
        right = self._ranking(step, self._order(step, initial, queue, durable), lengths, durable)
        require(list(said.positions) == right.taken, f"{name} trains the groups {said.positions}, not {right.taken}")
        kept = [sorted(right.kept[at]) for at in right.taken]
        counted, told = [tuple(lengths[each] for each in group) for group in kept], [g.lengths for g in said.trained]
        require(told == counted, f"{name} trains samples of {told} tokens, not {counted}")
        members = [at * self._drawn + index for at in right.taken for index in range(self._drawn)]
        aside = [each for each in members if not any(each in group for group in kept)]
        require(list(said.set_aside) == aside, f"{name} sets the samples {said.set_aside} aside, not {aside}")
        others = [at for at in opened if at not in right.taken and at not in right.redrawn]
        returned = [self._returned(at, places[at], right, lengths, extra=at >= first + self._size) for at in others]
        told_back = [(g.place, g.seen, g.ended, g.first_in_short) for g in said.returned]
        require(told_back == returned, f"{name} returns {told_back}, not {returned}")
        after = max(queue.next_place, max(places.values()) + 1)
        told_last, last = (said.redrawn, said.next_place), (tuple(places[at] for at in right.redrawn), after)
        require(told_last == last, f"{name} ends with {told_last} (redrawn, next place), not {last}")

    def _returned(
        self, position: int, place: int, ranking: Ranking, lengths: Mapping[int, int], *, extra: bool
    ) -> tuple[int, tuple[int, ...], tuple[bool, ...], bool]:
        """Tokens of each sample until the clock."""
        ordinals = range(position * self._drawn, (position + 1) * self._drawn)
        starts = ranking.starts
        seen = tuple(min(lengths[each], ranking.clock - starts[each]) if each in starts else 0 for each in ordinals)
        return place, seen, tuple(each in ranking.ended for each in ordinals), extra

    # What is trained.

    def committed(self, step: int, batch: Sequence[int], durable: DurableState) -> None:
        closed = durable.rounds.get(step)
        require(closed is not None, f"batch {step} is committed before its round is durably closed")
        assert closed is not None
        require(tuple(batch) == closed.positions, f"batch {step} is {batch}; its round closed with {closed.positions}")

    def finished(self, steps: int, durable: DurableState) -> None:
        """Every prompt was trained on once, unless it was redrawn; no prompt waits."""
        places = Counter(group.place for step in range(1, steps + 1) for group in durable.rounds[step].trained)
        twice = sorted(place for place, times in places.items() if times > 1)
        require(not twice, f"the prompts {twice} were trained on twice")
        redrawn = {place for step in range(1, steps + 1) for place in durable.rounds[step].redrawn}
        require(not redrawn & places.keys(), f"of the redrawn prompts {sorted(redrawn)} some were trained on")
        queue = self.queue(durable, steps + 1)
        if self.was_tainted and self._spec.algorithm.dynamic_sampling:  # a redrawn group may have got a signal
            return
        require(not queue.returned, f"the prompts {sorted(queue.returned)} wait at the end")
        started = set(range(steps * self._size + queue.redrawn))
        lost = sorted(started - redrawn - places.keys())
        require(not lost and started >= places.keys(), f"the prompts {lost} were lost")
