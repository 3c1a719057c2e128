"""Forecast of a recipe on other machines: placed by `plan placement`, then simulated with the run's controller."""

from __future__ import annotations

import math
from typing import TypeVar

from msgspec.structs import replace

from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import percent
from tidemill.core.records import Record
from tidemill.hardware.completion_lengths import Lengths
from tidemill.hardware.engine_profile import EngineProfile, rollout_of
from tidemill.hardware.model_shape import ModelShape
from tidemill.hardware.trainer_profile import TrainerProfile
from tidemill.planner.forecast.forecast import MOST_SAMPLES, simulated_steps, summarised, unsimulated, with_seed
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.per_gpu import fit
from tidemill.planner.memory.states import Holding
from tidemill.planner.placement.estimate import Engine, Placement
from tidemill.planner.placement.recipe import own_placement
from tidemill.planner.placement.search import PlacementPlan, plan_of, plan_placement
from tidemill.planner.placement.training import Offer, PlacementQuestion, learning, memory_question
from tidemill.pool.build_provider import ScheduledPool, timetable_of
from tidemill.sim.costs import ProfiledEngine, ProfiledTrainer, WeightCosts
from tidemill.sim.simulation import CostModel, simulate_run
from tidemill.sim.workload import Workload
from tidemill.telemetry.manifest import Forecast

SENT_BYTES = 2  # per parameter, bf16
OFF = 0.4
"""Assumed relative error of engine and trainer times, in both directions, if efficiencies are assumed."""

P = TypeVar("P", EngineProfile, TrainerProfile)


class ClusterForecast(Record):
    forecast: Forecast
    plan: PlacementPlan
    bytes_per_gpu: float  # of the training GPUs, all parts at once
    usable_bytes: float


def placement_question(
    spec: RunSpec, shape: ModelShape, offers: tuple[Offer, ...], lengths: Lengths, prompt_tokens: int
) -> PlacementQuestion:
    """The question of `plan placement` for this recipe."""
    batch, algorithm, on_actors = spec.batch, spec.algorithm, spec.placement.on_actors
    critic = algorithm.needs_critic and "critic" not in on_actors
    reference = algorithm.kl_beta > 0 and "reference" not in on_actors
    samples = batch.prompts * batch.group_size
    return PlacementQuestion(
        algorithm="ppo" if critic else "grpo" if reference else "dr_grpo",
        shape=shape,
        offers=offers,
        rollout=rollout_of(lengths, samples=samples, group_size=batch.group_size, prompt_tokens=float(prompt_tokens)),
        longest=prompt_tokens + min(lengths.quantile(0.9999), spec.sampling.max_new_tokens),
        lag=spec.schedule.max_policy_lag,
        steps=spec.trainer.steps,
        holding=Holding(
            lora_rank=spec.model.lora.rank if spec.model.lora.enabled else 0,
            offload=spec.trainer.offload == "optimizer",
        ),
        microbatch_tokens=batch.microbatch_budget,
        logits_budget=spec.trainer.logits_bytes(on_gpu=True),
    )


def forecast_on_cluster(
    spec: RunSpec, question: PlacementQuestion, lengths: Lengths, prompt_tokens: int, *, seeds: int, boot_s: float
) -> ClusterForecast:
    """Find the best placement on the machines, or take that of a recipe with trainer.shards, and simulate it.

    Args:
        boot_s: time until the engine of a preemptible machine is ready, in seconds.

    Raises:
        UserError: an option is invalid, nothing fits, or no machine generates.
    """
    if prompt_tokens < 1:
        raise UserError(f"needs 1 or more, was given {prompt_tokens}", where="--prompt-tokens", hint="correct it")
    if not 0 <= boot_s < math.inf:
        raise UserError(f"needs 0 or more seconds, was given {boot_s:g}", where="--boot-s", hint="correct it")
    fixed = spec.runtime == "ray" and spec.trainer.shards > 1
    plan = plan_of(question, own_placement(spec, question)) if fixed else plan_placement(question)
    placement = plan.best.placement
    work = Workload(lengths=lengths, prompt_tokens=prompt_tokens, held_out=spec.eval.prompts)
    priced = _priced(spec, placement)
    steps = simulated_steps(spec, MOST_SAMPLES)
    dedicated, workers = _worker(placement), placement.dedicated.workers
    machines = round(sum(count for _, count in workers))
    pool = spec.pool
    played: ScheduledPool = StaticPool(workers=machines)
    if isinstance(pool, SyntheticPool | TracePool) and dedicated is not None and dedicated.offer.preemptible:
        played = pool
    slownesses = [1 + OFF * (2 * seed + 1 - seeds) / seeds for seed in range(seeds)]  # evenly spread, 1 on average
    runs = [
        simulate_run(
            with_seed(priced, steps, seed),
            cost_model_of(spec, question, placement, boot_s=boot_s, slowness=slowness),
            work,
            timetable_of(played) if machines else None,  # one per simulation, because a timetable is consumed
            most_workers=max(machines, 1),
        )
        for seed, slowness in enumerate(slownesses)
    ]
    off = percent(OFF)
    known = "in part measured" if question.efficiencies else "assumed"
    speeds = f"speeds are {known}: the range covers engines and trainer that take from {off} less to {off} more time"
    if seeds == 1:
        speeds = f"speeds are {known}, and one simulation has no spread: times can be wrong by half"
    notes = [*plan.warnings, "the time to start machines and load the model is not included", speeds]
    notes += unsimulated(spec, steps)
    if len(workers) > 1 or len(placement.shared.engines) > 1:
        notes.append("engines of several kinds are simulated as the first kind")
    forecast = summarised(priced, runs, start_s=0.0, about=placement.description, notes=notes)
    training = placement.training
    memory = memory_question(question, training.group)
    held = fit(memory, plan_memory(memory).parts, training.group.gpus)
    return ClusterForecast(
        forecast=forecast, plan=plan, bytes_per_gpu=held.bytes_per_gpu, usable_bytes=held.usable_bytes
    )


def cost_model_of(
    spec: RunSpec, question: PlacementQuestion, placement: Placement, *, boot_s: float, slowness: float = 1.0
) -> CostModel:
    """The costs of a placement, with the times of its profiles multiplied by `slowness`."""
    training, shared, dedicated = placement.training, placement.shared.engines, _worker(placement)
    own = [each for each in placement.dedicated.engines if each[0].offer.included]
    seeding = _engines(spec, shared[0][0], placement.shared.machines, slowness) if shared else None
    apart = _engines(spec, own[0][0], own[0][1], slowness) if own else None
    return CostModel(
        trainer=ProfiledTrainer(
            profile=_slowed(training.profile, slowness),
            passes=learning(question).passes,
            microbatch_tokens=spec.batch.microbatch_budget,
        ),
        weights=WeightCosts(
            nbytes=round(SENT_BYTES * question.shape.parameters),
            uplink_bytes_per_s=training.group.network.bytes_per_s,
            downlink_bytes_per_s=dedicated.offer.machine.network_bytes_per_s if dedicated else 1.0,
        ),
        reserved=seeding or apart,
        shares_gpus=bool(shared) or not own,
        worker=_engines(spec, dedicated, 1, slowness, boot_s=boot_s) if dedicated else None,
    )


def _slowed(profile: P, slowness: float) -> P:
    """The profile with all its times multiplied."""
    times = {name: slowness * getattr(profile, name) for name in profile.__struct_fields__ if name.endswith("_s")}
    return replace(profile, **times)


def _engines(spec: RunSpec, engine: Engine, machines: float, slowness: float, *, boot_s: float = 0.0) -> ProfiledEngine:
    profile = replace(_slowed(engine.profile, slowness), slots=spec.engine.slots)
    return ProfiledEngine(profile=profile, engines=round(machines * engine.per_machine), boot_s=boot_s)


def _worker(placement: Placement) -> Engine | None:
    return next((engine for engine, _ in placement.dedicated.workers), None)


def _priced(spec: RunSpec, placement: Placement) -> RunSpec:
    """The recipe with the prices of these machines."""
    dedicated = _worker(placement)
    fleet = {
        "reserved_usd_per_hour": placement.training.group.usd_per_hour,
        "preemptible_usd_per_hour": dedicated.offer.usd_per_hour if dedicated else 0.0,
        "seeding": len(placement.dedicated.workers) < len(placement.dedicated.engines)
        or bool(placement.shared.engines),
    }
    return spec.model_copy(update={"fleet": spec.fleet.model_copy(update=fleet)})
