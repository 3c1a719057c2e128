"""Tables of `plan weights`, `plan memory` and `plan overlap`."""

from __future__ import annotations

from typing import Any

from scripts.site.explorations.rounding import digits, row
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import shape_of_parameters
from tidemill.planner.memory.memory_plan import MemoryPlan, plan_memory
from tidemill.planner.memory.per_gpu import fit, rounded_up, unit
from tidemill.planner.memory.states import Load, MemoryQuestion
from tidemill.planner.overlap import TYPICAL, plan_overlap
from tidemill.planner.transfer import GIGABIT, TransferQuestion, plan_transfer

PARAMETERS = (0.5e9, 1.5e9, 3e9, 8e9, 14e9, 32e9, 70e9, 120e9, 235e9, 405e9, 671e9)

LINKS_GBPS = (10, 25, 50, 100, 200, 400, 800)
WORKERS = (1, 4, 16, 64)
STEPS_S = (5, 10, 20, 40, 80, 160)
PATHS = ("broadcast", "store", "file", "delta")


def weight_transfer() -> dict[str, Any]:
    """`seconds` [model][link][workers][path], `slack` [model][link][workers][path][step], of weights in bf16."""
    seconds, slack, sizes = [], [], []
    usual = TransferQuestion(parameters=PARAMETERS[0], link=LINKS_GBPS[0] * GIGABIT)
    for parameters in PARAMETERS:
        plans = [
            [
                [
                    plan_transfer(
                        TransferQuestion(parameters=parameters, link=link * GIGABIT, workers=workers, step_s=step_s)
                    )
                    for step_s in STEPS_S
                ]
                for workers in WORKERS
            ]
            for link in LINKS_GBPS
        ]
        by_path = [
            [[{path.path: path for path in plan.paths} for plan in of_steps] for of_steps in of_workers]
            for of_workers in plans
        ]
        seconds.append([[row(steps[0][name].seconds for name in PATHS) for steps in workers] for workers in by_path])
        slack.append(
            [
                [[row((at[name].slack_s or 0.0 for at in steps), 4) for name in PATHS] for steps in workers]
                for workers in by_path
            ]
        )
        first = by_path[0][0][0]
        sizes.append(row(first[name].size for name in PATHS))
    return {
        "parameters": row(PARAMETERS),
        "links": list(LINKS_GBPS),
        "workers": list(WORKERS),
        "steps": list(STEPS_S),
        "file_gbps": digits(usual.file / GIGABIT),
        "changed": usual.changed,
        "paths": list(PATHS),
        "sizes": sizes,
        "seconds": seconds,
        "slack": slack,
    }


ALGORITHMS = ("ppo", "grpo", "dapo", "sft")
GB = 1e9
GPUS = ("a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb")
COUNTS = tuple(2**power for power in range(11))
PARTS = ("activations", "logits", "gathered", "engine", "runtime")


def memory() -> dict[str, Any]:
    """`plans` [model][algorithm][GPU], and in each, for each number of GPUs, what one of them holds; in GB."""
    known = load_catalog(None)
    plans = [
        [[_memory(MemoryQuestion(algorithm=algorithm, shape=shape_of_parameters(parameters), gpu=known.gpu(gpu)))
          for gpu in GPUS] for algorithm in ALGORITHMS]
        for parameters in PARAMETERS
    ]  # fmt: skip
    gpus = [known.gpu(name) for name in GPUS]
    return {
        "parameters": row(PARAMETERS),
        "algorithms": list(ALGORITHMS),
        "gpus": [{"name": gpu.name, "title": gpu.title, "memory": digits(gpu.memory_bytes / GB)} for gpu in gpus],
        "counts": list(COUNTS),
        "parts": list(PARTS),
        "context": Load().context,
        "samples_in_flight": Load().samples_in_flight,
        "plans": plans,
    }


def _memory(question: MemoryQuestion) -> dict[str, Any]:
    plan = plan_memory(question)
    fits = [fit(question, plan.parts, rounded_up(count, unit(question))) for count in COUNTS]
    return {
        "total": digits(plan.total / GB),
        "least": plan.min_gpus,
        "least_all": plan.min_gpus_with_activations,
        "usable": digits(fits[0].usable_bytes / GB),
        "roles": {
            role.role: row((role.weights / GB, role.gradients / GB, role.optimizer / GB)) for role in plan.states
        },
        "fixed": row((getattr(plan.parts, name) / GB for name in PARTS), 4),
        # Engines of several GPUs need multiples of them: the number that is used is the first of each.
        "each": [_on_one(plan, found.gpus, found.bytes_per_gpu, found.missing_bytes) for found in fits],
    }


def _on_one(plan: MemoryPlan, gpus: int, per_gpu: float, missing: float) -> list[float | int]:
    """GPUs, and GB on one of them: model states, keys and values, everything, and what does not fit."""
    return [gpus, *row((count / GB for count in (plan.parts.states / gpus, plan.parts.kv / gpus, per_gpu, missing)), 4)]


ROLLOUTS_S = TRAININGS_S = tuple(range(10, 130, 10))
OVERLAP_GPUS = (4, 8, 16, 32)


def overlap() -> dict[str, Any]:
    """`plans` [rollout][training]: utilisation in sequence, overlapped, and GPUs' share of rollout; `resized`
    [rollout][training][GPUs]: GPUs to generate, GPUs to train, utilisation."""
    plans, resized = [], []
    for rollout in ROLLOUTS_S:
        found = [[plan_overlap(rollout, training, gpus=gpus) for gpus in OVERLAP_GPUS] for training in TRAININGS_S]
        plans.append([row((each[0].in_sequence, each[0].overlapped, each[0].rollout_share)) for each in found])
        resized.append(
            [[[at.rollout_gpus, at.training_gpus, digits(at.resized or 0.0)] for at in each] for each in found]
        )
    return {
        "rollouts": list(ROLLOUTS_S),
        "trainings": list(TRAININGS_S),
        "gpus": list(OVERLAP_GPUS),
        "typical": list(TYPICAL),
        "plans": plans,
        "resized": resized,
    }
