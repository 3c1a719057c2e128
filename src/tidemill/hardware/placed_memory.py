"""Memory of the processes that a run places on GPUs: bytes on the GPU of each, and in the host memory of a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import field

from tidemill.config.processes import reserved_processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import size
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
RUNTIME = {"runtime": WORKSPACE_BYTES}


class RankNeed(Record):
    """What each rank of one role holds."""

    role: str
    shape: ModelShape
    ranks: int  # that divide the model
    held: float  # bytes on its GPU, whatever the lengths of sequences
    growing: dict[str, float] = field(default_factory=RUNTIME.copy)  # further bytes by part, at full length
    host: float = 0.0  # bytes in host memory
    share: float = 1.0  # of the GPU's memory, which it may use

    @property
    def total(self) -> float:
        return self.held + sum(self.growing.values())

    @property
    def arithmetic(self) -> str:
        """`16 B × 70.6e9 / 8 = 141 GB`"""
        divided = f" / {self.ranks}" if self.ranks > 1 else ""
        parameters = self.shape.parameters
        return f"{self.held * self.ranks / parameters:.3g} B × {parameters / 1e9:.3g}e9{divided} = {size(self.held)}"

    def text(self, gpu: Gpu | None) -> str:
        """`engine: 2 B × 70.6e9 / 4 = 35.3 GB + cache 16.1 GB + runtime 2 GB; together 53.4 of 72 GB`"""
        parts = [self.arithmetic] if self.held else []
        parts += [f"{name} {size(part)}" for name, part in self.growing.items() if part]
        of = "" if gpu is None else f" of {size(self.share * gpu.memory_bytes)}"
        host = f"; {size(self.host)} of host memory" if self.host else ""
        if host and gpu is not None:
            host += f", {size(self.host * min(self.ranks, gpu.gpus_per_machine))} on a machine"
        return f"{self.role}: {' + '.join(parts)}; together {size(self.total)}{of}{host}"


def rank_needs(spec: RunSpec, models: Models, work: Work = "rl") -> Iterator[RankNeed]:
    """Needs of every role that has GPUs, the trainer first."""
    on_gpu = {each.role for each in reserved_processes(spec) if each.gpus}
    policy, shards, placement = models.policy, spec.trainer.shards, spec.placement
    if "trainer" in on_gpu:
        need = needs(spec, models, work, on_gpu=True, alone=False)
        assert need.gpu is not None
        layer = sum(layer_parts(policy))
        outside = policy.parameters - policy.layers * layer  # embedding and output head, gathered all the time
        gathered = SENT_BYTES * (GATHERED_LAYERS * layer + outside) if shards > 1 else 0.0
        growing = {"gathered layers": gathered, "activations": need.gpu.activations, **RUNTIME}
        host = need.host.states.total if shards > 1 else 0.0  # offloaded
        held = need.gpu.states.total
        yield RankNeed(role="trainer", shape=policy, ranks=shards, held=held, growing=growing, host=host)
    if "critic" in on_gpu:
        shape = models.critic or policy
        held = LEARNED * learned_parameters(spec, shape) / shards
        yield RankNeed(role="critic", shape=shape, ranks=shards, held=held)
    vllm = spec.engine.vllm.memory_fraction
    if spec.ray.worker_gpus and (spec.is_elastic or spec.engine_is_apart):
        ranks = max(1, spec.engine.tensor_parallel)
        memory = rank_memory(spec, policy, ranks)
        growing, share = {"cache": memory.cache, **RUNTIME}, vllm if spec.engine.kind == "vllm" else 1.0
        held = memory.weights
        yield RankNeed(role="engine", shape=policy, ranks=ranks, held=held, growing=growing, share=share)
    for role, shapes in {"reference": (policy,), "reward model": models.rewards}.items():
        embedded, ranks = placement.scoring_engine == "embedded", placement.actor_tensor_parallel
        dtype = "fp32" if embedded or element_bytes(spec, on_gpu=True) == FP32 else "bf16"
        for shape in dict.fromkeys(shapes) if role in on_gpu else ():
            held = bytes_per_engine_rank(shape, ranks, dtype)
            yield RankNeed(role=role, shape=shape, ranks=ranks, held=held, share=1.0 if embedded else vllm)


def check_division(spec: RunSpec, models: Models) -> None:
    """Raises UserError: the ranks of an engine or of a frozen model do not divide its model."""
    placement = spec.placement
    divided = {("engine.tensor_parallel", models.policy): spec.engine.tensor_parallel}
    reference = (models.policy,) if "reference" in placement.on_actors else ()
    rewards = models.rewards if "reward_model" in placement.on_actors else ()
    for shape in (*reference, *rewards):
        divided["placement.actor_tensor_parallel", shape] = placement.actor_tensor_parallel
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
    machines = [each for each in load_catalog().machines.values() if each.gpu == gpu.name]
    room = max((each.host_memory_bytes or 0.0 for each in machines), default=0.0) or math.inf
    for need in rank_needs(spec, models, work):
        if need.held > gpu.memory_bytes:
            what = (
                f"does not fit: the {need.role} holds {need.arithmetic}, and {gpu.title} has {size(gpu.memory_bytes)}"
            )
            raise UserError(what, where=where, hint=f"choose {' or '.join(_ways(spec, need, gpu))}")
        if (here := need.host * min(spec.trainer.shards, gpu.gpus_per_machine)) > room:
            what = f"does not fit: offloaded states of {size(here)} on a machine, and those with {gpu.title} have "
            raise UserError(what + size(room), where=where, hint="raise trainer.shards, over more machines")


def _ways(spec: RunSpec, need: RankNeed, gpu: Gpu) -> Iterator[str]:
    larger = [name for name, each in GKE_GPUS.items() if load_catalog().gpu(each).memory_bytes >= need.held]
    if larger:
        yield f"an accelerator with more memory ({', '.join(larger)})"
    if need.role in ("trainer", "critic"):
        room = gpu.memory_bytes - sum(need.growing.values())
        if room > 0:
            yield f"trainer.shards of about {math.ceil(need.ranks * need.held / room)}"
        if need.ranks > 1:
            yield f'trainer.offload = "optimizer" ({size(need.held * need.ranks)} of host memory over all ranks)'
        if not spec.model.lora.enabled:
            yield "model.lora.rank, which trains an adapter"
    elif need.role == "engine":
        yield 'engine.kind = "vllm" and a larger engine.tensor_parallel'
    else:
        yield 'placement.scoring_engine = "vllm" and a larger placement.actor_tensor_parallel'
    yield "a smaller model"


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
