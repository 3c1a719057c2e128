"""Prints torch's view of this machine as one JSON line; a separate process, so a broken torch cannot break `doctor`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ROUNDS = 7
ROWS, WIDTH, HIDDEN = 256, 576, 1536  # a 135M-parameter model's feed-forward layer


def probe() -> dict[str, Any]:
    """Version, GPUs, and the time of one layer's matrix product with one thread, all threads, and bf16."""
    import torch
    from msgspec import to_builtins

    from tidemill.runtime.gpu_facts import gpu_facts

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {
        "version": torch.__version__,
        "gpus": [to_builtins(gpu_facts(index)) for index in range(gpus)],
        "no_gpu": to_builtins(gpu_facts()) if not gpus else {},
        "threads": {},
    }
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        found["threads"][str(threads)] = _seconds(torch.float32)
    torch.set_num_threads(1)
    found["bf16_s"] = _seconds(torch.bfloat16)
    found["gflops"] = 2e-9 * ROWS * WIDTH * HIDDEN / found["threads"]["1"]
    return found


def _seconds(dtype: Any) -> float:
    """Median time of a few rounds."""
    import torch

    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(HIDDEN, WIDTH, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        rounds.append(time.perf_counter() - start)
    return sorted(rounds)[ROUNDS // 2]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
