"""What a recipe keeps in memory on this machine: every model as the run holds it, and the work of one microbatch."""

from __future__ import annotations

from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.planner.calibration.profile import RunProfile
from tidemill.planner.figures import Sheet
from tidemill.sim.profiles.model_shape import ModelShape, adapter_parameters
from tidemill.sim.profiles.training_memory import Recompute, activation_bytes

FP32, BF16 = 4, 2
LEARNED = 16
"""Weights, gradients and Adam's two moments in fp32."""
SNAPSHOTS = 2
"""Published versions that are kept for workers in the same process."""
BF16_TO_FP32 = 2
LIBRARIES = 450e6
"""Resident in a CPU process before it loads a model: Python, PyTorch, transformers; measured on Linux x86-64."""
MEGABYTE = 1e6
SOURCE = "the embedded engine and trainer, in fp32; Korthikanti et al., arXiv 2205.05198, for activations"
HELD = (
    "learned: weights, gradients and two moments in fp32; frozen: weights in fp32, once for all roles that share them"
)


class Models(Record):
    """The shapes of a recipe's models."""

    policy: ModelShape
    critic: ModelShape | None = None  # of critic.source; None where a critic begins as the policy
    rewards: tuple[ModelShape, ...] = ()  # one for each folder


def memory_on_this_machine(spec: RunSpec, models: Models, profile: RunProfile, sheet: Sheet) -> float:
    """Bytes of the process that trains: its models, the open microbatch, keys and values, and the libraries."""
    on_gpu = profile.machine.device != "cpu"
    bf16 = spec.trainer.precision == "bf16" or (spec.trainer.precision == "auto" and on_gpu)
    element = BF16 if bf16 else FP32
    held = _models(spec, models, element, sheet)
    activations, logits = _microbatch(spec, models.policy, profile, sheet)
    cache = _cache(spec, models.policy, profile, element, sheet)
    libraries = 0.0 if on_gpu else LIBRARIES
    return sheet.note(
        "memory_bytes",
        held + activations + logits + cache + libraries,
        "bytes",
        formula="models + activations + logits + kv + libraries",
        source="of the process that trains; libraries as measured on a CPU, none on a GPU",
        models=held,
        activations=activations,
        logits=logits,
        kv=cache,
        libraries=libraries,
    )


def _models(spec: RunSpec, models: Models, element: int, sheet: Sheet) -> float:
    """Bytes of the policy and everything beside it that is in this process."""
    policy = models.policy
    total = _role("policy", spec, policy, sheet, base_elsewhere=False)
    learned = learned_parameters(spec, policy)
    if element != FP32 or spec.schedule.max_policy_lag > 0:
        # In fp32 a copy shares the frozen base with the policy.
        copied = policy.parameters + (learned if spec.model.lora.enabled else 0.0) if element != FP32 else learned
        total += _plain("engine_copy", copied, element, "weights that engines compute with beside the trainer's", sheet)
    if spec.algorithm.kl_beta > 0 and spec.placement.reference == "trainer":
        # Under an adapter the reference is the policy's own frozen base.
        frozen = 0.0 if spec.model.lora.enabled else policy.parameters
        total += _plain("reference", frozen, FP32, HELD, sheet)
    if spec.algorithm.needs_critic and spec.placement.critic == "trainer" and spec.critic.kind == "own":
        total += _role("critic", spec, models.critic or policy, sheet, base_elsewhere=models.critic is None)
    in_process = spec.runtime == "inprocess"
    if models.rewards and in_process:
        total += _plain("reward", sum(shape.parameters for shape in models.rewards), FP32, HELD, sheet)
    if in_process and workers_of(spec):
        total += _plain("snapshots", SNAPSHOTS * learned, element, "the newest two published versions", sheet)
    return total


def learned_parameters(spec: RunSpec, shape: ModelShape) -> float:
    """Of a model that learns: all, or those of its adapter (with model.lora.targets at most so many)."""
    lora = spec.model.lora
    return adapter_parameters(shape, lora.rank) if lora.enabled else shape.parameters


def workers_of(spec: RunSpec) -> int:
    """Simulated workers that may be in the process at once."""
    pool = spec.pool
    if isinstance(pool, TracePool):
        return pool.max_workers
    return pool.workers if isinstance(pool, StaticPool | SyntheticPool) else 0


def _role(role: str, spec: RunSpec, shape: ModelShape, sheet: Sheet, *, base_elsewhere: bool) -> float:
    """Bytes of a model that learns.

    Args:
        base_elsewhere: under an adapter, its frozen weights are counted with another role.
    """
    learned = learned_parameters(spec, shape)
    frozen = shape.parameters if spec.model.lora.enabled and not base_elsewhere else 0.0
    return sheet.note(
        f"{role}_bytes",
        learned * LEARNED + frozen * FP32,
        "bytes",
        formula="learned_parameters * learned_bytes + frozen_parameters * frozen_bytes",
        source=HELD,
        learned_parameters=learned,
        learned_bytes=LEARNED,
        frozen_parameters=frozen,
        frozen_bytes=FP32,
    )


def _plain(name: str, parameters: float, element: int, source: str, sheet: Sheet) -> float:
    """Bytes of weights alone."""
    return sheet.note(
        f"{name}_bytes",
        parameters * element,
        "bytes",
        formula="parameters * element_bytes",
        source=source,
        parameters=parameters,
        element_bytes=element,
    )


def _microbatch(spec: RunSpec, shape: ModelShape, profile: RunProfile, sheet: Sheet) -> tuple[float, float]:
    """Bytes of the open one: (activations, logits)."""
    batch = spec.batch
    recompute: Recompute = "full" if spec.trainer.activation_checkpointing else "none"
    packed = profile["packed_prompt_tokens"] + batch.group_size * spec.sampling.max_new_tokens
    tokens = min(batch.microbatch_tokens, batch.prompts * packed)
    activations = sheet.note(
        "activation_bytes",
        BF16_TO_FP32 * activation_bytes(shape, tokens=tokens, recompute=recompute, tp=1),
        "bytes",
        formula="tokens * bytes_per_token",
        source=f"{SOURCE}; a microbatch, at most the whole batch",
        tokens=tokens,
        bytes_per_token=BF16_TO_FP32 * activation_bytes(shape, tokens=1, recompute=recompute, tp=1),
    )
    logits = sheet.note(
        "logits_bytes",
        min(spec.trainer.logits_budget_mb * MEGABYTE, 2 * FP32 * tokens * shape.vocab),
        "bytes",
        formula="min(budget, 2 * 4 * tokens * vocab)",
        source="logits and their gradients, in pieces of trainer.logits_budget_mb",
        budget=spec.trainer.logits_budget_mb * MEGABYTE,
        tokens=tokens,
        vocab=shape.vocab,
    )
    return activations, logits


def _cache(spec: RunSpec, shape: ModelShape, profile: RunProfile, element: int, sheet: Sheet) -> float:
    """Bytes of keys and values of the engines in this process."""
    context = profile["prompt_tokens"] + max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)
    engines = 1 + (workers_of(spec) if spec.runtime == "inprocess" else 0)
    return sheet.note(
        "kv_bytes",
        engines * (spec.engine.slots + 1) * context * shape.kv_bytes_per_token(element),
        "bytes",
        formula="engines * (slots + 1) * context * bytes_per_token",
        source="every slot of every engine in this process at its full length",
        engines=engines,
        slots=spec.engine.slots,
        context=context,
        bytes_per_token=shape.kv_bytes_per_token(element),
    )
