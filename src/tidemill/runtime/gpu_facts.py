"""Reads the facts of a GPU that `hardware.gpu_check` judges."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
from msgspec.structs import replace

from tidemill.hardware.gpu_check import GpuFacts
from tidemill.kernels.availability import c_compiler_found

DRIVER = Path("/proc/driver/nvidia/version")


def gpu_facts(index: int = 0) -> GpuFacts:
    """Of a GPU, or of a machine where torch can use none. A process that did not use the GPU yet gets a context."""
    known = GpuFacts(
        driver=_driver(),
        driver_cuda=_driver_cuda(),
        torch_cuda=torch.version.cuda or torch.version.hip or "",
        nvidia=torch.version.hip is None,
    )
    if not torch.cuda.is_available():
        return known
    used_before = torch.cuda.is_initialized()
    properties = torch.cuda.get_device_properties(index)
    processes = _processes(f"GPU-{properties.uuid}") - used_before
    free, total = torch.cuda.mem_get_info(index)
    return replace(
        known,
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=total,
        free_bytes=free,
        used_elsewhere_bytes=total - free - torch.cuda.memory_reserved(index),
        other_processes=max(0, processes),
        triton=_triton(),
        compiler=c_compiler_found(),
    )


def _triton() -> str:
    """Version of Triton, whose distributions have several names; "" if it cannot be imported."""
    with suppress(Exception):
        return str(import_module("triton").__version__)
    return ""


def _driver(file: Path = DRIVER) -> str:
    """Version of the NVIDIA driver."""
    with suppress(OSError):
        if found := re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text(encoding="utf-8", errors="replace")):
            return found[1]
    return ""


def _driver_cuda() -> str:
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else ""


def _processes(uuid: str) -> int:
    """Processes that compute on a GPU, by NVML; 0 without it."""
    with suppress(Exception):
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        return len(nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid.encode())))
    return 0
