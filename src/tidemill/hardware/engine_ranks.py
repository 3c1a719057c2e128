"""Ranks of an engine: GPUs of one machine that divide every layer (Megatron-LM, arXiv 1909.08053); bytes on each of
them, and the fewest that hold a model (AutoTP)."""

from __future__ import annotations

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, size
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import WORKSPACE_BYTES
from tidemill.hardware.gpu_catalog import Gpu
from tidemill.hardware.model_shape import DTYPE_BYTES, ModelShape
from tidemill.hardware.process_memory import element_bytes

PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it divides it (`VocabParallelEmbedding`)."""
AUTO = 0
"""Value of engine.tensor_parallel that asks for the fewest ranks."""


class Device(Record):
    """The GPUs of one machine, all of one kind."""

    title: str
    memory_bytes: float  # of one
    count: int


def device_of(gpu: Gpu) -> Device:
    """The usual machine of a GPU."""
    return Device(title=gpu.title, memory_bytes=gpu.memory_bytes, count=gpu.gpus_per_machine)


def padded_vocabulary(vocab: int) -> int:
    return -(-vocab // PADDING) * PADDING


def undivided(shape: ModelShape, ranks: int) -> str:
    """Why a model cannot be divided among `ranks` ranks, with the offending number; empty if it can."""
    vocab = padded_vocabulary(shape.vocab)
    if shape.heads % ranks:
        return f"{ranks} does not divide its {shape.heads} attention heads"
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        return f"{ranks} neither divides its {shape.kv_heads} heads of keys and values nor is a multiple of them"
    if vocab % ranks:
        return f"{ranks} does not divide its vocabulary of {shape.vocab:,}, padded to {vocab:,}"
    if shape.intermediate % ranks:
        return f"{ranks} does not divide the width {shape.intermediate:,} of its MLP"
    return ""


def kv_heads_per_rank(shape: ModelShape, ranks: int) -> int:
    """Heads of keys and values on one rank: each is on several ranks if there are more ranks than heads."""
    return max(shape.kv_heads // ranks, 1)


def bytes_per_engine_rank(shape: ModelShape, ranks: int, dtype: str = "bf16") -> float:
    """Bytes of the weights on one of `ranks` ranks.

    Queries, output projections, MLP and padded vocabulary are divided. Norms are whole on every rank, and so is at
    least one head of keys and values.
    """
    tables = 1 if shape.tied else 2
    norms = (2 * shape.layers + 1) * shape.hidden
    # Latent attention (kv_values_per_layer) has no such heads: its matrices count as divided.
    head = 0 if shape.kv_values_per_layer else 2 * shape.layers * shape.hidden * shape.head_dim
    rest = shape.parameters - tables * shape.vocab * shape.hidden - shape.kv_heads * head - norms
    held = (tables * padded_vocabulary(shape.vocab) * shape.hidden + rest) / ranks
    return DTYPE_BYTES[dtype] * (held + kv_heads_per_rank(shape, ranks) * head + norms)


def cache_bytes_per_rank(shape: ModelShape, ranks: int, tokens: float, element: float = 2) -> float:
    """Bytes of the keys and values of `tokens` tokens on one rank; compressed ones (MLA) are whole on every rank."""
    heads = kv_heads_per_rank(shape, ranks)
    return shape.layers * (shape.kv_values_per_layer or 2 * heads * shape.head_dim) * element * tokens


class RankMemory(Record):
    """Bytes on the GPU of one rank of an engine."""

    weights: float
    cache: float  # every slot at its full length
    workspace: float = WORKSPACE_BYTES

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.workspace

    @property
    def sum(self) -> str:
        """The addition, for messages."""
        parts = {"weights": self.weights, "cache": self.cache, "workspace": self.workspace}
        return " + ".join(f"{name} {size(part)}" for name, part in parts.items()) + f" = {size(self.total)}"


def context_of(spec: RunSpec) -> int:
    """Tokens of the longest sample: engine.context_tokens, or without it what is known before the data are read."""
    longest = max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)
    turns = spec.env.turns * spec.env.observation_tokens if spec.env.enabled else 0
    return spec.engine.context_tokens or longest + turns


def rank_memory(spec: RunSpec, shape: ModelShape, ranks: int) -> RankMemory:
    """Memory of one rank of a recipe's engine on a GPU."""
    dtype = "bf16" if element_bytes(spec, on_gpu=True) == DTYPE_BYTES["bf16"] else "fp32"
    tokens = spec.engine.slots * context_of(spec)
    return RankMemory(
        weights=bytes_per_engine_rank(shape, ranks, dtype),
        cache=cache_bytes_per_rank(shape, ranks, tokens, DTYPE_BYTES[dtype]),
    )


def with_ranks(spec: RunSpec, ranks: int) -> RunSpec:
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"tensor_parallel": ranks})})


def fewest_ranks(spec: RunSpec, shape: ModelShape, device: Device) -> tuple[int, str]:
    """The fewest ranks that divide the model and hold it, with its cache, in engine.vllm.memory_fraction; and why.

    Raises:
        UserError: no number of the machine's GPUs does; with the arithmetic.
    """
    fraction = spec.engine.vllm.memory_fraction
    usable = fraction * device.memory_bytes
    of = f"{size(usable)} ({fraction:.0%} of {device.title})".replace("%", " %")
    tried = [ranks for ranks in range(1, device.count + 1) if not undivided(shape, ranks)]
    for ranks in tried:
        need = rank_memory(spec, shape, ranks)
        if need.total <= usable:
            return ranks, f"the fewest that fit: {need.sum} of {of} on each"
    need = rank_memory(spec, shape, tried[-1])
    samples = f"{counted(spec.engine.slots, 'slot')} of {counted(context_of(spec), 'token')}"
    what = f"no number of ranks up to {device.count} holds the model: with {tried[-1]} each needs {need.sum} of {of}"
    hint = f"the cache is of {samples}: lower engine.slots or engine.context_tokens, or take GPUs with more memory"
    raise UserError(what, where="engine.tensor_parallel", hint=hint)
