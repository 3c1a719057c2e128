"""Memory of the processes that a run places on GPUs: bytes on the GPU of each, and in the host memory of a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tidemill.config.processes import reserved_processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted, size
from tidemill.core.records import Record
from tidemill.hardware.accelerator import GKE_GPUS
from tidemill.hardware.engine_profile import WORKSPACE_BYTES
from tidemill.hardware.engine_ranks import bytes_per_engine_rank, rank_memory, undivided
from tidemill.hardware.gpu_catalog import Gpu, load_catalog
from tidemill.hardware.model_shape import ModelShape
from tidemill.hardware.process_memory import BF16, FP32, LEARNED, Models, Work, element_bytes, learned_parameters, needs
from tidemill.hardware.trainer_profile import GATHERED_LAYERS, SENT_BYTES, layer_parts

LINK_GBIT_PER_S = 400
"""Network of the example of a transfer: that of a machine with eight H100 in many clusters."""


class RankNeed(Record):
    """What each rank of one role holds."""

    role: str
    held: float  # bytes on its GPU, whatever the lengths of sequences
    arithmetic: str  # of `held`
    growing: dict[str, float] = {}  # further bytes by part, at full length
    host: float = 0.0  # bytes in host memory
    share: float = 1.0  # of the GPU's memory, which it may use

    @property
    def total(self) -> float:
        return self.held + sum(self.growing.values())

    def text(self, gpu: Gpu | None) -> str:
        """`engine: 2 B × 70.6e9 / 4 = 35.3 GB + cache 16.1 GB + runtime 2 GB = 53.4 of 72 GB`"""
        parts = [self.arithmetic, *(f"{name} {size(part)}" for name, part in self.growing.items() if part)]
        of = "" if gpu is None else f" of {size(self.share * gpu.memory_bytes)}"
        host = f"; {size(self.host)} of host memory" if self.host else ""
        return f"{self.role}: {' + '.join(filter(None, parts))}; together {size(self.total)}{of}{host}"


def rank_needs(spec: RunSpec, models: Models, work: Work = "rl") -> list[RankNeed]:
    """Needs of every role that has GPUs, the trainer first."""
    found = []
    roles = {each.role: each for each in reserved_processes(spec)}
    if spec.ray.trainer_gpus:
        found.append(_trainer(spec, models, work))
    if (critic := roles.get("critic")) is not None and critic.gpus:
        found.append(_critic(spec, models.critic or models.policy))
    if spec.ray.worker_gpus and (spec.is_elastic or spec.engine_is_apart):
        found.append(_engine(spec, models))
    frozen = {"reference": (models.policy,), "reward model": models.rewards}
    for role, shapes in frozen.items():
        if (process := roles.get(role)) is not None and process.gpus:
            found += [_scorer(spec, role, shape) for shape in dict.fromkeys(shapes)]
    return found


def _trainer(spec: RunSpec, models: Models, work: Work) -> RankNeed:
    need, shape, shards = needs(spec, models, work, on_gpu=True, alone=False), models.policy, spec.trainer.shards
    assert need.gpu is not None
    offloads = shards > 1 and spec.trainer.offload == "optimizer"
    layer, experts = layer_parts(shape)
    outside = shape.parameters - shape.layers * (layer + experts)  # embedding and output head, in use all the time
    gathered = SENT_BYTES * (GATHERED_LAYERS * (layer + experts) + outside) if shards > 1 else 0.0
    host = needs(with_offload(spec, offload="none"), models, work, on_gpu=True, alone=False).gpu if offloads else None
    return RankNeed(
        role="trainer",
        held=need.gpu.states.total,
        arithmetic="" if offloads else _per_parameter(need.gpu.states.total, shape, shards),
        growing={"gathered layers": gathered, "activations": need.gpu.activations, "runtime": WORKSPACE_BYTES},
        host=0.0 if host is None else host.states.total,
    )


def with_offload(spec: RunSpec, *, offload: str) -> RunSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"offload": offload})})


def _per_parameter(held: float, shape: ModelShape, ranks: int) -> str:
    """`16 B × 70.6e9 / 8 = 141 GB`"""
    divided = f" / {ranks}" if ranks > 1 else ""
    return f"{held * ranks / shape.parameters:.3g} B × {shape.parameters / 1e9:.3g}e9{divided} = {size(held)}"


def _critic(spec: RunSpec, shape: ModelShape) -> RankNeed:
    held = LEARNED * learned_parameters(spec, shape) / spec.trainer.shards
    return RankNeed(role="critic", held=held, arithmetic=_per_parameter(held, shape, spec.trainer.shards))


def _engine(spec: RunSpec, models: Models) -> RankNeed:
    if spec.engine.kind != "vllm":
        need = needs(spec, models, "worker", on_gpu=True, alone=False).gpu
        assert need is not None
        held = need.states.total
        growing = {"cache": need.cache}
        return RankNeed(role="engine", held=held, arithmetic=_per_parameter(held, models.policy, 1), growing=growing)
    ranks = max(1, spec.engine.tensor_parallel)
    memory = rank_memory(spec, models.policy, ranks)
    return RankNeed(
        role="engine",
        held=memory.weights,
        arithmetic=_per_parameter(memory.weights, models.policy, ranks),
        growing={"cache": memory.cache, "runtime": memory.workspace},
        share=spec.engine.vllm.memory_fraction,
    )


def _scorer(spec: RunSpec, role: str, shape: ModelShape) -> RankNeed:
    ranks, embedded = spec.placement.actor_tensor_parallel, spec.placement.scoring_engine == "embedded"
    wide = embedded or element_bytes(spec, on_gpu=True) == FP32
    held = FP32 * shape.parameters if embedded else bytes_per_engine_rank(shape, ranks, "fp32" if wide else "bf16")
    return RankNeed(
        role=role,
        held=held,
        arithmetic=_per_parameter(held, shape, ranks),
        growing={"runtime": WORKSPACE_BYTES},
        share=1.0 if embedded else spec.engine.vllm.memory_fraction,
    )


def check_division(spec: RunSpec, models: Models) -> None:
    """Raises UserError: the ranks of an engine or of a frozen model do not divide its model."""
    placement = spec.placement
    divided = {("engine.tensor_parallel", models.policy): spec.engine.tensor_parallel}
    if placement.scoring_engine == "vllm":
        frozen = (*([models.policy] if placement.reference == "actor" else ()), *models.rewards)
        divided |= {("placement.actor_tensor_parallel", shape): placement.actor_tensor_parallel for shape in frozen}
    for (key, shape), ranks in divided.items():
        if ranks > 1 and (why := undivided(shape, ranks)):
            fitting = ", ".join(str(each) for each in range(1, 17) if not undivided(shape, each))
            raise UserError(f"cannot divide the model: {why}", where=f"{key} = {ranks}", hint=f"set one of {fitting}")


def check_gpus(spec: RunSpec, models: Models, gpu: Gpu, work: Work = "rl") -> None:
    """Compare what a run places with the machines of a GPU.

    Raises:
        UserError: a process needs more GPUs than a machine has, a rank holds more than the memory of its GPU in any
            case, or offloaded states exceed the host memory of every machine in the catalogue with this GPU.
    """
    for process in (*reserved_processes(spec), worker_process(spec)):
        if process.gpus > gpu.gpus_per_machine:
            what = f"the {process.role} needs {process.gpus:g} GPUs of one machine, and a machine of {gpu.title} has"
            hint = "lower engine.tensor_parallel or placement.actor_tensor_parallel"
            raise UserError(f"{what} {gpu.gpus_per_machine}", where=f"{process.key}_gpus", hint=hint)
    where = f"model.source = {spec.model.source}"
    for need in rank_needs(spec, models, work):
        if need.held > gpu.memory_bytes:
            what = (
                f"does not fit: the {need.role} holds {need.arithmetic}, and {gpu.title} has {size(gpu.memory_bytes)}"
            )
            raise UserError(what, where=where, hint=f"choose {' or '.join(_ways(spec, need, gpu))}")
        here = need.host * min(spec.trainer.shards, gpu.gpus_per_machine)
        if here > (room := _host_memory(gpu)):
            what = f"does not fit: offloaded states of {size(here)} on a machine, and those with {gpu.title} have "
            raise UserError(what + size(room), where=where, hint="raise trainer.shards, over more machines")


def _ways(spec: RunSpec, need: RankNeed, gpu: Gpu) -> Iterator[str]:
    larger = [name for name, each in GKE_GPUS.items() if load_catalog().gpu(each).memory_bytes >= need.held]
    if larger:
        yield f"an accelerator with more memory ({', '.join(larger)})"
    if need.role in ("trainer", "critic"):
        yield f"trainer.shards of about {math.ceil(spec.trainer.shards * need.held / gpu.memory_bytes)}"
        if spec.trainer.shards > 1:
            states = size(need.held * spec.trainer.shards)
            yield f'trainer.offload = "optimizer" ({states} of host memory on {counted(spec.trainer.shards, "rank")})'
        if not spec.model.lora.enabled:
            yield "model.lora.rank, which trains an adapter"
    elif need.role == "engine":
        yield 'engine.kind = "vllm" and a larger engine.tensor_parallel'
    else:
        yield 'placement.scoring_engine = "vllm" and a larger placement.actor_tensor_parallel'
    yield "a smaller model"


def _host_memory(gpu: Gpu) -> float:
    """The most host memory of a machine with this GPU; infinite if the catalogue knows none."""
    machines = load_catalog().machines.values()
    known = [each.host_memory_bytes for each in machines if each.gpu == gpu.name and each.host_memory_bytes]
    return max(known, default=math.inf)


def memory_lines(spec: RunSpec, models: Models, gpu: Gpu | None) -> Iterator[str]:
    """The memory of each role, with a warning if it may exceed that of its GPU, and the size of new weights."""
    for need in rank_needs(spec, models):
        yield f"memory of a GPU: {need.text(gpu)}"
        if gpu is not None and need.total > need.share * gpu.memory_bytes:
            yield f"warning: the {need.role} may run out of GPU memory with every sequence at its full length"
    if gpu is None:
        yield "memory of GPUs: not compared; name their kind as deploy.accelerator"
    sent = BF16 * learned_parameters(spec, models.policy)
    seconds = sent / (LINK_GBIT_PER_S * 1e9 / 8)
    yield f"new weights: {size(sent)} to each machine, once; {seconds:.2g} s at {LINK_GBIT_PER_S} Gbit/s"
