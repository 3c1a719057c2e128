"""The figures of one placement, each with its formula: the step, idle shares, and money."""

from __future__ import annotations

from tidemill.planner.figures import Sheet
from tidemill.planner.placement.derived_generation import derive_generation, derive_pull
from tidemill.planner.placement.derived_training import derive_training
from tidemill.planner.placement.estimate import SECONDS_PER_HOUR, Estimate, streaming
from tidemill.planner.placement.question import PlacementQuestion


def derive(question: PlacementQuestion, found: Estimate) -> Sheet:
    """From what is computed and generated to what it costs."""
    sheet = Sheet()
    sheet.note(
        "tokens",
        found.tokens,
        "tokens",
        formula="samples * mean",
        source="completion tokens of a batch; the mean is of the lengths given",
        samples=question.rollout.samples,
        mean=question.rollout.mean,
    )
    derive_training(question, found.placement.training, sheet)
    derive_generation(question, found, sheet)
    derive_pull(question, found, sheet)
    if question.lag:
        _with_lag(question, found, sheet)
    else:
        _on_policy(question, found, sheet)
    _idle(found, sheet)
    _money(question, found, sheet)
    return sheet


def _on_policy(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    first, last = streaming(question)
    sheet.note(
        "seeding_s",
        found.seeding_s,
        "s",
        formula="max(0, (tokens - dedicated * (1 - last) * training_s) / (shared + dedicated))"
        if found.shared_rate
        else "0",
        source="RLBoost's seeding window, arXiv 2510.19225, where neither side waits; none without a shared side",
        tokens=found.tokens,
        shared=found.shared_rate,
        dedicated=found.dedicated_rate,
        last=last,
        training_s=found.training_s,
    )
    sheet.note(
        "generation_s",
        found.generation_s,
        "s",
        formula="max((tokens - shared * seeding_s) / dedicated, longest_s)" if found.dedicated_rate else "seeding_s",
        source="what is left is the dedicated side's, and no batch is done before its longest sample",
        tokens=found.tokens,
        shared=found.shared_rate,
        seeding_s=found.seeding_s,
        dedicated=found.dedicated_rate,
        longest_s=found.longest_s,
    )
    sheet.note(
        "step_s",
        found.step_s,
        "s",
        formula="max(max(seeding_s, first * generation_s) + training_s, generation_s + last * training_s) + pull_s",
        source="lag 0: learning goes on while the last samples are generated, if advantages let it; shares assumed",
        seeding_s=found.seeding_s,
        first=first,
        generation_s=found.generation_s,
        training_s=found.training_s,
        last=last,
        pull_s=found.exposed_pull_s,
    )


def _with_lag(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    sheet.note(
        "step_s",
        found.step_s,
        "s",
        formula="max((tokens + shared * learn) / (shared + dedicated), learn, longest_s / (lag + 1)) + pull",
        source="lag 1 or more: both sides at work all the while; the longest sample has lag + 1 steps",
        tokens=found.tokens,
        shared=found.shared_rate,
        learn=found.training_s,
        dedicated=found.dedicated_rate,
        longest_s=found.longest_s,
        lag=question.lag,
        pull=found.exposed_pull_s,
    )


def _idle(found: Estimate, sheet: Sheet) -> None:
    sheet.note(
        "trainer_idle_share",
        found.trainer_idle,
        "of a step",
        formula="max(0, 1 - (training_s + seeding_s) / step_s)",
        source="what the training GPUs neither learn nor generate",
        training_s=found.training_s,
        seeding_s=found.seeding_s,
        step_s=found.step_s,
    )


def _money(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    placement = found.placement
    used = [offer for offer, _ in placement.training.group.members]
    used += [engine.offer for engine, _ in placement.dedicated.engines]
    sheet.note(
        "usd_per_hour",
        placement.usd_per_hour,
        "USD",
        formula="training + generating",
        source="; ".join(dict.fromkeys(f"{offer.name}: {offer.machine.price_source}" for offer in used)),
        training=placement.training.group.usd_per_hour,
        generating=placement.dedicated.usd_per_hour,
    )
    sheet.note(
        "usd_per_million_tokens",
        found.usd_per_million,
        "USD",
        formula="usd_per_hour * step_s / seconds_per_hour / tokens * million",
        source="completion tokens trained",
        usd_per_hour=placement.usd_per_hour,
        step_s=found.step_s,
        seconds_per_hour=SECONDS_PER_HOUR,
        tokens=found.tokens,
        million=1e6,
    )
    sheet.note(
        "hours",
        found.hours,
        "h",
        formula="steps * step_s / seconds_per_hour",
        source="every step alike",
        steps=question.steps,
        step_s=found.step_s,
        seconds_per_hour=SECONDS_PER_HOUR,
    )
    sheet.note(
        "cost_usd",
        found.usd,
        "USD",
        formula="usd_per_hour * hours",
        source="of all steps",
        usd_per_hour=placement.usd_per_hour,
        hours=found.hours,
    )
