"""Kernels on a CPU, in Triton's interpreter, which shows neither races nor speed.

The interpreter must be chosen before Triton is imported, and transformers imports Triton: tests of kernels are files of
cases, which pytest runs in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
DEADLINE_S = 290.0


def run_cases(*paths: Path) -> None:
    """Fail with pytest's report if a test in `paths` fails in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, paths)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


def multiply_bf16() -> None:
    """Let the interpreter multiply matrices in bf16. Triton 3.7 multiplies their bits as 16-bit integers."""
    from triton.runtime.interpreter import InterpreterBuilder

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.matmul(_float32(a), _float32(b), dtype=d.data.dtype)
        return type(d)(product + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _float32(operand: Any) -> np.ndarray[Any, Any]:
    if operand.dtype.scalar.name != "bf16":
        return np.asarray(operand.data)
    return torch.from_numpy(operand.data.view(np.int16)).view(torch.bfloat16).float().numpy()


def round_to_bf16() -> None:
    """Let the interpreter round to bf16 as GPUs do, to nearest even. Triton 3.7 truncates."""
    from triton.runtime.interpreter import InterpreterBuilder

    truncate = InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, dtype: Any) -> Any:
        if dtype.scalar.name != "bf16":
            return truncate(self, source, dtype)
        rounded = torch.from_numpy(source.data).bfloat16().view(torch.int16).numpy()
        return type(source)(rounded.view(np.uint16), dtype.scalar)

    InterpreterBuilder.create_fp_trunc = create_fp_trunc
