"""The best placement, its runners-up, and why it is the best."""

from __future__ import annotations

from collections.abc import Container, Sequence

from tidemill.config.words import counted
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.planner.figures import Figure
from tidemill.planner.placement.candidates import Candidates, Refused
from tidemill.planner.placement.derivation import derive
from tidemill.planner.placement.estimate import Estimate, Placement, estimate
from tidemill.planner.placement.question import PlacementQuestion, check
from tidemill.planner.placement.warnings import warnings_on
from tidemill.planner.placement.why import comparison
from tidemill.planner.words import size

RUNNERS_UP = 4


class PlacementPlan(Record):
    best: Estimate
    runners_up: tuple[Estimate, ...]  # the best of other kinds or machines, best first
    why: tuple[str, ...]  # a line a runner-up: what it loses
    warnings: tuple[str, ...]
    tried: int
    figures: tuple[Figure, ...]  # of the best


def plan_placement(question: PlacementQuestion) -> PlacementPlan:
    """Raises UserError: what cannot be asked, what fits nowhere (by how much), what no budget pays for."""
    check(question)
    candidates = Candidates(question)
    found = {_numbers(placement): estimate(question, placement) for placement in candidates}
    if not found:
        raise _nowhere(candidates.refused)
    ranked = _ranked(question, list(found.values()))
    while beside := _unseen(candidates, _distinct(ranked)[: 1 + RUNNERS_UP], found):
        found |= {numbers: estimate(question, placement) for numbers, placement in beside.items()}
        ranked = _ranked(question, list(found.values()))
    best, others = ranked[0], _distinct(ranked)[1 : 1 + RUNNERS_UP]
    return PlacementPlan(
        best=best,
        runners_up=tuple(others),
        why=tuple(comparison(question, best, other) for other in others),
        warnings=tuple(warnings_on(question, best)),
        tried=len(found),
        figures=tuple(derive(question, best).figures),
    )


def _numbers(placement: Placement) -> tuple[object, ...]:
    """What no other placement has."""
    trained = tuple((offer.name, count) for offer, count in placement.training.group.members)
    generating = tuple((engine.offer.words, machines) for engine, machines in placement.dedicated.engines)
    return placement.kind, trained, generating


def _unseen(
    candidates: Candidates, leaders: Sequence[Estimate], seen: Container[tuple[object, ...]]
) -> dict[tuple[object, ...], Placement]:
    """What is close to the leaders and was not looked at: thinned out numbers seldom have the best one."""
    close = (placement for leader in leaders for placement in candidates.beside(leader.placement))
    return {numbers: placement for placement in close if (numbers := _numbers(placement)) not in seen}


def _ranked(question: PlacementQuestion, found: Sequence[Estimate]) -> list[Estimate]:
    """Best first; of equals the one with fewer machines, and that does fewer things with them."""

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
        what = f"no placement does {counted(question.steps, 'step')} for ${question.budget_usd:,.2f}"
        cure = f"the cheapest, {cheapest.placement.words}, costs ${cheapest.usd:,.2f}: ${lacking:,.2f} more"
        raise UserError(what, where="--budget-usd", cure=cure)
    return ranked


def _distinct(ranked: Sequence[Estimate]) -> list[Estimate]:
    """The best of each way and each set of kinds of machines: neighbours that differ in a number say little."""
    seen: dict[tuple[object, ...], Estimate] = {}
    for each in ranked:
        placement = each.placement
        names = tuple(engine.offer.name for engine, _ in placement.dedicated.engines)
        trained = tuple(offer.name for offer, _ in placement.training.group.members)
        seen.setdefault((placement.kind, trained, names), each)
    return list(seen.values())


def _nowhere(refused: Refused) -> UserError:
    """By how much the closest group, or machine, is too small. Engines are looked for only where training fits."""
    if refused.engines:
        nearest = min(refused.engines, key=lambda each: (each.missing_alone, each.missing_bytes))
        lacks = f"one {nearest.offer.name} lacks {size(nearest.missing_bytes)} for weights and the longest sample"
        if nearest.missing_alone:
            what = f"no machine holds an engine: {lacks}"
            cure = "take machines with more memory, --engine-dtype fp8, or a shorter --limit"
        else:
            what = f"no machine holds an engine beside its part of the training states: {lacks}"
            cure = "take more machines, --offload, or --engine-dtype fp8"
        return UserError(what, where="--machines", cure=cure)
    closest = min(refused.training, key=lambda each: each.missing_per_gpu)
    lacking = size(closest.missing_per_gpu)
    what = f"the model fits no placement: {closest.group.words} lack {lacking} on each GPU, and are the closest"
    more = "no number of these GPUs is enough; take a smaller microbatch or larger GPUs"
    if closest.needs_gpus is not None:
        more = f"it needs about {closest.needs_gpus} of these GPUs; or --offload, --lora-rank"
    return UserError(what, where="--machines", cure=f"{more}; `tidemill plan memory` says what takes the room")
