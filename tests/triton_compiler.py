"""Compiles kernels as a launcher calls them, for GPUs that this machine does not have."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TENSORS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
NUMBERS = {int: "i32", float: "fp32"}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
WARP = 32
ALIGNMENT = 16  # bytes of an address, or a factor of an integer, by which Triton specialises a kernel


@dataclass(slots=True)
class Launch:
    """A kernel, and the arguments of one call."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def compile(self, capability: int) -> Compiled:
        constants, signature, attributes = {}, {}, {}
        for at, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            specialised = not parameter.do_not_specialize and not isinstance(value, float)
            if parameter.is_constexpr or (specialised and isinstance(value, int) and value == 1):
                constants[at,] = value
                signature[parameter.name] = "constexpr"
                continue
            tensor = isinstance(value, torch.Tensor)
            signature[parameter.name] = TENSORS[value.dtype] if tensor else NUMBERS[type(value)]
            if specialised and (value.data_ptr() if tensor else value) % ALIGNMENT == 0:
                attributes[at,] = [["tt.divisibility", ALIGNMENT]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=self.options)
        return Compiled(ptx=compiled.asm["ptx"], cubin=compiled.asm["cubin"], shared_bytes=compiled.metadata.shared)


@dataclass(slots=True)
class Compiled:
    ptx: str
    cubin: bytes
    shared_bytes: int

    def usage(self, folder: Path) -> dict[str, int]:
        """Registers ("REG") and bytes of spilled registers ("STACK") of a thread."""
        file = folder / "kernel.cubin"
        file.write_bytes(self.cubin)
        program = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
        shown = subprocess.run([program, "-res-usage", file], capture_output=True, text=True, timeout=30, check=True)
        return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", shown.stdout + shown.stderr)}


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            names = [parameter.name for parameter in self._kernel.params]
            arguments = {**dict(zip(names, values, strict=False)), **named}
            assert set(arguments) == set(names)
            self._launches.append(Launch(self._kernel, grid, arguments, options))

        return launch


def record(monkeypatch: pytest.MonkeyPatch, module: Any, *kernels: str) -> list[Launch]:
    """Record the launches of a module's kernels instead of running them."""
    launches: list[Launch] = []
    for name in kernels:
        monkeypatch.setattr(module, name, _Recorder(getattr(module, name), launches))
    return launches
