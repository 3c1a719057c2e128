"""The peak of matrix products and the bandwidth of the memory of a device, measured on it; and the shortest time of
decoding that this bandwidth allows.

Decoding reads in every step the weights once, and the keys and values of every token once; a prompt that samples share
counts once. The time to read the prompts, and to write keys and values, is not counted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from benchmarks.gpu.matmul import ELEMENT, matmul, memory
from benchmarks.gpu.qwen_shapes import Shape, matrix_parameters

LARGEST = 8192  # of the product that gives the peak


@cache
def peak_tflops(device: torch.device) -> float:
    """Of a bf16 product."""
    return float(matmul("bf16", LARGEST if device.type == "cuda" else 256, device)["tflops"])


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second of the faster of copying (read and written bytes) and reading."""
    return float(max(memory(device).values())) * 1e12


def decoding_bytes(shape: Shape, groups: int, size: int, prompt: int, new_tokens: int) -> int:
    """Read while `groups * size` samples are decoded together, each to `new_tokens` tokens after its prompt."""
    token = 2 * shape.layers * shape.kv_heads * shape.head_dim * ELEMENT
    own = groups * size * new_tokens * (new_tokens - 1) // 2
    return new_tokens * (ELEMENT * matrix_parameters(shape) + token * groups * prompt) + token * own


def share_of_bound(
    shape: Shape, sizes: tuple[int, int, int, int], device: torch.device, took_s: float
) -> dict[str, Any]:
    """The bound of decoding in seconds, and which share of the rate that it allows was reached."""
    bound_s = decoding_bytes(shape, *sizes) / bandwidth(device)
    return {"bound_s": bound_s, "share_of_bound": bound_s / took_s}
