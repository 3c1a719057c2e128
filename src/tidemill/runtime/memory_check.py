"""Compares the memory that a run needs with what is free, before anything large is loaded.

The kernel kills a process that exceeds the memory of its machine or control group without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.config.model import LoraConfig, ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, size
from tidemill.hardware.free_memory import THIS_MACHINE, FreeMemory, free_host_memory, resident_bytes
from tidemill.hardware.gpu_check import OWN_BYTES, objections
from tidemill.hardware.process_memory import LIBRARIES, TRAINS, Models, Need, Work, needs
from tidemill.models.model_source import locate
from tidemill.models.shapes import known_shape, shape_of_folder

TOLERANCE = 1.2
"""An estimate may be off by 20 %: a run is refused if it needs more than this multiple of the free memory."""
GPU_DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""One of these exists where torch can find a GPU: NVIDIA, NVIDIA under Windows, AMD."""
ADAPTER_RANK = 16
"""Of the suggested adapter."""
Note = Callable[[str], None]


class Shortage(NamedTuple):
    """A memory that is too small."""

    need: Need
    free: FreeMemory
    of: str  # "memory" or "GPU memory"
    elsewhere: float = 0.0  # bytes of the GPU that other processes use

    @property
    def refuses(self) -> bool:
        return self.need.at_least > TOLERANCE * self.free.bytes


def check_memory(spec: RunSpec, work: Work, *, folder: Path | None = None, note: Note, alone: bool = True) -> None:
    """Refuse a run that does not fit into the free memory, or that the GPU cannot compute; warn where it is uncertain.

    Reads configurations and headers of weight files only. Does nothing for a model that cannot be read, which is
    reported where it is loaded.

    Args:
        folder: a model or checkpoint that replaces the configured one.
        note: gets the warning.
        alone: all processes of the run are on this machine; otherwise only this one is counted.

    Raises:
        UserError: names the parts, the free memory and what would make it fit; or what the GPU lacks.
    """
    _check_gpu(spec, work, note, alone=alone)
    if not spec.run.check_memory:
        return
    models = known_models(spec, folder, fetch=True)
    if models is None:
        return
    for text in verdicts(spec, models, work, alone=alone):
        note(f"warning: {text}")


def _check_gpu(spec: RunSpec, work: Work, note: Note, *, alone: bool) -> None:
    """See `hardware.gpu_check`. On Ray only the processes that compute check it."""
    in_actors = _in_actors(spec, work)
    if work == "load" or (in_actors and alone) or not may_use_gpu(spec, work, in_actors=in_actors):
        return
    from tidemill.runtime.gpu_facts import gpu_facts

    bf16, required = spec.trainer.precision != "fp32", spec.trainer.device == "cuda"
    for each in objections(gpu_facts(), bf16=bf16, trains=work in TRAINS, required=required):
        if each.refuses:
            raise UserError(each.text, where=f"trainer.device = {spec.trainer.device}", hint=each.hint)
        note(f"warning: {each.text}: {each.hint}")


def memory_remarks(spec: RunSpec, work: Work, *, folder: Path | None = None) -> list[str]:
    """What a run needs, what is free, and a warning if that is little.

    Raises:
        UserError: as `check_memory`.
    """
    models = known_models(spec, folder, fetch=False)
    if models is None:
        return []
    if warnings := list(verdicts(spec, models, work) if spec.run.check_memory else ()):
        return [f"memory: {text}" for text in warnings]
    return [f"memory: {sentence(each)}" for each in _memories(spec, models, work, alone=True)]


def known_models(spec: RunSpec, folder: Path | None, *, fetch: bool) -> Models | None:
    """The shapes of a run's models; None if that of the policy is unknown."""
    try:
        policy = known_shape(spec.model, fetch=fetch) if folder is None else shape_of_folder(folder)
        if policy is None:
            return None
        # A folder of another cluster is not on this machine: its model is counted as one of the policy's size.
        away = bool(spec.ray.address) and spec.runtime == "ray"
        rewards = tuple(
            policy if away and not folder.exists() else shape_of_folder(locate(folder).folder or folder)
            for folder in spec.scoring.model_folders
        )
    except (UserError, OSError):
        return None
    source = spec.critic.source
    critic = None if source is None else known_shape(ModelConfig(source=source, char=spec.model.char), fetch=fetch)
    return Models(policy=policy, critic=critic, rewards=tuple(shape for shape in rewards if shape is not None))


def verdicts(spec: RunSpec, models: Models, work: Work, *, alone: bool = True) -> Iterator[str]:
    """A warning for each memory that may be too small.

    Raises:
        UserError: one certainly is.
    """
    for each in _memories(spec, models, work, alone=alone):
        if each.refuses:
            hint = "or set run.check_memory = false to start anyway"
            where = f"model.source = {spec.model.source}"
            raise UserError(sentence(each), where=where, hint=f"{_cure(spec, models, work, alone)}; {hint}")
        if each.need.at_full_length > each.free.bytes:
            yield f"the run may be killed for lack of memory: it {sentence(each)}"


def sentence(found: Shortage) -> str:
    """The need by part, and what is free."""
    need, states = found.need, found.need.states
    held = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer state": states.optimizer,
        "libraries": need.libraries,
    }
    growing = {"activations": need.activations, "the engine's cache": need.cache}
    parts = ", ".join(f"{name} {size(count)}" for name, count in held.items() if count)
    more = " and ".join(f"{size(count)} of {name}" for name, count in growing.items() if count)
    limit = "" if found.free.limit == THIS_MACHINE else f" under {found.free.limit}"
    limit += f"; other processes use {size(found.elsewhere)}" if found.elsewhere > OWN_BYTES else ""
    grows = f"; at full length about {more} in addition" if more else ""
    return f"needs {size(need.at_least)} of {found.of} ({parts}{grows}), and {size(found.free.bytes)} are free{limit}"


def _memories(spec: RunSpec, models: Models, work: Work, *, alone: bool) -> Iterator[Shortage]:
    """The host memory, and that of the GPU that this process would use, with what is free of each."""
    in_actors = _in_actors(spec, work)
    on_gpu = work != "load" and computes_on_gpu(spec, work, in_actors=in_actors)
    need = needs(spec, models, work, on_gpu=on_gpu, alone=alone)
    # On one machine the sum of all processes is checked before they start, on a cluster each checks its own machine.
    own_host = alone != bool(spec.ray.address) if in_actors else True
    host = free_host_memory() if own_host else None
    if host is not None:
        # What this process already holds of the libraries is counted in the need.
        loaded = min(resident_bytes(), LIBRARIES)
        yield Shortage(need.host, FreeMemory(bytes=host.bytes + loaded, limit=host.limit), "memory")
    if need.gpu is not None and not (in_actors and alone):
        free, elsewhere = _free_on_gpu()
        yield Shortage(need.gpu, FreeMemory(bytes=free, limit=THIS_MACHINE), "GPU memory", elsewhere)


def _in_actors(spec: RunSpec, work: Work) -> bool:
    return spec.runtime == "ray" and work in ("rl", "supervised", "serve", "worker")


def may_use_gpu(spec: RunSpec, work: Work, *, in_actors: bool) -> bool:
    """Whether the process shall use a GPU if torch can; without loading torch, for a dry run."""
    if in_actors:
        asked = spec.ray.worker_gpus if work == "worker" else spec.ray.trainer_gpus
        return asked > 0
    return spec.trainer.device != "cpu" and any(path.exists() for path in GPU_DRIVERS)


def computes_on_gpu(spec: RunSpec, work: Work, *, in_actors: bool) -> bool:
    if in_actors or not may_use_gpu(spec, work, in_actors=in_actors):
        return may_use_gpu(spec, work, in_actors=in_actors)
    import torch

    return torch.cuda.is_available()


def _free_on_gpu() -> tuple[float, float]:
    """Bytes of the current GPU: free, with those that torch has reserved and not used; and used by other processes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return float(free + reserved - torch.cuda.memory_allocated()), float(total - free - reserved)


def _cure(spec: RunSpec, models: Models, work: Work, alone: bool) -> str:
    """The first change that makes the run fit, or the size of a model that would."""
    for text, changed in _changes(spec, work):
        if all(each.need.at_least <= each.free.bytes for each in _memories(changed, models, work, alone=alone)):
            return f"set {text}"
    shares = [
        max(each.free.bytes - each.need.libraries, 0.0) / each.need.states.total
        for each in _memories(spec, models, work, alone=alone)
        if each.need.states.total
    ]
    return f"give a smaller model: about {compact(min(shares) * models.policy.parameters)} parameters fit"


def _changes(spec: RunSpec, work: Work) -> Iterator[tuple[str, RunSpec]]:
    """Settings that save memory, with the configuration that has them."""

    def with_section(name: str, **changes: Any) -> RunSpec:
        return spec.model_copy(update={name: getattr(spec, name).model_copy(update=changes)})

    if work == "rl" and spec.schedule.max_policy_lag:
        yield "schedule.max_policy_lag = 0", with_section("schedule", max_policy_lag=0)
    if work == "rl" and spec.algorithm.needs_critic and spec.critic.kind == "own":
        yield 'critic.kind = "shared"', with_section("critic", kind="shared")
    if work == "rl" and spec.algorithm.kl_beta:
        yield "algorithm.kl_beta = 0", with_section("algorithm", kl_beta=0.0)
    if work in TRAINS and not spec.model.lora.enabled:
        lora = LoraConfig(rank=ADAPTER_RANK)
        yield f"model.lora.rank = {ADAPTER_RANK}, which trains an adapter", with_section("model", lora=lora)
