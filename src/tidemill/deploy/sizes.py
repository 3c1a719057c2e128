"""CPUs, memory and GPUs of the pods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tidemill.config.deploy import KUBERNETES, DeployConfig
from tidemill.config.pipeline import StageKind
from tidemill.config.processes import reserved_processes, resources, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import size
from tidemill.hardware.accelerator import GKE_GPUS, accelerator
from tidemill.hardware.engine_ranks import AUTO, device_of, fewest_ranks, with_ranks
from tidemill.hardware.gpu_catalog import Gpu
from tidemill.hardware.placed_memory import check_gpus
from tidemill.hardware.process_memory import WORK, Models, Work, element_bytes, learned_parameters, needs

ModelsOf: TypeAlias = Callable[[RunSpec], Models | None]
"""The shapes of a recipe's models; None if they are unknown here."""
WORKS: dict[StageKind, Work] = {**WORK, "demonstrations": "generate"}  # a pod also needs the memory of its engine
GIB = 2**30
GPUS_PER_MACHINE = 8
DRIVER_CPUS = 1
RAY_BYTES = 2e9
"""The driver, and Ray's processes on the head: GCS, raylet, dashboard, agents. Assumed; half of it on other nodes."""
SNAPSHOTS = 2
"""Published versions in the object store."""
RESERVE = 1.2
"""An estimate may be off by 20 %."""
UNKNOWN_GIB = 16
"""Memory of a pod whose model is unknown here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSize:
    """The resources of one pod."""

    cpus: int
    memory_gib: int
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The pods of a job."""

    reserved: PodSize
    reserved_machines: int
    spot: PodSize
    notes: tuple[str, ...]


def sizes(stages: Sequence[tuple[StageKind, RunSpec]], deploy: DeployConfig, models_of: ModelsOf) -> Sizes:
    """Pods in which every stage fits.

    Raises:
        UserError: unknown accelerator, GPUs without one, or a model that does not fit.
    """
    gpu = accelerator(deploy)
    stages = [(kind, _with_ranks(spec, gpu, models_of)) for kind, spec in stages]
    places = [resources(reserved_processes(spec)) for _, spec in stages]
    cpus, gpus = (math.ceil(max(counts)) for counts in zip(*places, strict=True))
    workers = [worker_process(spec) for _, spec in stages]
    spot_cpus = math.ceil(max(each.cpus for each in workers))
    spot_gpus = math.ceil(max(each.gpus for each in workers))
    _check_accelerator(deploy, trainer=gpus, worker=spot_gpus)
    machines = max(1, math.ceil(gpus / (gpu.gpus_per_machine if gpu else GPUS_PER_MACHINE)))
    gpus_each = math.ceil(gpus / machines)
    memories = [_memory(kind, spec, deploy, gpu, models_of(spec), gpus_each) for kind, spec in stages]
    reserved, spot = (max(counts) for counts in zip(*memories, strict=True))
    return Sizes(
        reserved=PodSize(
            cpus=math.ceil(cpus / machines) + DRIVER_CPUS,
            memory_gib=math.ceil(reserved / GIB),
            gpus=gpus_each,
        ),
        reserved_machines=machines,
        spot=PodSize(cpus=max(1, spot_cpus), memory_gib=math.ceil(spot / GIB), gpus=spot_gpus),
        notes=tuple(_remarks(stages, deploy, models_of, machines=machines, gpus=gpus + spot_gpus)),
    )


def _share(spec: RunSpec, gpus_each: int) -> float:
    """The share of the trainer's memory on the first machine, which its ranks fill before they use others."""
    trainer = reserved_processes(spec)[0]
    ranks_gpus = trainer.count * trainer.gpus
    return min(1.0, gpus_each / ranks_gpus) if ranks_gpus else 1.0


def _with_ranks(spec: RunSpec, gpu: Gpu | None, models_of: ModelsOf) -> RunSpec:
    """The configuration with the ranks that a run on these GPUs will choose."""
    if spec.engine.tensor_parallel != AUTO or gpu is None or (models := models_of(spec)) is None:
        return spec
    return with_ranks(spec, fewest_ranks(spec, models.policy, device_of(gpu))[0])


def _remarks(
    stages: Sequence[tuple[StageKind, RunSpec]], deploy: DeployConfig, models_of: ModelsOf, *, machines: int, gpus: int
) -> Iterator[str]:
    if gpus and not deploy.accelerator:
        yield "deploy.accelerator is not set: whether the model fits the GPUs is not checked"
    if machines > 1 and deploy.target in KUBERNETES:
        claim = f"the claim {deploy.storage} must be ReadWriteMany (Filestore, Lustre)"
        yield f"the reserved part has {machines} machines: {claim}"
    unknown = dict.fromkeys(spec.model.source for kind, spec in stages if kind in WORKS and models_of(spec) is None)
    if unknown and not (deploy.head_memory_gb and deploy.worker_memory_gb):
        yield (
            f"the size of {', '.join(unknown)} is unknown here: pods get {UNKNOWN_GIB} GiB, or deploy.head_memory_gb "
            "and deploy.worker_memory_gb"
        )


def _check_accelerator(deploy: DeployConfig, *, trainer: int, worker: int) -> None:
    if (trainer or worker) and not deploy.accelerator and deploy.target == "gke":
        key = "trainer_gpus" if trainer else "worker_gpus"
        what = f"missing, and ray.{key} asks for GPUs"
        raise UserError(what, where="deploy.accelerator", hint=f"name one of {', '.join(GKE_GPUS)}")
    if deploy.accelerator and not (trainer or worker):
        what = "is set, and no pod asks for a GPU"
        hint = "set ray.trainer_gpus and ray.worker_gpus, or leave the accelerator out"
        raise UserError(what, where="deploy.accelerator", hint=hint)


def _memory(
    kind: StageKind, spec: RunSpec, deploy: DeployConfig, gpu: Gpu | None, models: Models | None, gpus_each: int
) -> tuple[float, float]:
    """Bytes of a reserved and of a preemptible pod for one stage."""
    given = (deploy.head_memory_gb * 1e9, deploy.worker_memory_gb * 1e9)
    work = WORKS.get(kind)
    if work is None or models is None:
        return given[0] or UNKNOWN_GIB * GIB, given[1] or UNKNOWN_GIB * GIB
    on_gpu = spec.ray.trainer_gpus > 0
    trains = needs(spec, models, work, on_gpu=on_gpu)
    here = trains.host * _share(spec, gpus_each)
    generates = needs(spec, models, "worker", on_gpu=spec.ray.worker_gpus > 0, alone=False)
    if gpu is not None:
        check_gpus(spec, models, gpu, work)
    for key, bytes_given, need in zip(("head", "worker"), given, (here, generates.host), strict=True):
        if 0 < bytes_given < need.at_least:
            what = f"{spec.model.source} needs at least {size(need.at_least)} there"
            hint = "leave it out, so that it is estimated, or choose a smaller model"
            raise UserError(what, where=f"deploy.{key}_memory_gb", hint=hint)
    weights = learned_parameters(spec, models.policy) * element_bytes(spec, on_gpu=on_gpu)
    head = RESERVE * (here.at_full_length + RAY_BYTES + SNAPSHOTS * weights)
    worker = RESERVE * (generates.host.at_full_length + RAY_BYTES / 2 + weights)
    return given[0] or head, given[1] or worker
