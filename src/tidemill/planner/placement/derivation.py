"""The figures of one placement, each with its formula."""

from __future__ import annotations

from tidemill.planner.figures import Sheet
from tidemill.planner.placement.estimate import FIRST, LAST, SECONDS_PER_HOUR, Estimate
from tidemill.planner.placement.question import PlacementQuestion
from tidemill.sim.profiles.precision import DTYPE_BYTES


def derive(question: PlacementQuestion, found: Estimate) -> Sheet:
    """What the plan's numbers are made of; the sides' rates are a roofline's and stand by themselves."""
    sheet = Sheet()
    _learning(question, found, sheet)
    _generating(question, found, sheet)
    placement = found.placement
    _step(question, found, sheet)
    sheet.note(
        "usd_per_hour",
        placement.usd_per_hour,
        "USD",
        formula="training + generating",
        source="; ".join(dict.fromkeys(offer.machine.price_source for offer in question.offers)),
        training=placement.training.group.usd_per_hour,
        generating=placement.dedicated.usd_per_hour,
    )
    sheet.note(
        "usd_per_million_tokens",
        found.usd_per_million,
        "USD",
        formula="usd_per_hour * step_s / 3600 / tokens * 1000000",
        source="completion tokens trained",
        usd_per_hour=placement.usd_per_hour,
        step_s=found.step_s,
        tokens=found.tokens,
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
    return sheet


def _step(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    if question.lag:
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
        return
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
        last=LAST,
        training_s=found.training_s,
    )
    sheet.note(
        "step_s",
        found.step_s,
        "s",
        formula="max(max(seeding_s, first * generation_s) + training_s, generation_s + last * training_s) + pull_s",
        source="lag 0: learning goes on while the last samples are generated; first and last shares assumed",
        seeding_s=found.seeding_s,
        first=FIRST,
        generation_s=found.generation_s,
        training_s=found.training_s,
        last=LAST,
        pull_s=found.exposed_pull_s,
    )


def _learning(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    profile, rollout = found.placement.training.profile, question.rollout
    sheet.note(
        "tokens",
        found.tokens,
        "tokens",
        formula="samples * mean",
        source="completion tokens of a batch",
        samples=rollout.samples,
        mean=rollout.mean,
    )
    gpu = found.placement.training.group.weakest
    sheet.note(
        "forward_token_s",
        profile.token_s,
        "s",
        formula="2 * active_parameters / (gpus * peak_flops * efficiency)",
        source=f"arXiv 2001.08361; {gpu.source}; the efficiency is assumed",
        active_parameters=question.shape.active_parameters,
        gpus=profile.gpus,
        peak_flops=gpu.peak_flops("bf16"),
        efficiency=question.trainer.compute,
    )


def _generating(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    for name, side in (("shared", found.placement.shared), ("dedicated", found.placement.dedicated)):
        for engine, machines in side.engines:
            gpu = engine.offer.gpu
            label = f"{name}.{engine.offer.name}"
            read = question.shape.parameters - question.shape.expert_parameters - question.shape.embedding_parameters
            sheet.note(
                f"{label}.weights_s",
                engine.profile.weights_s,
                "s",
                formula="parameters_read * 2 / (gpus * bandwidth * efficiency)",
                source=f"every decoding step reads the weights; {gpu.source}; the efficiency is assumed",
                parameters_read=read,
                gpus=engine.gpus,
                bandwidth=gpu.bandwidth_bytes_per_s,
                efficiency=question.engine.bandwidth,
            )
            sheet.note(
                f"{label}.engines",
                machines * engine.per_machine,
                "engines",
                formula="machines * gpus_per_machine / gpus",
                source="whole engines on each machine",
                machines=machines,
                gpus_per_machine=engine.per_machine * engine.gpus,
                gpus=engine.gpus,
            )
    if found.pull_s:
        sheet.note(
            "weights_bytes",
            question.shape.parameters * DTYPE_BYTES["bf16"],
            "bytes",
            formula="parameters * 2",
            source="a full version, pulled by every machine that only generates",
            parameters=question.shape.parameters,
        )
