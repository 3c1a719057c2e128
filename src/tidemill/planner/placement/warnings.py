"""What measurements say hurts, where the chosen placement does it."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.planner.placement.engines import Engine
from tidemill.planner.placement.estimate import Estimate
from tidemill.planner.placement.question import PlacementQuestion
from tidemill.sim.profiles.generation import steady_tokens_per_s
from tidemill.telemetry.numerals import percent

WEAK_LINK = 100e9
"""Bytes per second and direction below which tensor parallelism loses much: PCIe is below, NVLink above."""
NOTABLE_PULL = 0.1
NOTABLE_GATHERING = 0.2
NOTABLE_IDLE = 0.25


def warnings_on(question: PlacementQuestion, best: Estimate) -> Iterator[str]:
    """In the order to read them."""
    placement = best.placement
    for engine, _ in (*placement.shared.engines, *placement.dedicated.engines):
        yield from _partitioned(question, engine)
    yield from _group(question, best)
    if best.exposed_pull_s > NOTABLE_PULL * best.step_s:
        yield (
            f"new weights hold up {percent(best.exposed_pull_s / best.step_s)} of a step; deltas are a small part of "
            "that (tidemill plan weights), and at lag 1 it hides"
        )
    if best.trainer_idle > NOTABLE_IDLE:
        waits = percent(best.trainer_idle)
        yield f"the trainer waits {waits} of the time; more machines that generate, or a lag, fill that"
    if best.dedicated_idle > NOTABLE_IDLE:
        yield f"machines that only generate wait {percent(best.dedicated_idle)} of the time: at lag 0, for the trainer"
    used = [offer for offer, _ in placement.training.group.members]
    used += [engine.offer for engine, _ in placement.dedicated.engines]
    for offer in {offer.name: offer for offer in used}.values():
        if "check" in offer.machine.price_source:
            yield f"price of {offer.name}: {offer.machine.price_source} ({offer.machine.priced})"
    if any(offer.preemptible for offer in used):
        yield "evictions are counted only as machines that are not there; what they cost else, a simulation says"


def _partitioned(question: PlacementQuestion, engine: Engine) -> Iterator[str]:
    offer = engine.offer
    if engine.gpus > engine.fewest_gpus:
        alone = steady_tokens_per_s(engine.smallest, question.rollout) / engine.fewest_gpus
        each = steady_tokens_per_s(engine.profile, question.rollout) / engine.gpus
        text = f"engines on {offer.name} are partitioned over {engine.gpus} GPUs, and {engine.fewest_gpus} would do"
        if each < alone:
            text += f": {percent(1 - each / alone)} fewer tokens per GPU with full slots"
        yield f"{text}; all the same they do their part of a batch soonest"
    if engine.gpus > 1 and offer.gpu.link_bytes_per_s < WEAK_LINK:
        yield (
            f"engines on {offer.name} exchange every layer's results over {offer.gpu.interconnect} "
            f"({offer.gpu.link_bytes_per_s / 1e9:.0f} GB/s): weak for tensor parallelism over {engine.gpus} GPUs"
        )


def _group(question: PlacementQuestion, best: Estimate) -> Iterator[str]:
    training = best.placement.training
    gpu = training.group.weakest
    if training.group.mixed:
        yield f"GPUs of several kinds train in one group ({gpu.name}): all wait for the slowest"
    if training.tp > 1 and gpu.link_bytes_per_s < WEAK_LINK:
        yield f"training is tensor parallel over {training.tp} GPUs on {gpu.interconnect}: weak for it"
    profile = training.profile
    if profile.gather_s > NOTABLE_GATHERING * question.microbatch_tokens * profile.ranks * profile.token_s:
        share = profile.gather_s / (question.microbatch_tokens * profile.ranks * profile.token_s)
        yield (
            f"gathering sharded layers takes {percent(share)} of the computing time of a pass; a larger microbatch "
            "hides more of it"
        )
