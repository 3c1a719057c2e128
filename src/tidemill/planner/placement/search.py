"""Search for the best placement, with runners-up, reasons and warnings."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

from msgspec.structs import replace

from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, percent, size
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import (
    ASSUMED,
    DECODE_STEP,
    RUNNING,
    WEIGHTS,
    WORKSPACE_BYTES,
    steady_tokens_per_s,
    weights_read,
)
from tidemill.hardware.engine_ranks import bytes_per_engine_rank, undivided
from tidemill.hardware.figures import Derivation, Figure
from tidemill.planner.memory.states import REWARD, roles_of
from tidemill.planner.placement.estimate import (
    Engine,
    Estimate,
    Placement,
    Side,
    TooSmall,
    batch_tokens,
    engines_on,
    estimate,
)
from tidemill.planner.placement.recipe import recipe_keys
from tidemill.planner.placement.training import (
    Group,
    Offer,
    PlacementQuestion,
    TooLarge,
    Training,
    best_training,
    check,
    training_time,
)

MOST_COUNTS = 12
"""Maximum count of numbers of machines per kind; more are thinned out on a logarithmic scale."""
FEWEST_COUNTS = 2
"""The numbers 1 and all."""
MOST_COMBINATIONS = 5000
"""Above this limit of combinations of machines, fewer numbers are tried per kind; with more than ten kinds it can be
exceeded. Each combination is tried with every number of GPUs that its engines can have."""
KINDS_TOGETHER = 2
"""Maximum number of kinds of dedicated machines in one placement."""


class Candidates:
    """Generates placements; afterwards `too_large` and `too_small` have what did not fit."""

    def __init__(self, question: PlacementQuestion) -> None:
        self.too_large: list[TooLarge] = []
        self.too_small: list[TooSmall] = []
        self._question = question
        self._counts = counts_tried(question)
        self._trainings: dict[tuple[object, ...], Training | TooLarge] = {}
        self._known: dict[tuple[str, bool, float], dict[int, Engine] | TooSmall] = {}

    def __iter__(self) -> Iterator[Placement]:
        for group in groups(self._question.reserved, self._counts):
            for chosen in _choices(self._question.preemptible, self._counts):
                yield from self._placed(group, chosen, shares=True)
            for chosen in _choices(_remaining_offers(self._question.offers, group), self._counts):
                yield from self._split(group, chosen)

    def _split(self, group: Group, chosen: Sequence[Offer]) -> Iterator[Placement]:
        """Engines apart from training. Without other machines, the training machines may have several."""
        for own in counts(1 if chosen else max(1, group.all_gpus - 1), MOST_COUNTS):
            yield from self._placed(group, chosen, shares=False, own=own)

    def neighbors(self, placement: Placement) -> Iterator[Placement]:
        """Placements that differ in the number of machines of one kind by a power of two, which thinning may omit."""
        group, shares = Group(members=placement.training.group.members), bool(placement.shared.engines)
        reserved = [
            round(each.per_machine * count) for each, count in placement.dedicated.engines if each.offer.included
        ]
        own = reserved[0] if reserved else 1
        chosen = [
            replace(engine.offer, count=round(machines / engine.offer.availability))
            for engine, machines in placement.dedicated.workers
        ]
        if len(group.members) == 1:
            ((offer, count),) = group.members
            for number in _powers_of_two_away(count, offer.count):
                other = Group(members=((offer, number),))
                left = {each.description: each.count for each in _remaining_offers(self._question.offers, other)}
                if all(each.count <= left.get(each.description, 0) for each in chosen):
                    yield from self._split(other, chosen) if not shares else self._placed(other, chosen, shares=True)
        if not shares and not chosen:
            for number in _powers_of_two_away(own, max(1, group.all_gpus - 1)):
                yield from self._placed(group, chosen, shares=False, own=number)
        left = {each.description: each.count for each in _remaining_offers(self._question.offers, group)}
        for index, each in enumerate(chosen):
            for number in _powers_of_two_away(each.count, left[each.description]):
                changed = replace(each, count=number)
                yield from self._placed(group, [*chosen[:index], changed, *chosen[index + 1 :]], shares=shares)

    def _placed(self, group: Group, chosen: Sequence[Offer], *, shares: bool, own: int = 1) -> Iterator[Placement]:
        """The placement that generates on `chosen`, and on the training GPUs (`shares`) or on `own` engines
        beside them, for each number of GPUs that an engine can have.

        A trainer of several ranks shares its GPUs only as vLLM does that wakes between two steps: an engine on each
        GPU, at lag 0. Otherwise engines have GPUs of their own. All engines of a run have equally many GPUs.
        """
        several = group.all_gpus > 1
        if (shares and several and self._question.lag) or isinstance(self._training(group), TooLarge):
            return
        first = group.members[0][0]
        reserved = [] if shares or not several else [replace(first, included=True)]
        sides = [engines for offer in (*reserved, *chosen) if (engines := self._engines(offer)) is not None]
        if len(sides) < len(reserved) + len(chosen) or not (shares or sides):
            return
        apart, reward = own * len(reserved), self._reward_ranks(first) if several else 0
        sizes = [set(side) for side in sides]
        if shares:
            sizes.append({1})
        for each in sorted(set.intersection(*sizes)):
            divided = replace(group, apart=apart * each + reward)
            if divided.gpus < 1 or not _has_room(divided, own=apart, ranks=each, reward=reward):
                continue
            training = self._training(divided)
            if isinstance(training, TooLarge):
                continue
            shared = [
                (self._engines(offer, training.held_per_gpu), count * training.group.gpus / group.all_gpus)
                for offer, count in (group.members if shares else ())
            ]
            if any(engines is None or each not in engines for engines, _ in shared):
                continue
            generating = [side[each] for side in sides]
            machines = [own / engine.per_machine for engine in generating[: len(reserved)]]
            machines += [offer.count * offer.availability for offer in chosen]
            yield Placement(
                training=training,
                shared=Side(engines=tuple((engines[each], count) for engines, count in shared if engines)),
                dedicated=Side(engines=tuple(zip(generating, machines, strict=True))),
            )

    def _reward_ranks(self, offer: Offer) -> int:
        """GPUs of a reward model on an actor; 0 without one."""
        if REWARD not in roles_of(self._question.algorithm):
            return 0
        usable = ASSUMED.memory * offer.gpu.memory_bytes - WORKSPACE_BYTES
        shape, every = self._question.shape, range(1, offer.machine.gpus + 1)
        fit = (ranks for ranks in every if bytes_per_engine_rank(shape, ranks) <= usable)
        return next((ranks for ranks in fit if not undivided(shape, ranks)), offer.machine.gpus)

    def _training(self, group: Group) -> Training | TooLarge:
        key = (group.apart, *((offer.name, count) for offer, count in group.members))
        if key not in self._trainings:
            found = best_training(self._question, group)
            self._trainings[key] = found
            if isinstance(found, TooLarge):
                self.too_large.append(found)
        return self._trainings[key]

    def _engines(self, offer: Offer, held_per_gpu: float = 0.0) -> dict[int, Engine] | None:
        """Engines by their GPUs; None if none fits. With training states only one on each GPU is possible."""
        key = (offer.name, offer.preemptible, held_per_gpu)
        if key not in self._known:
            found = engines_on(self._question, offer, held_per_gpu=held_per_gpu)
            self._known[key] = found
            if isinstance(found, TooSmall):
                self.too_small.append(found)
        known = self._known[key]
        if isinstance(known, TooSmall):
            return None
        return {gpus: replace(engine, offer=offer) for gpus, engine in known.items()}


def _has_room(group: Group, *, own: int, ranks: int, reward: int) -> bool:
    """Whether the machines of one kind hold every engine and reward model whole, beside the ranks of the trainer."""
    if len(group.members) > 1:
        return own <= 1
    ((offer, machines),) = group.members
    size = offer.machine.gpus
    full, begun = divmod(group.gpus, size)
    left, whole = (size - begun) * (begun > 0), machines - full - (begun > 0)
    if reward and left >= reward:
        left -= reward
    elif reward:
        return own <= left // ranks + (size - reward) // ranks + (whole - 1) * (size // ranks) if whole else False
    return own <= left // ranks + whole * (size // ranks)


def counts_tried(question: PlacementQuestion) -> int:
    """Count of numbers of machines to try per kind, so that there are not too many placements."""
    for most in range(MOST_COUNTS, FEWEST_COUNTS, -1):
        numbers = [len(counts(offer.count, most)) for offer in question.offers]
        sides = sum(prod(chosen) for kinds in range(KINDS_TOGETHER + 1) for chosen in combinations(numbers, kinds))
        if sum(len(counts(offer.count, most)) for offer in question.reserved) * sides <= MOST_COMBINATIONS:
            return most
    return FEWEST_COUNTS


def _choices(offers: Sequence[Offer], most: int) -> Iterator[tuple[Offer, ...]]:
    """Every combination of a few kinds and numbers of machines, starting with none."""
    for kinds in range(KINDS_TOGETHER + 1):
        for chosen in combinations(offers, kinds):
            for numbers in product(*(counts(offer.count, most) for offer in chosen)):
                yield tuple(replace(offer, count=number) for offer, number in zip(chosen, numbers, strict=True))


def groups(reserved: Sequence[Offer], most: int) -> Iterator[Group]:
    """Groups of one kind of machine, and as a last resort one of all machines, if they have the same GPU."""
    for offer in reserved:
        for count in counts(offer.count, most):
            yield Group(members=((offer, count),))
    if len(reserved) > 1 and len({offer.gpu.name for offer in reserved}) == 1:
        yield Group(members=tuple((offer, offer.count) for offer in reserved))


def counts(available: int, most: int) -> list[int]:
    """1 to `available`, thinned out to `most` numbers; always includes 1 and `available`."""
    if available <= most:
        return list(range(1, available + 1))
    return sorted({round(available ** (part / (most - 1))) for part in range(most)})


def _powers_of_two_away(count: int, most: int) -> list[int]:
    """Numbers from 1 to `most` that differ by a power of two."""
    steps = [2**power for power in range(count.bit_length())]
    return [number for step in steps for number in (count - step, count + step) if 1 <= number <= most]


def _remaining_offers(offers: Sequence[Offer], group: Group) -> list[Offer]:
    """The offers without the machines of the group."""
    taken = {offer.name: count for offer, count in group.members}
    left = [
        replace(offer, count=offer.count - (0 if offer.preemptible else taken.get(offer.name, 0))) for offer in offers
    ]
    return [offer for offer in left if offer.count]


NOTABLE = 0.02
"""Differences below this fraction are not mentioned."""


def comparison(question: PlacementQuestion, best: Estimate, other: Estimate) -> str:
    """The disadvantage of a runner-up and its main cause."""
    dearer, slower = other.usd_per_million / best.usd_per_million - 1, other.step_s / best.step_s - 1
    first = _change_in_words(dearer, "dearer", "as dear", "cheaper")
    second = _change_in_words(slower, "slower", "as fast", "faster")
    said = f"{first}, {second}" if question.objective == "cost" else f"{second}, {first}"
    return f"{other.placement.description}: {said}" + (f"; {reason}" if (reason := _reason(best, other)) else "")


def _change_in_words(change: float, more: str, equal: str, less: str) -> str:
    return equal if abs(change) < NOTABLE else f"{percent(abs(change))} {more if change > 0 else less}"


def _reason(best: Estimate, other: Estimate) -> str:
    """The main cause of the other placement's higher time or cost."""
    shares = {
        "its trainer waits {} of the time": (other.trainer_idle, best.trainer_idle),
        "its dedicated machines wait {} of the time": (other.dedicated_idle, best.dedicated_idle),
        "new weights delay {} of the step": (other.exposed_pull_s / other.step_s, best.exposed_pull_s / best.step_s),
    }
    words, (share, best_share) = max(shares.items(), key=lambda item: item[1][0] - item[1][1])
    if share - best_share > NOTABLE:
        return words.format(percent(share))
    if other.training_s > best.training_s * (1 + NOTABLE):
        return f"training takes {other.training_s / best.training_s:.1f} times as long"
    return "its machines cost more for the same work" if other.usd_per_million > best.usd_per_million else ""


WEAK_LINK = 100e9
"""Bytes per second and direction, below which tensor parallelism is slow: PCIe is below, NVLink above."""
NOTABLE_PULL = 0.1
NOTABLE_GATHERING = 0.2
NOTABLE_IDLE = 0.25


def warnings_on(question: PlacementQuestion, best: Estimate) -> Iterator[str]:
    """Warnings, most important first."""
    placement = best.placement
    for engine, _ in (*placement.shared.engines, *placement.dedicated.engines):
        yield from _partitioned(question, engine)
    yield from _group(question, best)
    if question.engine_dtype != "bf16":
        yield f"Tidemill does not run engines in {question.engine_dtype}: the placement is for other frameworks"
    if question.holding.optimizer != "adam":
        yield f"Tidemill does not run the optimizer {question.holding.optimizer}: the placement is for other frameworks"
    if best.exposed_pull_s > NOTABLE_PULL * best.step_s:
        yield (
            f"sending weights delays {percent(best.exposed_pull_s / best.step_s)} of a step; deltas are much smaller "
            "(tidemill plan weights), and at lag 1 training hides it"
        )
    if best.trainer_idle > NOTABLE_IDLE:
        waits = percent(best.trainer_idle)
        lag = "" if question.lag else ", or allow a lag"
        yield f"the trainer waits {waits} of the time; add generating machines{lag}"
    if best.dedicated_idle > NOTABLE_IDLE:
        why = "take fewer" if question.lag else "at lag 0 they wait for the trainer"
        yield f"dedicated machines wait {percent(best.dedicated_idle)} of the time: {why}"
    used = [offer for offer, _ in placement.training.group.members]
    used += [engine.offer for engine, _ in placement.dedicated.engines]
    for offer in {offer.name: offer for offer in used}.values():
        if "check" in offer.machine.price_source:
            yield f"price of {offer.name}: {offer.machine.price_source} ({offer.machine.priced})"
    if any(offer.preemptible for offer in used):
        yield "evictions only reduce the mean number of machines here; `tidemill simulate` includes their other costs"


def _partitioned(question: PlacementQuestion, engine: Engine) -> Iterator[str]:
    offer = engine.offer
    if engine.gpus > engine.fewest_gpus:
        alone = steady_tokens_per_s(engine.smallest, question.rollout) / engine.fewest_gpus
        each = steady_tokens_per_s(engine.profile, question.rollout) / engine.gpus
        text = f"engines on {offer.name} are partitioned over {engine.gpus} GPUs, {engine.fewest_gpus} would be enough"
        if each < alone:
            text += f": {percent(1 - each / alone)} fewer tokens per GPU with full slots"
        yield f"{text}; they still finish their part of a batch first"
    if engine.gpus > 1 and offer.gpu.link_bytes_per_s < WEAK_LINK:
        yield (
            f"engines on {offer.name} exchange every layer's results over {offer.gpu.interconnect} "
            f"({offer.gpu.link_bytes_per_s / 1e9:.0f} GB/s): slow for tensor parallelism over {engine.gpus} GPUs"
        )


def _group(question: PlacementQuestion, best: Estimate) -> Iterator[str]:
    training = best.placement.training
    profile = training.profile
    share = profile.gather_s / (question.microbatch_tokens * profile.ranks * profile.token_s)
    if share > NOTABLE_GATHERING:
        yield (
            f"gathering sharded layers takes {percent(share)} of the compute time of a pass; a larger microbatch "
            "hides more of it"
        )


ROOFLINE = "roofline, Williams et al. 2009: the longer of memory traffic and arithmetic"


def derive(question: PlacementQuestion, placement: Placement) -> Derivation:
    """The figures of a placement, from the work of a batch to its cost."""
    sheet, training = Derivation(), placement.training
    batch_tokens(question, sheet)
    training_time(question, training.group, sheet)
    for name, side in (("shared", placement.shared), ("dedicated", placement.dedicated)):
        for engine, machines in side.engines:
            _derive_engine(question, engine, machines, f"{name}.{engine.offer.description}", sheet)
    estimate(question, placement, sheet)
    return sheet


def _derive_engine(question: PlacementQuestion, engine: Engine, machines: float, label: str, sheet: Derivation) -> None:
    """The number of engines, and the time of a decoding step with full slots."""
    gpu, profile, rollout = engine.offer.gpu, engine.profile, question.rollout
    efficiency = question.efficiencies_on(gpu).engine
    sheet.compute(
        f"{label}.engines",
        "engines",
        formula="machines * gpus_per_machine / gpus",
        source="whole engines on each machine",
        machines=machines,
        gpus_per_machine=engine.per_machine * engine.gpus,
        gpus=engine.gpus,
    )
    sheet.compute(
        f"{label}.weights_s",
        "s",
        formula=WEIGHTS,
        source=f"every decoding step reads the weights; {gpu.source}; the efficiency is {efficiency.source}",
        **weights_read(question.shape, gpu, gpus=engine.gpus, dtype=question.engine_dtype, efficiency=efficiency),
    )
    running = sheet.compute(
        f"{label}.running",
        "samples",
        formula=RUNNING,
        source="limited by the slots and by the memory for keys and values",
        **profile.capacity(rollout.prompt_tokens + rollout.mean),
    )
    sheet.compute(
        f"{label}.decode_step_s",
        "s",
        formula=DECODE_STEP,
        source=f"{ROOFLINE}, with full slots; efficiencies and overhead are {efficiency.source}",
        **profile.decoding(running, running * rollout.running_context),
    )


RUNNERS_UP = 4


class PlacementPlan(Record):
    best: Estimate
    runners_up: tuple[Estimate, ...]  # the best ones of other kinds or machines, best first
    why: tuple[str, ...]  # for each runner-up its disadvantage
    warnings: tuple[str, ...]
    tried: int
    figures: tuple[Figure, ...]  # of the best placement
    keys: dict[str, Any]  # of a recipe that has the best placement


def plan_placement(question: PlacementQuestion) -> PlacementPlan:
    """Search for the best placement.

    Raises:
        UserError: an option is invalid, nothing fits (with the missing memory), or the budget is too small.
    """
    check(question)
    candidates = Candidates(question)
    found = {_placement_key(placement): estimate(question, placement) for placement in candidates}
    if not found:
        raise _no_placement_error(candidates)
    ranked = _ranked(question, list(found.values()))
    while beside := _unseen_neighbors(candidates, _distinct(ranked)[: 1 + RUNNERS_UP], found):
        found |= {numbers: estimate(question, placement) for numbers, placement in beside.items()}
        ranked = _ranked(question, list(found.values()))
    return _plan(question, ranked[0], _distinct(ranked)[1 : 1 + RUNNERS_UP], tried=len(found))


def plan_of(question: PlacementQuestion, placement: Placement) -> PlacementPlan:
    """The plan with a placement that is given.

    Raises:
        UserError: an option is invalid or missing.
    """
    check(question)
    return _plan(question, estimate(question, placement), (), tried=1)


def _plan(question: PlacementQuestion, best: Estimate, others: Sequence[Estimate], *, tried: int) -> PlacementPlan:
    return PlacementPlan(
        best=best,
        runners_up=tuple(others),
        why=tuple(comparison(question, best, other) for other in others),
        warnings=tuple(warnings_on(question, best)),
        tried=tried,
        figures=tuple(derive(question, best.placement).figures),
        keys=recipe_keys(question, best.placement),
    )


def _placement_key(placement: Placement) -> tuple[object, ...]:
    """The identity of a placement."""
    trained = tuple((offer.name, count) for offer, count in placement.training.group.members)
    engines = placement.dedicated.engines
    generating = tuple((engine.offer.description, engine.gpus, machines) for engine, machines in engines)
    return placement.kind, trained, generating


def _unseen_neighbors(
    candidates: Candidates, leaders: Sequence[Estimate], seen: Container[tuple[object, ...]]
) -> dict[tuple[object, ...], Placement]:
    """Placements close to the leaders that were not tried, because thinned-out numbers rarely include the best."""
    close = (placement for leader in leaders for placement in candidates.neighbors(leader.placement))
    return {numbers: placement for placement in close if (numbers := _placement_key(placement)) not in seen}


def _ranked(question: PlacementQuestion, found: Sequence[Estimate]) -> list[Estimate]:
    """Best first; equal ones by the number of machines, then the simpler kind."""

    def machines(each: Estimate) -> tuple[float, bool]:
        placement = each.placement
        return placement.training.group.gpus + placement.dedicated.machines, placement.kind == "hybrid"

    if question.objective == "cost":
        affordable = [each for each in found if question.budget_usd is None or each.usd <= question.budget_usd]
        ranked = sorted(affordable, key=lambda each: (each.usd_per_million, machines(each)))
    else:
        affordable = [each for each in found if each.usd <= (question.budget_usd or 0.0)]
        ranked = sorted(affordable, key=lambda each: (each.step_s, each.usd_per_million, machines(each)))
    if not ranked:
        cheapest = min(found, key=lambda each: each.usd)
        lacking = cheapest.usd - (question.budget_usd or 0.0)
        what = f"no placement trains {counted(question.steps, 'step')} for ${question.budget_usd:,.2f}"
        hint = f"the cheapest, {cheapest.placement.description}, costs ${cheapest.usd:,.2f}: ${lacking:,.2f} more"
        raise UserError(what, where="--budget-usd", hint=hint)
    return ranked


def _distinct(ranked: Sequence[Estimate]) -> list[Estimate]:
    """The best of each kind of placement and set of machines, because close neighbours are not informative."""
    seen: dict[tuple[object, ...], Estimate] = {}
    for each in ranked:
        placement = each.placement
        names = tuple(engine.offer.name for engine, _ in placement.dedicated.engines)
        trained = tuple(offer.name for offer, _ in placement.training.group.members)
        seen.setdefault((placement.kind, trained, names), each)
    return list(seen.values())


def _no_placement_error(candidates: Candidates) -> UserError:
    """The missing memory of the closest group or machine. Engines are only tried where training fits."""
    if candidates.too_small:
        nearest = min(candidates.too_small, key=lambda each: (each.missing_alone, each.missing_bytes))
        lacks = f"one {nearest.offer.name} lacks {size(nearest.missing_bytes)} for weights and the longest sample"
        if nearest.missing_alone:
            what = f"no machine holds an engine: {lacks}"
            hint = "take machines with more memory, --engine-dtype fp8, or a shorter --limit"
        else:
            what = f"no machine holds an engine in addition to its part of the training states: {lacks}"
            hint = "take more machines, --offload, or --engine-dtype fp8"
        return UserError(what, where="--machines", hint=hint)
    closest = min(candidates.too_large, key=lambda each: each.missing_per_gpu)
    lacking = size(closest.missing_per_gpu)
    what = f"the model fits no placement: {closest.group.description}, the closest, lack {lacking} on each GPU"
    more = "no number of these GPUs is enough; take a smaller microbatch or larger GPUs"
    if closest.needs_gpus is not None:
        more = f"it needs about {closest.needs_gpus} of these GPUs; or --offload, --lora-rank"
    return UserError(what, where="--machines", hint=f"{more}; `tidemill plan memory` lists the parts")
