"""`tidemill plan memory`: bytes per role and GPU, the fewest GPUs, and why fewer do not suffice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.cli.output import Json, Result
from tidemill.cli.plan_options import (
    CatalogFile,
    Explain,
    HoldingOptions,
    ModelOptions,
    Whole,
    count,
    notes,
    plain,
    result,
    table,
)
from tidemill.core.formatting import counted, doing, size
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_shape import ModelShape, shape_of_parameters
from tidemill.planner.memory.memory_plan import MemoryPlan, plan_memory
from tidemill.planner.memory.states import Load, MemoryQuestion, Parallel

SHOWN_PARTS = 3


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """Models besides the policy."""

    critic_params: str | None = None
    """Parameters of the critic, if different from the policy."""
    reward_params: str | None = None
    """Parameters of the reward model; adds one to an algorithm without."""
    reference: bool | None = None
    """Whether a reference model is kept; default: as the algorithm requires."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The parallel degrees of training."""

    fsdp: Whole = 0
    """GPUs over which states are sharded; 0: all."""
    tp: Whole = 1
    """Tensor parallel degree of training."""
    pp: Whole = 1
    """Pipeline stages."""
    ep: Whole = 1
    """Expert parallel degree, within FSDP."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The sequences that are in memory together."""

    context: Whole = 4096
    """Longest sequence, prompt and completion, in tokens."""
    microbatch_tokens: Whole = 0
    """Per data-parallel rank; 0: one sequence."""
    samples_in_flight: Whole = 64
    """Samples in the KV cache, over the cluster."""
    recompute: Literal["full", "none"] = "full"
    """full: recompute activations in the backward pass."""


def memory(
    *,
    model: ModelOptions = ModelOptions(),
    algorithm: str = "grpo",
    gpu: str = "h100-80gb",
    gpus: Whole | None = None,
    roles: RoleOptions = RoleOptions(),
    holding: HoldingOptions = HoldingOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    generate: Literal["here", "elsewhere"] = "here",
    engine_tp: Whole = 0,
    load: LoadOptions = LoadOptions(),
    margin: float = 0.1,
    catalog: CatalogFile = None,
    explain: Explain = False,
    json: Json = False,
) -> Result:
    """Bytes per role and GPU, the fewest GPUs, and why fewer do not suffice.

    Parameters
    ----------
    algorithm
        ppo keeps actor, critic, reference and reward; grpo actor and reference; ...
    gpu
        A GPU of the catalogue: h100-80gb, h200-141gb, b200-180gb, a100-80gb, ...
    gpus
        An additional number of GPUs to check.
    generate
        here: every GPU also holds engine weights and KV cache; elsewhere: other machines do.
    engine_tp
        GPUs per engine; 0: the fewest that leave half of each GPU free.
    margin
        Share of GPU memory lost to fragmentation.
    """
    question = MemoryQuestion(
        algorithm=algorithm,
        shape=model.shape(),
        gpu=load_catalog(catalog).gpu(gpu, where="--gpu"),
        critic=_other(roles.critic_params, "--critic-params"),
        reward=_other(roles.reward_params, "--reward-params"),
        reference=roles.reference,
        holding=holding.holding(),
        parallel=Parallel(**asdict(parallel)),
        load=Load(**asdict(load)),
        engine_tp=engine_tp,
        generates_here=generate == "here",
        margin=margin,
    )
    plan = plan_memory(question, gpus=gpus)
    return result(as_data(question, plan), as_text(question, plan), plan.figures, explain=explain)


def _other(params: str | None, option: str) -> ModelShape | None:
    return None if params is None else shape_of_parameters(count(params, option))


def as_data(question: MemoryQuestion, plan: MemoryPlan) -> dict[str, Any]:
    """Bytes are cluster totals, except `per_gpu`, `fits` and `activation_bytes`, which are per GPU."""
    gpus, parts = plan.min_gpus_with_activations, plan.parts
    shards = gpus if gpus is None else question.parallel.fsdp * question.parallel.model_gpus or gpus
    return {
        "algorithm": question.algorithm,
        "gpu": question.gpu.name,
        "parameters": question.shape.parameters,
        "total_bytes": plan.total,
        "min_gpus": plan.min_gpus,
        "by_role": {role.role: role.total for role in plan.states},
        "activation_bytes": plan.activations,
        "kv_bytes": plan.kv,
        "min_gpus_with_activations": plan.min_gpus_with_activations,
        "host_bytes": plan.on_host,
        "roles": {
            role.role: {
                "trained": role.trained,
                "parameters": role.parameters,
                "weights_bytes": role.weights,
                "gradients_bytes": role.gradients,
                "optimizer_bytes": role.optimizer,
                "host_bytes": role.on_host,
            }
            for role in plan.states
        },
        "per_gpu": {
            # Sharded parts at the fewest GPUs that hold everything; null if no number suffices.
            "gpus": gpus,
            "states_bytes": None if shards is None else parts.states / shards,
            "kv_bytes": None if gpus is None else parts.kv / gpus,
            "margin_bytes": question.gpu.memory_bytes * question.margin,
            "activations_bytes": parts.activations,
            "logits_bytes": parts.logits,
            "gathered_bytes": parts.gathered,
            "engine_bytes": parts.engine,
            "runtime_bytes": parts.runtime,
        },
        "fits": [
            {**msgspec.to_builtins(fit), "missing_bytes": fit.missing_bytes, "fits": fit.fits} for fit in plan.fits
        ],
        "why_not": why_not_data(plan),
        "notes": list(plan.notes),
    }


def why_not_data(plan: MemoryPlan) -> dict[str, Any] | None:
    """Null if the given GPUs, or one machine, suffice."""
    if (why := plan.why_not) is None:
        return None
    options = [{"option": each.option, "bytes_per_gpu": each.bytes_per_gpu, "fits": each.fits} for each in why.hints]
    return {"gpus": why.gpus, "missing_bytes": why.missing_bytes, "parts": why.parts, "options": options}


def as_text(question: MemoryQuestion, plan: MemoryPlan) -> Iterator[RenderableType]:
    """Tables of roles and GPU counts, parts per GPU, notes."""
    rows = [
        [role.role, size(role.weights), size(role.gradients), size(role.optimizer), size(role.total)]
        for role in plan.states
    ]
    rows.append(["total", "", "", "", size(plan.total)])
    yield table(("model states", "weights", "gradients", "optimizer", "total"), rows)
    if plan.on_host:
        yield f"of which on the hosts: {size(plan.on_host)}"
    parts = plan.parts
    yield ""
    yield (
        f"per GPU in addition: activations {size(parts.activations)}, logits {size(parts.logits)}, gathered "
        f"layers {size(parts.gathered)}, engine {size(parts.engine)}, runtime {size(parts.runtime)}"
    )
    yield f"keys and values of all samples in flight: {size(plan.kv)}"
    yield ""
    fits = [
        [f"{fit.gpus}", size(fit.bytes_per_gpu), "fits" if fit.fits else f"{size(fit.missing_bytes)} too much"]
        for fit in plan.fits
    ]
    title = f"{question.gpu.title}: {size(plan.fits[0].usable_bytes)} of {size(question.gpu.memory_bytes)} usable"
    yield table(("GPUs", "each holds", ""), fits, title=title)
    yield ""
    everything = plan.min_gpus_with_activations
    yield f"states alone: at least {counted(plan.min_gpus, 'GPU')}; everything: " + (
        "no number of GPUs suffices" if everything is None else f"at least {everything}"
    )
    if why := plan.why_not:
        shown = [f"{size(count)} of {name}" for name, count in list(why.parts.items())[:SHOWN_PARTS] if count]
        yield from plain(f"{doing(why.gpus, 'GPU', 'lack')} {size(why.missing_bytes)} each: {', '.join(shown)}")
        for option in why.hints:
            effect = "fits" if option.fits else f"{size(option.missing_bytes)} too much"
            yield from plain(f"  with {option.option}: {effect}")
    yield from notes(plan.notes)
