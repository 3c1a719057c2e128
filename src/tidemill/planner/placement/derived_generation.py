"""The figures of generating a batch and of bringing new weights to where it is done, each with its formula."""

from __future__ import annotations

import math

from tidemill.planner.figures import Sheet
from tidemill.planner.placement.engines import Engine, Side
from tidemill.planner.placement.estimate import Estimate, portions
from tidemill.planner.placement.question import PlacementQuestion
from tidemill.planner.placement.training import learned_parameters
from tidemill.sim.profiles.generation import steady_tokens_per_s
from tidemill.sim.profiles.network import ETHERNET_LATENCY_S
from tidemill.sim.profiles.precision import DTYPE_BYTES

ROOFLINE = "roofline, Williams et al. 2009: the longer of moving bytes and computing"


def derive_generation(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    """For each kind of engine a decoding step with full slots, and the rate that comes of it."""
    placement = found.placement
    sides = {"shared": placement.shared, "dedicated": placement.dedicated}
    for (name, side), portion in zip(sides.items(), portions(question, placement), strict=True):
        for engine, machines in side.engines:
            _engine(question, engine, machines, f"{name}.{engine.offer.words}", sheet)
        if not side.engines:
            continue
        samples = question.rollout.samples * portion
        if question.lag:
            _flow(question, side, samples * question.lag, name, sheet)
        else:
            _batch(question, side, samples, name, sheet)


def _batch(question: PlacementQuestion, side: Side, samples: float, name: str, sheet: Sheet) -> None:
    seconds, mean = side.batch_s(question, samples), question.rollout.mean
    sheet.note(
        f"{name}.tokens_per_s",
        samples * mean / seconds,
        "tokens/s",
        formula="samples * mean / seconds",
        source="lag 0: its portion of a batch; decoding steps summed over the lengths, with ever fewer samples running",
        samples=samples,
        mean=mean,
        seconds=seconds,
    )


def _flow(question: PlacementQuestion, side: Side, in_flight: float, name: str, sheet: Sheet) -> None:
    inputs: dict[str, float] = {}
    count = sum(machines * engine.per_machine for engine, machines in side.engines)
    for number, (engine, machines) in enumerate(side.engines):
        inputs[f"engines_{number}"] = machines * engine.per_machine
        inputs[f"each_{number}"] = steady_tokens_per_s(engine.profile, question.rollout, in_flight / count)
    sheet.note(
        f"{name}.tokens_per_s",
        side.steady(question, in_flight),
        "tokens/s",
        formula=" + ".join(f"engines_{number} * each_{number}" for number in range(len(side.engines))),
        source="lag 1 or more: slots are filled again at once, as far as the lag lets samples be in flight",
        **inputs,
    )


def _engine(question: PlacementQuestion, engine: Engine, machines: float, label: str, sheet: Sheet) -> None:
    gpu, shape, profile, rollout = engine.offer.gpu, question.shape, engine.profile, question.rollout
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
    sheet.note(
        f"{label}.weights_s",
        profile.weights_s,
        "s",
        formula="parameters_read * element_bytes / (gpus * bandwidth * efficiency)",
        source=f"every decoding step reads the weights; {gpu.source}; the efficiency is assumed",
        parameters_read=shape.parameters - shape.expert_parameters - shape.embedding_parameters,
        element_bytes=DTYPE_BYTES[question.engine_dtype],
        gpus=engine.gpus,
        bandwidth=gpu.bandwidth_bytes_per_s,
        efficiency=question.engine.bandwidth,
    )
    running = profile.most_running(rollout.prompt_tokens + rollout.mean)
    sheet.note(
        f"{label}.running",
        running,
        "samples",
        formula="min(slots, cache_tokens // sample_tokens)",
        source="what slots and the memory that is left for keys and values hold",
        slots=profile.slots,
        cache_tokens=profile.cache_tokens,
        sample_tokens=rollout.prompt_tokens + rollout.mean,
    )
    cached = running * rollout.running_context
    experts = profile.experts_s * (1 - (1 - profile.expert_share) ** running) if profile.expert_share else 0.0
    sheet.note(
        f"{label}.decode_step_s",
        profile.decode_step_s(running, cached),
        "s",
        formula="step + max(weights + experts + token * cached, sample * running + attended * cached)",
        source=f"{ROOFLINE}, with full slots",
        step=profile.step_s,
        weights=profile.weights_s,
        experts=experts,
        token=profile.cached_token_s,
        cached=cached,
        sample=profile.sample_s,
        running=running,
        attended=profile.attended_token_s,
    )


def derive_pull(question: PlacementQuestion, found: Estimate, sheet: Sheet) -> None:
    """Nothing where no machine only generates."""
    placement = found.placement
    if not placement.dedicated.engines:
        return
    parameters = learned_parameters(question)
    sheet.note(
        "pull_s",
        found.pull_s,
        "s",
        formula="max(parameters * 2 * receivers / trainer_rate, parameters * 2 / worker_rate) + latency",
        source="a full version for every machine that only generates, over their networks; a delta is smaller",
        parameters=parameters,
        receivers=max(1, math.ceil(placement.dedicated.machines)),
        trainer_rate=sum(
            offer.machine.network_bytes_per_s * count for offer, count in placement.training.group.members
        ),
        worker_rate=min(engine.offer.machine.network_bytes_per_s for engine, _ in placement.dedicated.engines),
        latency=ETHERNET_LATENCY_S,
    )
