"""What a GPU cannot do for a run, judged from facts that are read before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.core.formatting import size
from tidemill.core.records import Record

LEAST_CAPABILITY = (8, 0)
"""Of bfloat16 in hardware, and of Tidemill's Triton kernels: NVIDIA's Ampere and later."""
OWN_BYTES = 1e9
"""Of a GPU's memory that its driver and this process's context may use (0.6 GB on an H200)."""


class GpuFacts(Record):
    """A GPU, its driver and the packages that use it; empty and 0 where unknown."""

    name: str = ""  # "": torch can use no GPU
    driver: str = ""  # version
    driver_cuda: str = ""  # the newest version of CUDA that the driver supports
    torch_cuda: str = ""  # the version that torch is built for; "": for CPUs only
    capability: tuple[int, int] = (0, 0)  # compute capability
    memory_bytes: float = 0.0
    free_bytes: float = 0.0
    used_elsewhere_bytes: float = 0.0  # neither free nor used by this process
    other_processes: int = 0
    triton: str = ""  # version
    compiler: bool = True  # of C: Triton compiles what launches its kernels
    nvidia: bool = True

    @property
    def shared(self) -> bool:
        return self.other_processes > 0 or self.used_elsewhere_bytes > OWN_BYTES


class Objection(Record):
    """Why a run is refused, or slower than it could be."""

    text: str
    hint: str
    refuses: bool


def objections(facts: GpuFacts, *, bf16: bool, trains: bool, required: bool = True) -> Iterator[Objection]:
    """Every objection to a run on this GPU.

    Args:
        bf16: weights are rounded to bfloat16.
        trains: and not only generates.
        required: the run may not use the CPU instead.
    """
    if not facts.name:
        text, hint = _unusable(facts)
        yield Objection(text=text if required else f"{text}; the CPU is used", hint=hint, refuses=required)
        return
    if facts.nvidia and facts.capability < LEAST_CAPABILITY:
        what = f"{facts.name} has compute capability {facts.capability[0]}.{facts.capability[1]}"
        text = f"{what}; bfloat16 needs 8.0" if bf16 else f"{what}; Tidemill's kernels need 8.0, torch's are slower"
        hint = 'set trainer.precision = "fp32", or use a newer GPU' if bf16 else "use a newer GPU"
        yield Objection(text=text, hint=hint, refuses=bf16)
    if not facts.triton or not facts.compiler:
        text = "Triton finds no C compiler" if facts.triton else "Triton is not installed"
        text += ", and attention in token trees is compiled with it" if trains else ": torch's kernels are slower"
        hint = "install gcc, or name a compiler in CC" if facts.triton else "pip install triton"
        yield Objection(text=text, hint=hint, refuses=trains)
    if facts.shared:
        count = f" ({facts.other_processes})" if facts.other_processes else ""
        used = f"{size(facts.used_elsewhere_bytes)} of {size(facts.memory_bytes)} are used elsewhere"
        text = f"{facts.name} is shared with other processes{count}: {used}, and the run is slower"
        hint = "stop them (nvidia-smi), or choose another GPU with CUDA_VISIBLE_DEVICES"
        yield Objection(text=text, hint=hint, refuses=False)


def _unusable(facts: GpuFacts) -> tuple[str, str]:
    """Why torch can use no GPU of this machine, and what helps."""
    if not facts.torch_cuda:
        return "torch is built for CPUs only, and the machine has a GPU", "install a torch that is built for the GPU"
    if facts.driver_cuda and _major(facts.driver_cuda) < _major(facts.torch_cuda):
        driver = f"the driver {facts.driver}".strip()
        text = f"{driver} supports CUDA up to {facts.driver_cuda}, and torch is built for {facts.torch_cuda}"
        hint = f"update the driver, or install a torch that is built for CUDA {_major(facts.driver_cuda)}"
        return text, hint
    return "torch cannot use the GPU of this machine", "see nvidia-smi and CUDA_VISIBLE_DEVICES"


def _major(version: str) -> int:
    """Minor versions of CUDA are compatible with each other."""
    return int(version.partition(".")[0])
