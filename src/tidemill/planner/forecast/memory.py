"""What a recipe keeps in memory on this machine, beside what a run like it was seen to take."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.planner.calibration.profile import RunProfile
from tidemill.planner.figures import Sheet
from tidemill.sim.profiles.model_shape import ModelShape
from tidemill.sim.profiles.training_memory import Recompute, activation_bytes

FP32 = 4
STATES = 16
"""Weights, gradients and two moments in fp32."""
BF16_TO_FP32 = 2
MEGABYTE = 1e6
SOURCE = "the embedded engine and trainer, in fp32; Korthikanti et al., arXiv 2205.05198, for activations"


def memory_on_this_machine(spec: RunSpec, shape: ModelShape, profile: RunProfile, sheet: Sheet) -> float:
    """Bytes of the process that trains: states, the open microbatch, and what the engine keeps."""
    states = sheet.note(
        "states_bytes", STATES * shape.parameters, "bytes",
        formula="parameters * bytes_each", source=SOURCE, parameters=shape.parameters, bytes_each=STATES,
    )  # fmt: skip
    activations, logits = _microbatch(spec, shape, profile, sheet)
    cache = _cache(spec, shape, profile, sheet)
    return sheet.note(
        "memory_bytes",
        states + activations + logits + cache,
        "bytes",
        formula="states + activations + logits + kv",
        source="of the process that trains, without the libraries it loads",
        states=states,
        activations=activations,
        logits=logits,
        kv=cache,
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


def _cache(spec: RunSpec, shape: ModelShape, profile: RunProfile, sheet: Sheet) -> float:
    """Bytes of the engine's keys and values."""
    context = profile["prompt_tokens"] + max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)
    return sheet.note(
        "kv_bytes",
        (spec.engine.slots + 1) * context * shape.kv_bytes_per_token(FP32),
        "bytes",
        formula="(slots + 1) * context * bytes_per_token",
        source="every slot at its full length",
        slots=spec.engine.slots,
        context=context,
        bytes_per_token=shape.kv_bytes_per_token(FP32),
    )
