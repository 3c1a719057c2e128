"""Tail batching: on-policy batches of the groups that end first; the others are trained on in rounds of their own.

```
        source ──fresh prompts──▶ short round ──first B groups by rank──▶ batch
                                   ▲    │ others; their tokens are discarded
               extra groups, first │    ▼
                                   └── returned ──first B of the round──▶ long queue ──B groups──▶ long round ──▶ batch
```
A short round starts more groups than its batch has, in a fixed order; `NominalSchedule` ranks them. Those among the
first B of the order that are not in the batch wait for a long round, which trains B of them and starts no others; extra
groups that are not in it are the first of the next short round. Every prompt is trained as often as without tail
batching; the last rounds of a run empty the queue.

What a round starts depends only on how earlier rounds closed, so a resumed run starts the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from itertools import chain, compress
from statistics import fmean

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.entries import ReturnedGroup, RoundClosed, TrainedGroup
from tidemill.controller.in_flight import InFlight
from tidemill.controller.length_model import LengthModel
from tidemill.controller.nominal_schedule import NominalSchedule
from tidemill.core.records import Prompt, count


def trained_groups(in_flight: InFlight, positions: Iterable[int]) -> tuple[TrainedGroup, ...]:
    """The groups of a batch, with the lengths of the samples that were trained on."""
    groups = [(in_flight.groups[position], in_flight.group(position)) for position in positions]
    return tuple(
        TrainedGroup(
            group.place,
            group.prompt_id,
            count(samples[0].prompt.token_ids),
            tuple(sample.generated for sample in samples if sample.needed),
        )
        for group, samples in groups
    )


class TailBatching:
    """The rounds of a run, and the groups of the current one.

    Args:
        in_flight: of the run; samples are assigned in the order of the round.
    """

    def __init__(self, spec: RunSpec, in_flight: InFlight) -> None:
        batch, schedule = spec.batch, spec.schedule
        self._size, self._most = batch.prompts, spec.short_round
        self._group, self._drawn = batch.group_size, batch.group_size + schedule.oversample_group
        self._slots, self._limit = spec.nominal_slots, spec.sampling.max_new_tokens
        self.round_size = spec.round_groups  # positions of a round
        self._total = spec.trainer.steps * batch.prompts
        self._in_flight = in_flight
        self._lengths = LengthModel()
        self._applied = 0  # rounds
        self._next_place = 0
        self._redrawn = 0  # in earlier rounds
        self._long: list[ReturnedGroup] = []
        self._short: list[ReturnedGroup] = []
        self._pending_redraws = list[int]()
        self.redrawn: list[int] = []  # positions of this round without reward signal
        self.ranked: list[int] = []  # positions that the batch may take, in training order
        self.undecided: int | None = None  # a group that has ended, and has no reward yet
        self.schedule = NominalSchedule(0, samples_per_group=1, needed=1)

    def first_position(self, step: int) -> int:
        return (step - 1) * self.round_size

    def positions(self, step: int) -> list[int]:
        """Open groups of a step's round."""
        first = self.first_position(step)
        return [at for at in self._in_flight.groups if first <= at < first + self.round_size]

    # What rounds start.

    def apply(self, rounds: MutableMapping[int, RoundClosed], through_step: int) -> None:
        """Continue after the round of `through_step`, the newest that is trained on; removes the lengths of applied
        rounds from memory."""
        for step in range(self._applied + 1, through_step + 1):
            if (closed := rounds.get(step)) is not None:
                self._apply(closed)
                rounds[step] = msgspec.structs.replace(closed, trained=())
            else:  # the journal was deleted: its queue is lost
                self._next_place = max(self._next_place, step * self._size)
        self._applied = through_step

    def _apply(self, closed: RoundClosed) -> None:
        for group in closed.trained:
            self._lengths.observe(group.prompt_id, group.prompt_tokens, group.lengths)
        places = {group.place for group in closed.trained} | {group.place for group in closed.returned}
        places |= set(closed.redrawn)
        self._long = [group for group in self._long if group.place not in places]
        self._short = [group for group in self._short if group.place not in places]
        for returned in closed.returned:
            (self._short if returned.first_in_short else self._long).append(returned)
        self._next_place = closed.next_place
        self._redrawn += len(closed.redrawn)

    @property
    def waiting(self) -> int:
        """Prompts that wait for a long round."""
        return len(self._long)

    @property
    def queued(self) -> set[int]:
        """Places of returned prompts."""
        return {group.place for group in (*self._long, *self._short)}

    def places(self) -> list[int]:
        """Places of the next round's prompts, in the order of its groups."""
        fresh = max(0, self._total + self._redrawn - self._next_place)
        returned = [group.place for group in self._short]
        if len(self._long) >= self._size or len(returned) + fresh < self._size:
            first = [group.place for group in self._long] + returned
            most = self._size
        else:
            first, most = returned, self._most
        first = first[:most]
        more = min(most - len(first), fresh)
        return [*first, *range(self._next_place, self._next_place + more)]

    def order(self, step: int, places: Sequence[int], prompts: Sequence[Prompt]) -> list[int]:
        """Ordinals of the samples in the order in which they start: those of the first B groups, then the extra ones.

        Of returned groups the samples of more than average length come first; the others follow group by group, so
        that groups end one after the other and the trainer learns meanwhile.
        """
        if not places:
            return []
        known = {group.place: group for group in (*self._long, *self._short)}
        expected = [
            [self._expected(prompt, known.get(place), index) for index in range(self._drawn)]
            for place, prompt in zip(places, prompts, strict=True)
        ]
        average, first = fmean(chain.from_iterable(expected)), self.first_position(step) * self._drawn
        keyed: list[tuple[bool, bool, float, int]] = []
        for at, of_group in enumerate(expected):
            for index, tokens in enumerate(of_group):
                early = places[at] in known and tokens > average
                rank = -tokens if early else -max(of_group)
                keyed.append((at >= self._size, not early, rank, first + at * self._drawn + index))
        return [ordinal for *_, ordinal in sorted(keyed)]

    def restarts(self, places: Sequence[int]) -> list[int]:
        """How often the samples of these prompts were started before."""
        known = {group.place: group.restarts for group in (*self._long, *self._short)}
        return [known.get(place, 0) for place in places]

    def _expected(self, prompt: Prompt, before: ReturnedGroup | None, index: int) -> float:
        """Tokens of a sample: as in an earlier round, which drew with the same noise, or at least so many."""
        seen = 0 if before is None else before.seen[index]
        if before is not None and before.ended[index]:
            return float(seen)
        siblings = [] if before is None else list(compress(before.seen, before.ended))
        tokens = count(prompt.token_ids)
        return seen + self._lengths.expected_remaining(prompt.prompt_id, tokens, seen, self._limit, siblings)

    # The current round.

    def begin(self, step: int, order: Sequence[int]) -> None:
        """Start a round, or rank its groups again from the start; samples that were set aside do not count."""
        first = self.first_position(step)
        self.schedule = NominalSchedule(self._slots, samples_per_group=self._drawn, needed=self._group)
        self._add(order)
        self.ranked.clear()  # the batch reads this list
        self.redrawn, self.undecided = [], None
        redraws = (at for at in self._in_flight.groups if first + self._most <= at < first + self.round_size)
        self._pending_redraws = sorted(redraws, reverse=True)

    def initial(self, step: int) -> list[int]:
        """Open groups of a round but for those that replaced others."""
        last = self.first_position(step) + self._most
        return [at for at in self.positions(step) if at < last]

    def next_ended(self) -> int | None:
        """The next group by rank, until it is taken or replaced; None while a running sample could change it."""
        if self.undecided is None:
            self.undecided = self.schedule.advance(self._in_flight.samples)
        return self.undecided

    def take(self) -> None:
        """The next group by rank is in the batch."""
        assert self.undecided is not None
        self.ranked.append(self.undecided)
        self.undecided = None

    def replace(self, step: int) -> tuple[int, int] | None:
        """Another group replaces the next one by rank: the (position, place) to start, or None if it is open since
        before a resume."""
        assert self.undecided is not None
        self.redrawn.append(self.undecided)
        self.undecided = None
        if self._pending_redraws:
            self.add(self._pending_redraws.pop())
            return None
        used = [self._in_flight.groups[at].place for at in self.positions(step)]
        return self.first_position(step) + self._most + len(self.redrawn) - 1, max(self._next_place, max(used) + 1)

    def add(self, position: int) -> None:
        """A group that replaces another one was started."""
        self._add(range(position * self._drawn, (position + 1) * self._drawn))

    def _add(self, ordinals: Iterable[int]) -> None:
        self.schedule.add(ordinal for ordinal in ordinals if self._in_flight.samples[ordinal].needed)

    def may_advance(self) -> bool:
        """Whether the sample for which the ranking waits has new tokens."""
        if self.undecided is not None or (waits := self.schedule.waits_for) is None:
            return False
        sample = self._in_flight.samples.get(waits[0])
        return sample is not None and sample.generated > waits[1]

    def closed(self, step: int, taken: Sequence[int]) -> RoundClosed:
        """How the round closes with these groups in its batch."""
        first, others = self.first_position(step), [at for at in self.positions(step) if at not in set(taken)]
        returned = []
        for position in others:
            if position not in self.redrawn:
                group = self._in_flight.groups[position]
                samples = self._in_flight.group(position)
                seen, ended = zip(*map(self.schedule.seen, samples), strict=True)
                restarts, extra = 1 + max(sample.restarts for sample in samples), position >= first + self._size
                returned.append(ReturnedGroup(group.place, seen, ended, extra, restarts))
        places = [self._in_flight.groups[at].place for at in self.positions(step)]
        aside = [each.ordinal for at in taken for each in self._in_flight.group(at) if not each.needed]
        return RoundClosed(
            step=step,
            positions=tuple(taken),
            trained=trained_groups(self._in_flight, taken),
            returned=tuple(returned),
            next_place=max(self._next_place, max(places) + 1),
            redrawn=tuple(self._in_flight.groups[at].place for at in self.redrawn),
            set_aside=tuple(aside),
        )
