"""Whether a device can run Triton kernels."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

MIN_CAPABILITY = (8, 0)
"""The first with bf16 matrix units and asynchronous copies (A100)."""


def interpreted() -> bool:
    """Whether Triton's interpreter, which works on CPU tensors, replaces its compiler."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def c_compiler_found() -> bool:
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def missing(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`; None if they can."""
    if device.type != "cuda" and not interpreted():
        return f"Triton has no kernels for a {device.type.upper()}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None
    if not c_compiler_found():
        return "Triton needs a C compiler, gcc or clang"  # it compiles the functions that launch its kernels
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and Triton's kernels need {needed}"
    return None
