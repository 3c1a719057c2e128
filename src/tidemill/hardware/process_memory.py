"""Memory of the processes of a run on one machine, by part.

The weights, gradients and optimizer states of a run follow from its configuration: it holds them whatever it generates.
Activations, logits, keys and values grow with the lengths of sequences, of which only limits are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Self, TypeAlias

from msgspec.structs import replace

from tidemill.config.pipeline import StageKind
from tidemill.config.pool import StaticPool, SyntheticPool, TracePool
from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import parking_rows
from tidemill.hardware.figures import Derivation
from tidemill.hardware.model_shape import DTYPE_BYTES, ModelShape, adapter_parameters
from tidemill.hardware.trainer_profile import kept_layers

FP32, BF16 = 4, 2
LEARNED = 16
"""Bytes per trained parameter: weights, gradients and Adam's two moments in fp32."""
SNAPSHOTS = 2
"""Published versions kept for workers in the same process."""
LIBRARIES = 450e6
"""Resident bytes of a CPU process with Python, PyTorch and transformers, without a model; measured on Linux x86-64."""
BLOCK_TOKENS = 256
"""Of packed attention on a CPU (`models.tree_attention`): each block has copies of the keys and values of its path."""
HEAP = 1.25
"""Resident bytes per byte of activations, with what the allocator keeps. Measured: 1.19 to 1.28, with SmolLM2, glibc
and microbatches of 512 to 2,048 tokens."""
SOURCE = "the embedded engine and trainer; activations as transformers' layers keep them for the backward pass"
HELD = "trained: weights, gradients and two moments in fp32; frozen: weights in fp32, shared ones counted once"
ROWS = "frozen rows of a shard, in the precision of its computation"

Work: TypeAlias = Literal["rl", "supervised", "generate", "eval", "serve", "worker", "load"]
"""rl and supervised: training. generate: a model and its engine. eval: the same with reward models. serve: the same
with workers. worker: an engine alone. load: weights alone."""
WORK: Mapping[StageKind, Work] = {
    "demonstrations": "load",
    "pairs": "eval",
    "sft": "supervised",
    "reward_model": "supervised",
    "dpo": "supervised",
    "rl": "rl",
    "eval": "eval",
    "export": "load",
}
"""What each kind of stage does with its model; those of robots have none."""

TRAINS = ("rl", "supervised")


class Models(Record):
    """The shapes of a recipe's models."""

    policy: ModelShape
    critic: ModelShape | None = None  # of critic.source; None if the critic starts from the policy
    rewards: tuple[ModelShape, ...] = ()  # one per folder


class Lengths(NamedTuple):
    """Lengths of prompts, in tokens."""

    prompt: float
    packed: float  # of a group, as training computes it


UNKNOWN_LENGTHS = Lengths(0.0, 0.0)
"""Before the data are read: only completions are counted."""
FULL_MICROBATCHES = Lengths(0.0, math.inf)
"""Before the data are read: the prompts of a batch fill its microbatches."""


class Bytes(Record):
    """Bytes by part, added and multiplied part by part."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def __mul__(self, count: float) -> Self:
        return type(self)(**{name: getattr(self, name) * count for name in self.__struct_fields__})


class States(Bytes):
    """Bytes of models."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


class Need(Bytes):
    """Bytes that a run holds in one memory."""

    states: States = States()
    libraries: float = 0.0
    activations: float = 0.0  # of a full microbatch and its logits
    cache: float = 0.0  # keys and values of the engines, every slot at its full length

    @property
    def at_least(self) -> float:
        """Bytes whatever the lengths of sequences."""
        return self.states.total + self.libraries

    @property
    def at_full_length(self) -> float:
        """The estimate with every sequence at its full length."""
        return self.at_least + self.activations + self.cache


class RunNeeds(Record):
    """What a run needs of a machine."""

    host: Need
    gpu: Need | None = None  # of one GPU; None on a CPU


def needs(
    spec: RunSpec,
    models: Models,
    work: Work,
    *,
    on_gpu: bool,
    alone: bool = True,
    lengths: Lengths = UNKNOWN_LENGTHS,
) -> RunNeeds:
    """The memory of a run before its data are read.

    Args:
        on_gpu: whether its processes compute on a GPU, one each.
        alone: all processes of the run are on this machine; otherwise the need of one of them.
    """
    sheet, element = Derivation(), element_bytes(spec, on_gpu=on_gpu)
    states = STATES[work](spec, models, element, sheet)
    if work == "worker" and on_gpu:
        states *= 1 / max(1, spec.engine.tensor_parallel)  # of one rank
    activations = cache = 0.0
    if work in TRAINS:
        supervised = work == "supervised"
        # Layers of a shard compute in its precision; autocast alone leaves what passes between layers in fp32.
        kept = element if spec.trainer.shards > 1 else FP32
        sizes = microbatch(spec, models.policy, lengths, sheet, supervised=supervised, element=kept, on_gpu=on_gpu)
        activations = sum(sizes)
    if work not in ("supervised", "load"):
        cache = engine_cache(spec, models.policy, lengths, element, sheet)
    ranks = spec.trainer.shards if work in TRAINS else 1
    here = ranks if alone else 1
    engine_ranks = max(1, spec.engine.tensor_parallel) if work == "worker" else 1
    # Several ranks of an engine are processes beside the one that starts them.
    libraries = LIBRARIES * (1 + engine_ranks if engine_ranks > 1 else 1)
    if on_gpu:
        # A process alone loads whole models into host memory, a rank its rows into that of its GPU.
        loading = 0.0 if ranks > 1 or work in ("worker", "load") else FP32 * models.policy.parameters
        offloads = ranks > 1 and spec.trainer.offload == "optimizer"
        # The reference's rows stay on the GPU.
        resident = _reference(spec, models.policy, element, sheet) if work == "rl" else States()
        offloaded = replace(states, weights=states.weights - resident.weights)
        host = offloaded if offloads else States(weights=loading)
        return RunNeeds(
            host=Need(states=host, libraries=libraries) * here,
            gpu=Need(states=resident if offloads else states, activations=activations, cache=cache / engine_ranks),
        )
    need = Need(states=states, libraries=libraries, activations=activations, cache=cache) * here
    if alone and work in ("rl", "serve") and spec.runtime == "ray":
        need += _other_processes(spec, models, element, sheet)
    return RunNeeds(host=need)


def element_bytes(spec: RunSpec, *, on_gpu: bool) -> int:
    """Bytes of a number in an engine."""
    bf16 = spec.trainer.precision == "bf16" or (spec.trainer.precision == "auto" and on_gpu)
    return BF16 if bf16 else FP32


def rl_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """The policy and all other models in the training process, or in that of one rank."""
    policy, one_rank = models.policy, spec.trainer.shards == 1
    total = trained_states("policy", spec, policy, sheet, base_elsewhere=False)
    learned = learned_parameters(spec, policy)
    if one_rank and (element != FP32 or spec.schedule.max_policy_lag > 0):
        total += _engine_copy(spec, policy, element, sheet)
    total += _reference(spec, policy, element, sheet)
    if spec.algorithm.needs_critic and spec.placement.critic == "trainer" and spec.critic.kind == "own":
        shape = models.critic or policy
        total += trained_states("critic", spec, shape, sheet, base_elsewhere=models.critic is None)
    in_process = spec.runtime == "inprocess"
    if models.rewards and in_process:
        total += _plain("reward", sum(shape.parameters for shape in models.rewards), FP32, HELD, sheet)
    if in_process and workers_of(spec):
        total += _plain("snapshots", SNAPSHOTS * learned, element, "the newest two published versions", sheet)
    return total


def _reference(spec: RunSpec, policy: ModelShape, element: int, sheet: Derivation) -> States:
    """The reference in the training process, or one rank's rows of it."""
    if not spec.algorithm.kl_beta or spec.placement.reference != "trainer":
        return States()
    one_rank = spec.trainer.shards == 1
    # With LoRA the reference is the policy's frozen base.
    frozen = 0.0 if one_rank and spec.model.lora.enabled else policy.parameters
    held, source = (FP32, HELD) if one_rank else (element, ROWS)
    return _plain("reference", frozen / spec.trainer.shards, held, source, sheet)


def supervised_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """The trained model. The reference of DPO is read before training starts, and not kept."""
    return trained_states("policy", spec, models.policy, sheet, base_elsewhere=False)


def generating_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """A model that only generates."""
    adapter = learned_parameters(spec, models.policy) if spec.model.lora.enabled else 0.0
    total = _plain("policy", models.policy.parameters + adapter, FP32, HELD, sheet)
    if element != FP32 or spec.schedule.max_policy_lag > 0:
        total += _engine_copy(spec, models.policy, element, sheet)
    return total


def evaluating_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """A model that only generates, with the reward models that score."""
    rewards = _plain("reward", sum(shape.parameters for shape in models.rewards), FP32, HELD, sheet)
    return generating_states(spec, models, element, sheet) + rewards


def worker_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """An engine and the version that it generates with."""
    adapter = learned_parameters(spec, models.policy) if spec.model.lora.enabled else 0.0
    return _plain("policy", models.policy.parameters + adapter, element, "the published weights", sheet)


def loaded_states(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> States:
    """The weights of one model."""
    dtype = DTYPE_BYTES.get(spec.export.dtype, BF16)
    return _plain("policy", models.policy.parameters, dtype, "weights as they are exported", sheet)


STATES: dict[Work, Callable[[RunSpec, Models, int, Derivation], States]] = {
    "rl": rl_states,
    "supervised": supervised_states,
    "generate": generating_states,
    "eval": evaluating_states,
    "serve": generating_states,
    "worker": worker_states,
    "load": loaded_states,
}


def _other_processes(spec: RunSpec, models: Models, element: int, sheet: Derivation) -> Need:
    """The processes of a run on Ray beside the trainer: separate models and workers, which share one snapshot."""
    placement, total = spec.placement, States()
    if spec.algorithm.needs_critic and placement.critic == "actor" and spec.critic.kind == "own":
        total += trained_states("critic", spec, models.critic or models.policy, sheet, base_elsewhere=False)
    if spec.algorithm.kl_beta > 0 and placement.reference == "actor":
        total += _plain("reference", models.policy.parameters, FP32, HELD, sheet)
    total += _plain("reward", sum(shape.parameters for shape in models.rewards), FP32, HELD, sheet)
    if spec.is_elastic or spec.engine_is_apart:
        total += worker_states(spec, models, element, sheet)
    return Need(states=total)


def learned_parameters(spec: RunSpec, shape: ModelShape) -> float:
    """Trained parameters of a model: all, or those of its adapter (an upper bound with model.lora.targets)."""
    lora = spec.model.lora
    return adapter_parameters(shape, lora.rank) if lora.enabled else shape.parameters


def workers_of(spec: RunSpec) -> int:
    """Maximum number of simulated workers in the process."""
    pool = spec.pool
    if isinstance(pool, TracePool):
        return pool.max_workers
    return pool.workers if isinstance(pool, StaticPool | SyntheticPool) else 0


def trained_states(role: str, spec: RunSpec, shape: ModelShape, sheet: Derivation, *, base_elsewhere: bool) -> States:
    """A trained model, or one rank's part of it.

    Args:
        base_elsewhere: with LoRA, its frozen weights are counted with another role.
    """
    learned, shards = learned_parameters(spec, shape), spec.trainer.shards
    frozen = shape.parameters if spec.model.lora.enabled and not base_elsewhere else 0.0
    sheet.compute(
        f"{role}_bytes",
        "bytes",
        formula="(learned_parameters * learned_bytes + frozen_parameters * frozen_bytes) / shards",
        source=HELD,
        shards=shards,
        learned_parameters=learned,
        learned_bytes=LEARNED,
        frozen_parameters=frozen,
        frozen_bytes=FP32,
    )
    part = FP32 * learned / shards
    return States(weights=part + FP32 * frozen / shards, gradients=part, optimizer=2 * part)


def _engine_copy(spec: RunSpec, policy: ModelShape, element: int, sheet: Derivation) -> States:
    """In fp32 a copy shares the frozen base with the policy."""
    learned = learned_parameters(spec, policy)
    copied = policy.parameters + (learned if spec.model.lora.enabled else 0.0) if element != FP32 else learned
    return _plain("engine_copy", copied, element, "the engine's copy of the weights", sheet)


def _plain(name: str, parameters: float, element: int, source: str, sheet: Derivation) -> States:
    """The weights of a model that is not trained."""
    weights = sheet.compute(
        f"{name}_bytes",
        "bytes",
        formula="parameters * element_bytes",
        source=source,
        parameters=parameters,
        element_bytes=element,
    )
    return States(weights=weights)


def microbatch(
    spec: RunSpec,
    shape: ModelShape,
    lengths: Lengths,
    sheet: Derivation,
    *,
    supervised: bool = False,
    element: int = FP32,
    on_gpu: bool = False,
) -> tuple[float, float]:
    """Bytes of one microbatch: (activations, logits).

    Args:
        element: bytes of a number that layers keep.
    """
    batch, recompute = spec.batch, spec.trainer.recomputes(on_gpu=on_gpu)
    packed = lengths.packed + batch.group_size * spec.sampling.max_new_tokens
    tokens = spec.supervised.microbatch_tokens if supervised else min(batch.microbatch_budget, batch.prompts * packed)
    context = tokens if supervised else min(tokens, lengths.prompt + spec.sampling.max_new_tokens)
    each = kept_numbers(shape, context=context, recompute=recompute, frozen=spec.model.lora.enabled)
    activations = sheet.compute(
        "activation_bytes",
        "bytes",
        formula="heap * tokens * bytes_per_token",
        source=f"{SOURCE}; a microbatch, at most the whole batch",
        heap=HEAP,
        tokens=tokens,
        bytes_per_token=element * each,
    )
    logits = sheet.compute(
        "logits_bytes",
        "bytes",
        formula="min(budget, 4 * tokens * vocab)",
        source="probabilities, which their gradients replace, within trainer.logits_budget_mb",
        budget=spec.trainer.logits_bytes(on_gpu=on_gpu),
        tokens=tokens,
        vocab=shape.vocab,
    )
    return activations, logits


def kept_numbers(shape: ModelShape, *, context: float, recompute: bool | Literal["selective"], frozen: bool) -> float:
    """Numbers that the layers of transformers keep per token for the backward pass.

    Two norms (input, normalised, scaled), queries, results and reordered results of attention, four MLP widths (gate,
    its activation, up, product), and per block of packed attention the keys and values of its path and a mask.

    Args:
        context: length of a row, in tokens.
        recompute: True, all of a layer; selective, two of the four MLP widths, whose result is then kept as well.
        frozen: only an adapter is trained, so that norms do not keep what their own gradient needs.
    """
    block = min(BLOCK_TOKENS, context)
    path = (context + block) / 2  # keys of a block, in the mean
    copies = path / block if block else 1.0
    inner = shape.intermediate * max(shape.experts_per_token, 1)
    norms = 4 if frozen else 6
    attention = 3 * shape.attention_width + copies * 2 * shape.kv_heads * shape.head_dim + path
    inputs, whole = kept_layers(shape, "full" if recompute is True else "none")
    layer = norms * shape.hidden + attention + 4 * inner
    again = (2 * inner - shape.hidden) * (shape.layers - 1) if recompute == "selective" else 0.0
    return inputs * shape.hidden + whole * layer - again


def engine_cache(spec: RunSpec, shape: ModelShape, lengths: Lengths, element: int, sheet: Derivation) -> float:
    """Bytes of keys and values of the engines in this process."""
    context = lengths.prompt + max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)
    engines = int(spec.trainer.shards == 1) + (workers_of(spec) if spec.runtime == "inprocess" else 0)
    rows, token_bytes = spec.engine.slots + 1, shape.kv_bytes_per_token(element)
    if spec.env.enabled:
        context += spec.env.turns * spec.env.observation_tokens
        rows += parking_rows(spec.engine.slots, context * token_bytes)
    return sheet.compute(
        "kv_bytes",
        "bytes",
        formula="engines * rows * context * bytes_per_token",
        source="every slot of every engine in this process at its full length, and rows of episodes between two turns",
        engines=engines,
        rows=rows,
        context=context,
        bytes_per_token=token_bytes,
    )
