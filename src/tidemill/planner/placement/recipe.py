"""The keys of a recipe that has a placement, and the placement of a recipe that has these keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from tidemill.config.pool import RayPool, TracePool
from tidemill.config.processes import Processes, reserved_processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, size
from tidemill.planner.memory.states import REWARD, roles_of
from tidemill.planner.placement.estimate import Engine, Placement, Side, engines_on
from tidemill.planner.placement.training import Group, Offer, PlacementQuestion, TooLarge, best_training


def recipe_keys(question: PlacementQuestion, placement: Placement) -> dict[str, Any]:
    """The keys that make a run place its processes so."""
    group, workers = placement.training.group, placement.dedicated.workers
    several = group.all_gpus > 1
    engines = (*placement.shared.engines, *placement.dedicated.engines)
    keys: dict[str, Any] = {"runtime": "ray", "ray.trainer_gpus": 1, "ray.worker_gpus": 1, "trainer.shards": group.gpus}
    if several or workers:
        first = engines[0][0]
        keys |= {"engine.kind": "vllm", "engine.tensor_parallel": first.gpus, "engine.slots": first.profile.slots}
    if several:
        keys["placement.engine"] = "colocated" if placement.shared.engines else "own"
    elif not placement.shared.engines:
        keys["fleet.seeding"] = False
    own = sum(round(each.per_machine * count) for each, count in placement.dedicated.engines if each.offer.included)
    most = sum(engine.per_machine * machines / engine.offer.availability for engine, machines in workers)
    if workers or own > 1:
        keys |= {"pool.kind": "ray", "pool.max_workers": round(most) + max(0, own - 1)}
        if own > 1:  # workers on the reserved machines, too
            keys["pool.selector"] = {}
    left = group.apart - own * engines[0][0].gpus
    if REWARD in roles_of(question.algorithm) and left > 0:
        ranks = {"placement.scoring_engine": "vllm", "placement.actor_tensor_parallel": left}
        keys |= {"placement.reward_model": "actor", "placement.actor_gpus": 1, **ranks}
    if question.holding.offload and several:
        keys["trainer.offload"] = "optimizer"
    if question.holding.lora_rank:
        keys["model.lora.rank"] = question.holding.lora_rank
    if question.lag:
        keys["schedule.max_policy_lag"] = question.lag
    return keys


def machines_of(processes: Sequence[Processes], gpus: float) -> list[dict[str, int]]:
    """The processes of each machine: each process whole, in order, on the first machine with room for it.

    Args:
        gpus: of one machine.

    Raises:
        UserError: a process needs more.
    """
    free, found = list[float](), list[Counter[str]]()
    for process in processes:
        if process.gpus > gpus:
            what = f"the {process.role} needs {process.gpus:g} GPUs of one machine, and the largest has {gpus:g}"
            raise UserError(what, where=f"{process.key}_gpus", hint="lower the number of ranks")
        for _ in range(process.count):
            index = next((at for at, left in enumerate(free) if left >= process.gpus), len(free))
            if index == len(free):
                free.append(gpus)
                found.append(Counter())
            free[index] -= process.gpus
            found[index][process.role] += 1
    return [dict(each) for each in found]


def most_workers(spec: RunSpec) -> int:
    pool = spec.pool
    return pool.max_workers if isinstance(pool, RayPool | TracePool) else pool.workers


def workers_on_any_node(spec: RunSpec) -> bool:
    """Whether workers also run on reserved machines, beside the reserved engine: their pool selects no nodes."""
    return isinstance(spec.pool, RayPool) and not spec.pool.selector


def run_machines(
    spec: RunSpec, *, reserved_gpus: float, worker_gpus: float | None
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The reserved machines and the preemptible ones of a run, with what is placed on each.

    Args:
        reserved_gpus, worker_gpus: of one machine of each kind; None: there are no preemptible machines.

    Raises:
        UserError: no machine can hold a process.
    """
    reserved, workers = [*reserved_processes(spec)], [worker_process(spec)] * most_workers(spec)
    if worker_gpus is None:
        return machines_of([*reserved, *workers] if workers_on_any_node(spec) else reserved, reserved_gpus), []
    return machines_of(reserved, reserved_gpus), machines_of(workers, worker_gpus)


def own_placement(spec: RunSpec, question: PlacementQuestion) -> Placement:
    """The placement of a recipe with `trainer.shards` on the first kind of reserved machines and the preemptible ones.

    Raises:
        UserError: there are too few machines, or its processes do not fit them.
    """
    first, spot = question.reserved[0], question.preemptible
    worker_gpus = min((offer.machine.gpus for offer in spot), default=None)
    reserved, _ = run_machines(spec, reserved_gpus=first.machine.gpus, worker_gpus=worker_gpus)
    if len(reserved) > first.count:
        what = f"the recipe's reserved processes need {counted(len(reserved), 'machine')} of {first.name}, "
        raise UserError(f"{what}and {first.count} are offered", where="--machines", hint="raise the count")
    apart = len(reserved) * first.machine.gpus - spec.trainer.shards
    training = best_training(question, Group(members=((first, len(reserved)),), apart=apart))
    if isinstance(training, TooLarge):
        what = f"{spec.trainer.shards} ranks lack {size(training.missing_per_gpu)} of GPU memory each"
        raise UserError(what, where="trainer.shards", hint='raise it, or set trainer.offload = "optimizer"')
    ranks, left = max(1, spec.engine.tensor_parallel), most_workers(spec)
    sides = list[tuple[Engine, float]]()
    if spec.engine_is_apart:
        engine = _engine(question, replace(first, included=True), ranks, spec.engine.slots)
        beside = left if workers_on_any_node(spec) and not spot else 0
        sides.append((engine, (1 + beside) / engine.per_machine))
    for offer in spot:
        engine = _engine(question, offer, ranks, spec.engine.slots)
        machines = min(math.ceil(left / engine.per_machine), offer.count)
        left -= machines * engine.per_machine
        if machines > 0:
            sides.append((engine, machines * offer.availability))
    colocated = [] if spec.engine_is_apart else [(_engine(question, first, 1, spec.engine.slots), float(len(reserved)))]
    return Placement(training=training, shared=Side(engines=tuple(colocated)), dedicated=Side(engines=tuple(sides)))


def _engine(question: PlacementQuestion, offer: Offer, ranks: int, slots: int) -> Engine:
    found = engines_on(question, offer)
    if isinstance(found, dict) and ranks in found:
        return replace(found[ranks], profile=replace(found[ranks].profile, slots=slots))
    fitting = ", ".join(map(str, found)) if isinstance(found, dict) else "no number"
    what = f"an engine of {counted(ranks, 'GPU')} does not hold the model and the longest sample on {offer.name}"
    raise UserError(what, where="engine.tensor_parallel", hint=f"set it to {fitting}")
