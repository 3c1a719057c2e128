"""What a run places: the ranks of its engine (AutoTP), and what no machine can hold, refused before anything starts."""

from __future__ import annotations

from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.hardware.accelerator import accelerator
from tidemill.hardware.engine_ranks import AUTO, Device, device_of, fewest_ranks, with_ranks
from tidemill.hardware.gpu_catalog import Gpu
from tidemill.hardware.placed_memory import check_division, check_gpus, memory_lines
from tidemill.hardware.process_memory import Models
from tidemill.telemetry.run_dir import RunDirectory

KEY = "engine.tensor_parallel"


def placed_run(
    spec: RunSpec, models: Models | None, *, gpu: Gpu | None = None, device: Device | None = None
) -> tuple[RunSpec, list[str]]:
    """The configuration with the ranks of its engine, and remarks on the memory of what it places on GPUs.

    Args:
        models: None if their shapes are unknown here.
        gpu: of reserved machines; default: deploy.accelerator.
        device: of a worker; default: of deploy.accelerator, else the GPUs of this machine.

    Raises:
        UserError: no number of ranks fits, the ranks do not divide a model, or a rank does not fit its GPU.
    """
    if spec.runtime != "ray":
        return spec, []
    spec, remarks = with_chosen_ranks(spec, models, device)
    uses_gpus = spec.ray.trainer_gpus or spec.ray.worker_gpus
    if models is None:
        unknown = "memory of GPUs: not compared, because a model or reward model of the recipe is not on this machine"
        return spec, [*remarks, *([unknown] if uses_gpus else [])]
    gpu = gpu or accelerator(spec.deploy)
    if gpu is not None and spec.run.check_memory:
        check_gpus(spec, models, gpu)
    if uses_gpus:
        remarks += memory_lines(spec, models, gpu)
    return spec, remarks


def with_chosen_ranks(spec: RunSpec, models: Models | None, device: Device | None = None) -> tuple[RunSpec, list[str]]:
    """With engine.tensor_parallel = 0 the number that the run has stored, or for a new run the fewest ranks that fit.

    Raises:
        UserError: none fits, or the model or the GPUs are unknown here; or the ranks do not divide a model.
    """
    spec, remarks = _with_chosen_ranks(spec, models, device)
    if models is not None:
        check_division(spec, models)
    return spec, remarks


def _with_chosen_ranks(spec: RunSpec, models: Models | None, device: Device | None) -> tuple[RunSpec, list[str]]:
    if spec.engine.tensor_parallel != AUTO:
        return spec, []
    stored: Any = RunDirectory(spec.directory).read_settings().get("engine", {}).get("tensor_parallel", AUTO)
    if isinstance(stored, int) and stored > AUTO:
        ranks, why = stored, "as the run has stored it"
    elif not spec.ray.worker_gpus:
        ranks, why = 1, "workers have no GPU (ray.worker_gpus = 0)"
    elif models is None:
        source = spec.model.source
        what = f"0 chooses it from the size of the model, and {source} is not on this machine"
        raise UserError(what, where=KEY, hint=f"download it (`tidemill model get {source}`), or set a number")
    else:
        ranks, why = fewest_ranks(spec, models.policy, device or _device(spec))
    return with_ranks(spec, ranks), [f"{KEY} = {ranks}: {why}"]


def _device(spec: RunSpec) -> Device:
    """The GPUs of a worker's node: of the kind of deploy.accelerator, or those of this machine.

    Raises:
        UserError: they are unknown, or of several kinds.
    """
    if (gpu := accelerator(spec.deploy)) is not None:
        return device_of(gpu)
    hint = "set a number, or deploy.accelerator to a GPU of `tidemill plan catalog`"
    if spec.ray.address:
        raise UserError("0 chooses it from the workers' GPUs, whose kind is unknown", where=KEY, hint=hint)
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if not found:
        raise UserError("0 chooses it from the workers' GPUs, and this machine has none", where=KEY, hint=hint)
    if len(names := {each.name for each in found}) > 1:
        what = f"this machine has GPUs of several kinds ({', '.join(sorted(names))}), and an engine needs equal ones"
        raise UserError(what, where=KEY, hint="hide some of them with CUDA_VISIBLE_DEVICES")
    return Device(title=found[0].name, memory_bytes=float(found[0].total_memory), count=len(found))
