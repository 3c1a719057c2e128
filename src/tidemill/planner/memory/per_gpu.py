"""Bytes on one GPU of a run, and the number of GPUs that it needs."""

from __future__ import annotations

import math

from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation
from tidemill.hardware.model_shape import DTYPE_BYTES
from tidemill.hardware.trainer_profile import (
    GATHERED_LAYERS,
    LOGITS_BYTES,
    kept_layers,
    layer_activation_bytes,
    layer_parts,
)
from tidemill.planner.memory.states import GENERATE_NOTHING, MemoryQuestion

RUNTIME_BYTES = 2e9
"""Driver context and communication buffers on one GPU; assumed."""
ENGINE_SHARE = 0.5
"""Maximum fraction of a GPU's usable memory for engine weights; the rest is for training and the cache."""


class Shares(Record):
    """Parts of a GPU's memory in bytes: those that are divided by the number of GPUs, and those that are not."""

    states: float  # over the whole cluster, without offloaded states
    kv_anywhere: float  # keys and values of all samples in flight, on any machine
    kv: float  # the same, if these GPUs generate
    activations: float
    logits: float
    gathered: float
    engine: float
    runtime: float = RUNTIME_BYTES

    @property
    def fixed(self) -> float:
        """Bytes that every GPU holds, whatever the number of GPUs."""
        return self.activations + self.logits + self.gathered + self.engine + self.runtime

    def on_one(self, *, shards: int, gpus: int) -> float:
        return self.states / shards + self.kv / gpus + self.fixed


SHARES = {
    "kv_bytes": (
        "bytes",
        "samples_in_flight * context * kv_bytes_per_token",
        "2 * layers * kv_heads * head_dim * 2 bytes per token (bf16); every sample at its full length",
    ),
    "per_gpu.activation_bytes": (
        "bytes",
        "tokens * (recomputed_layers * 2 * hidden + kept_layers * layer_bytes) / tp",
        "Korthikanti et al., arXiv 2205.05198, attention fused; the first stage of a 1F1B pipeline keeps all layers",
    ),
    "per_gpu.logits_bytes": (
        "bytes",
        "min(logits_budget, tokens * vocab * bytes_each / tp)",
        "logits and their gradients in fp32, at most in chunks of the budget; not chunked unless planned for Tidemill",
    ),
    "per_gpu.gathered_bytes": (
        "bytes",
        "layers_at_once * 2 * (dense_parameters / tp + expert_parameters / ep)",
        "PyTorch FSDP, arXiv 2304.11277: the layer in use and the next are gathered in bf16",
    ),
    "per_gpu.engine_bytes": (
        "bytes",
        "parameters * 2 / engine_tp",
        "every GPU also generates: a bf16 copy, divided among the GPUs of one engine",
    ),
}


def shares(question: MemoryQuestion, states: float, sheet: Derivation) -> Shares:
    """All parts. Roles train one after another, so the activations are those of the largest role, the policy."""
    shape, load, parallel = question.shape, question.load, question.parallel
    here = generates_here(question)
    recomputed, kept = kept_layers(shape, load.recompute)
    dense, experts = layer_parts(shape)
    parts = sheet.evaluate(
        {name: row for name, row in SHARES.items() if here or name != "per_gpu.engine_bytes"},
        samples_in_flight=0 if question.algorithm in GENERATE_NOTHING else load.samples_in_flight,
        context=load.context,
        kv_bytes_per_token=shape.kv_bytes_per_token(),
        tokens=load.tokens,
        recomputed_layers=recomputed,
        hidden=shape.hidden,
        kept_layers=kept,
        layer_bytes=layer_activation_bytes(shape),
        vocab=shape.vocab,
        bytes_each=LOGITS_BYTES,
        logits_budget=load.logits_budget,
        layers_at_once=GATHERED_LAYERS,
        dense_parameters=dense,
        expert_parameters=experts,
        tp=parallel.tp,
        ep=parallel.ep,
        parameters=shape.parameters,
        engine_tp=engine_gpus(question),
    )
    return Shares(
        states=states,
        kv_anywhere=parts["kv_bytes"],
        kv=parts["kv_bytes"] if here else 0.0,
        activations=parts["per_gpu.activation_bytes"],
        logits=parts["per_gpu.logits_bytes"],
        gathered=parts["per_gpu.gathered_bytes"],
        engine=parts.get("per_gpu.engine_bytes", 0.0),
    )


def generates_here(question: MemoryQuestion) -> bool:
    return question.generates_here and question.algorithm not in GENERATE_NOTHING


def engine_gpus(question: MemoryQuestion) -> int:
    """GPUs of one engine: as given, or the smallest power of two that leaves room for more than weights."""
    if question.engine_tp:
        return question.engine_tp
    weights = question.shape.parameters * DTYPE_BYTES["bf16"]
    room = question.gpu.memory_bytes * (1 - question.margin) * ENGINE_SHARE
    return int(2 ** math.ceil(math.log2(max(weights / room, 1))))


SHOWN = 6
ROUNDING = 1e-12


class Fit(Record):
    """The memory per GPU with one number of GPUs."""

    gpus: int
    bytes_per_gpu: float
    usable_bytes: float

    @property
    def missing_bytes(self) -> float:
        """Missing bytes per GPU; 0 if it fits. Less than one byte is a rounding error."""
        missing = self.bytes_per_gpu - self.usable_bytes
        return missing if missing >= 1 else 0.0

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


def usable(question: MemoryQuestion) -> float:
    return question.gpu.memory_bytes * (1 - question.margin)


def training_unit(question: MemoryQuestion) -> int:
    """Training needs a multiple of this number of GPUs."""
    parallel = question.parallel
    return parallel.model_gpus * (parallel.fsdp or parallel.ep)


def unit(question: MemoryQuestion) -> int:
    """The number of GPUs must be a multiple of this for training and for whole engines."""
    engine = engine_gpus(question) if generates_here(question) else 1
    return math.lcm(training_unit(question), engine)


def fit(question: MemoryQuestion, parts: Shares, gpus: int) -> Fit:
    """The memory with `gpus` GPUs, a multiple of `unit`."""
    parallel = question.parallel
    shards = parallel.fsdp * parallel.model_gpus if parallel.fsdp else gpus
    return Fit(gpus=gpus, bytes_per_gpu=parts.on_one(shards=shards, gpus=gpus), usable_bytes=usable(question))


def fewest_gpus(question: MemoryQuestion, parts: Shares) -> int | None:
    """The smallest number of GPUs that holds everything; None if the parts that are not sharded are too large."""
    step, parallel = unit(question), question.parallel
    per_gpu = parts.fixed + (parts.states / (parallel.fsdp * parallel.model_gpus) if parallel.fsdp else 0.0)
    sharded = parts.kv + (0.0 if parallel.fsdp else parts.states)
    room = usable(question) - per_gpu
    if room < 0 or (room == 0 and sharded > 0):
        return None
    return rounded_up(sharded / room if sharded else 1, step)


def rounded_up(gpus: float, step: int) -> int:
    """The next multiple of `step`, at least one; ignores rounding errors of a division."""
    return max(math.ceil(gpus / step * (1 - ROUNDING)), 1) * step


def try_counts(question: MemoryQuestion, parts: Shares, fewest: int | None) -> list[Fit]:
    """One machine and its doublings up to the first that fits, the smallest number that fits, and the one before it."""
    step = unit(question)
    machine = rounded_up(question.gpu.gpus_per_machine, step)
    counts = {machine * 2**power for power in range(SHOWN)}
    if fewest is not None:
        counts = {count for count in counts if count < 2 * fewest} | {fewest, max(fewest - step, step), machine}
    return [fit(question, parts, count) for count in sorted(counts)]
