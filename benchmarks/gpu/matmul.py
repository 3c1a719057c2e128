"""Peak rate of matrix products, which model FLOPs utilisation (MFU) is measured against, and bandwidth of the memory.

python -m benchmarks.gpu.matmul [--device cpu --tiny]
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.rows import Rows, options, seconds

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
SIZES = (4096, 8192, 16384)
ROUNDS = 20
ELEMENT = 2  # bytes of bf16
BUFFER = 4 << 30  # bytes: larger than every cache


def main() -> int:
    found = options("Peak rate of matrix products.")
    if found is None:
        return 2
    rows = Rows("gpu_matmul", found)
    names = [name for name in DTYPES if rows.device.type == "cuda" or name in ("bf16", "fp32")]
    for name in names:
        for size in (256,) if rows.tiny else SIZES:
            rows.measure("matmul", partial(matmul, name, size, rows.device), dtype=name, size=size)
    rows.measure("memory", partial(memory, rows.device))
    return rows.finish()


def matmul(name: str, size: int, device: torch.device) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    left, right = (torch.randn(size, size, device=device, dtype=DTYPES[name]) for _ in range(2))
    out = torch.empty_like(left)
    took_s = seconds(lambda: torch.mm(left, right, out=out), device, ROUNDS if size > 1000 else 3)
    return {"seconds": took_s, "tflops": 2 * size**3 / took_s / 1e12}


def memory(device: torch.device) -> dict[str, Any]:
    """TB/s of copying and of summing a buffer."""
    elements = (BUFFER if device.type == "cuda" else BUFFER >> 8) // ELEMENT
    source = torch.ones(elements, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copied_s = seconds(lambda: target.copy_(source), device, ROUNDS)
    summed_s = seconds(lambda: source.view(-1, 8192).sum(1), device, ROUNDS)
    nbytes = elements * ELEMENT
    return {"copy_tb_per_s": 2 * nbytes / copied_s / 1e12, "read_tb_per_s": nbytes / summed_s / 1e12}


if __name__ == "__main__":
    sys.exit(main())
