"""The processes of a run on Ray, with the resources that each needs of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidemill.config.schema import RunSpec


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of one role. Those of a role are placed on as few nodes as possible, each on one node.

    Args:
        cpus: of one process; with `gpus`, what its node must have free.
        key: `key`_cpus and `key`_gpus are the configuration keys.
    """

    role: str
    count: int
    cpus: float
    gpus: float
    key: str


def reserved_processes(spec: RunSpec) -> tuple[Processes, ...]:
    """Trainer, critic, frozen models and reserved engine, in the order in which they are placed."""
    config, placement, shards = spec.ray, spec.placement, spec.trainer.shards
    found = [Processes("trainer", shards, config.trainer_cpus, config.trainer_gpus, "ray.trainer")]
    if "critic" in placement.on_actors and spec.algorithm.needs_critic:
        found.append(Processes("critic", shards, placement.actor_cpus, placement.actor_gpus, "placement.actor"))
    cpus, gpus = (placement.actor_tensor_parallel * each for each in (placement.actor_cpus, placement.actor_gpus))
    if "reference" in placement.on_actors and spec.algorithm.kl_beta > 0:
        found.append(Processes("reference", 1, cpus, gpus, "placement.actor"))
    if "reward_model" in placement.on_actors and (folders := spec.scoring.model_folders):
        found.append(Processes("reward model", len(folders), cpus, gpus, "placement.actor"))
    if spec.engine_is_apart:
        found.append(replace(worker_process(spec), role="reserved engine"))
    return tuple(found)


def worker_process(spec: RunSpec) -> Processes:
    """One rollout worker, with all ranks of its engine."""
    ranks, config = max(1, spec.engine.tensor_parallel), spec.ray
    return Processes("worker", 1, ranks * config.worker_cpus, ranks * config.worker_gpus, "ray.worker")


def resources(processes: Sequence[Processes]) -> tuple[float, float]:
    """CPUs and GPUs of all of them."""
    return sum(each.count * each.cpus for each in processes), sum(each.count * each.gpus for each in processes)
