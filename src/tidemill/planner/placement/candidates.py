"""Every placement worth a look: who trains, who else generates, and on how many preemptible machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import prod

import msgspec

from tidemill.core.records import Record
from tidemill.planner.placement.engines import Engine, Side, TooSmall, best_engine
from tidemill.planner.placement.estimate import Placement
from tidemill.planner.placement.question import Offer, PlacementQuestion
from tidemill.planner.placement.training import Group, TooLarge, Training, best_training

MOST_COUNTS = 12
"""Numbers of machines of one kind that are tried; of more, they are spread evenly on a logarithmic scale."""
FEWEST_COUNTS = 2
"""One and all that are available."""
MOST_PLACEMENTS = 5000
"""With more, fewer numbers of machines of each kind are tried; of more than ten kinds there are more all the same."""
KINDS_TOGETHER = 2
"""Kinds of machines, at most, that generate beside the training ones."""


class Refused(Record):
    """What holds no part of the run."""

    training: list[TooLarge] = []
    engines: list[TooSmall] = []


class Candidates:
    """Generates placements; what did not fit is in `refused` afterwards."""

    def __init__(self, question: PlacementQuestion) -> None:
        self.refused = Refused(training=[], engines=[])
        self._question = question
        self._counts = counts_tried(question)
        self._trainings: dict[tuple[tuple[str, int], ...], Training | TooLarge] = {}
        self._known: dict[tuple[str, bool, float, float], Engine | TooSmall] = {}

    def __iter__(self) -> Iterator[Placement]:
        for group in groups(self._question.reserved, self._counts):
            for chosen in _choices(self._question.preemptible, self._counts):
                yield from self._placed(group, chosen, shares=True)
            for chosen in _choices(_left(self._question.offers, group), self._counts):
                if chosen:
                    yield from self._placed(group, chosen, shares=False)

    def beside(self, placement: Placement) -> Iterator[Placement]:
        """Those with another number of machines of one kind, by a power of two: what thinned out numbers leave out."""
        group, shares = placement.training.group, bool(placement.shared.engines)
        chosen = [
            msgspec.structs.replace(engine.offer, count=round(machines / engine.offer.availability))
            for engine, machines in placement.dedicated.engines
        ]
        if len(group.members) == 1:
            ((offer, count),) = group.members
            for number in _near(count, offer.count):
                other = Group(members=((offer, number),))
                left = {each.words: each.count for each in _left(self._question.offers, other)}
                if all(each.count <= left.get(each.words, 0) for each in chosen):
                    yield from self._placed(other, chosen, shares=shares)
        left = {each.words: each.count for each in _left(self._question.offers, group)}
        for index, each in enumerate(chosen):
            for number in _near(each.count, left[each.words]):
                changed = msgspec.structs.replace(each, count=number)
                yield from self._placed(group, [*chosen[:index], changed, *chosen[index + 1 :]], shares=shares)

    def _placed(self, group: Group, chosen: Sequence[Offer], *, shares: bool) -> Iterator[Placement]:
        """The placement in which `chosen` generate, with the training GPUs or without; none if something fits not."""
        training = self._training(group)
        if isinstance(training, TooLarge):
            return
        own = training.group.members if shares else ()
        generating = [offer.machine.gpus * float(count) for offer, count in own]
        generating += [offer.machine.gpus * offer.count * offer.availability for offer in chosen]
        samples = self._question.rollout.samples / sum(generating)
        shared = [(self._engine(offer, samples, training.held_per_gpu), float(count)) for offer, count in own]
        dedicated = [(self._engine(offer, samples), offer.count * offer.availability) for offer in chosen]
        sides = [
            tuple((engine, machines) for engine, machines in side if isinstance(engine, Engine))
            for side in (shared, dedicated)
        ]
        if len(sides[0]) == len(shared) and len(sides[1]) == len(dedicated):
            yield Placement(training=training, shared=Side(engines=sides[0]), dedicated=Side(engines=sides[1]))

    def _training(self, group: Group) -> Training | TooLarge:
        key = tuple((offer.name, count) for offer, count in group.members)
        if key not in self._trainings:
            found = best_training(self._question, group)
            self._trainings[key] = found
            if isinstance(found, TooLarge):
                self.refused.training.append(found)
        return self._trainings[key]

    def _engine(self, offer: Offer, samples_per_gpu: float, held_per_gpu: float = 0.0) -> Engine | TooSmall:
        key = (offer.name, offer.preemptible, samples_per_gpu, held_per_gpu)
        if key not in self._known:
            found = best_engine(self._question, offer, samples_per_gpu=samples_per_gpu, held_per_gpu=held_per_gpu)
            self._known[key] = found
            if isinstance(found, TooSmall):
                self.refused.engines.append(found)
        return self._known[key]


def counts_tried(question: PlacementQuestion) -> int:
    """Numbers of machines of each kind for which there are not too many placements."""
    most = MOST_COUNTS
    while most > FEWEST_COUNTS and _placements(question, most) > MOST_PLACEMENTS:
        most -= 1
    return most


def _placements(question: PlacementQuestion, most: int) -> int:
    """How many there are, or somewhat more."""
    numbers = [len(counts(offer.count, most)) for offer in question.offers]
    sides = sum(prod(chosen) for kinds in range(KINDS_TOGETHER + 1) for chosen in combinations(numbers, kinds))
    return sum(len(counts(offer.count, most)) for offer in question.reserved) * sides


def _choices(offers: Sequence[Offer], most: int) -> Iterator[tuple[Offer, ...]]:
    """Every choice of a few kinds and of numbers of machines of them; the first is none."""
    for kinds in range(KINDS_TOGETHER + 1):
        for chosen in combinations(offers, kinds):
            for numbers in product(*(counts(offer.count, most) for offer in chosen)):
                yield tuple(
                    msgspec.structs.replace(offer, count=number) for offer, number in zip(chosen, numbers, strict=True)
                )


def groups(reserved: Sequence[Offer], most: int) -> Iterator[Group]:
    """Some machines of one kind; and all of all kinds, as a warning example or a last resort."""
    for offer in reserved:
        for count in counts(offer.count, most):
            yield Group(members=((offer, count),))
    if len(reserved) > 1:
        yield Group(members=tuple((offer, offer.count) for offer in reserved))


def counts(available: int, most: int) -> list[int]:
    """1 to `available`, thinned out to `most` numbers; one and all that are available are always among them."""
    if available <= most:
        return list(range(1, available + 1))
    return sorted({round(available ** (part / (most - 1))) for part in range(most)})


def _near(count: int, most: int) -> list[int]:
    """Numbers from 1 to `most` that are a power of two away."""
    steps = [2**power for power in range(count.bit_length())]
    return [number for step in steps for number in (count - step, count + step) if 1 <= number <= most]


def _left(offers: Sequence[Offer], group: Group) -> list[Offer]:
    """What the group leaves, with the numbers that are left."""
    taken = {offer.name: count for offer, count in group.members}
    left = [
        msgspec.structs.replace(offer, count=offer.count - (0 if offer.preemptible else taken.get(offer.name, 0)))
        for offer in offers
    ]
    return [offer for offer in left if offer.count]
