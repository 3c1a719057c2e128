"""Speed of what a run consists of, with sizes that fit a session; the scripts of the same names measure more."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu import engine, train_step, tree_attention
from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from benchmarks.gpu.matmul import matmul
from benchmarks.gpu.qwen_shapes import SHAPES, TINY

ROUNDING = 0.01
"""Largest relative error of a bf16 product: inputs and output have 8 bits, sums are in fp32."""
ATTENTION = 0.02
"""Largest relative difference of two bf16 attentions."""


def matrix_products(rows: CheckRows) -> None:
    settings = rows.settings
    on_gpu = settings.device.type == "cuda"
    for dtype in ("bf16", "tf32", "fp32") if on_gpu else ("bf16", "fp32"):
        rows.measure(dtype, partial(matmul, dtype, 256 if settings.tiny else 8192, settings.device))
    rows.measure("bf16, rounding", partial(_rounding, settings), [Limit("relative_error", ROUNDING, "bf16")])


def _rounding(settings: Settings) -> dict[str, Any]:
    """Of the first rows of a product, against float64 on the CPU."""
    size = 128 if settings.tiny else 4096
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).bfloat16() for _ in range(2))
    expected = left[:64].double() @ right.double()
    found = torch.mm(left.to(settings.device), right.to(settings.device))[:64].cpu().double()
    return {"relative_error": float((found - expected).norm() / expected.norm())}


def engine_speed(rows: CheckRows) -> None:
    shape = TINY if rows.settings.tiny else SHAPES["0.6B"]
    sizes = (
        {"tiny": (2, 3, 12, 8)}
        if rows.settings.tiny
        else {"512 + 256": (32, 8, 512, 256), "64 + 128": (32, 8, 64, 128)}
    )
    device = rows.settings.device
    for name, (groups, size, prompt, new_tokens) in sizes.items():
        asked = engine.requests(shape, groups, size, prompt, new_tokens)
        samples = f"{shape.name}, {groups * size} samples of {name}"
        rows.measure(f"embedded, {samples}", partial(engine.embedded, shape, asked, device))
    asked = engine.requests(shape, *next(iter(sizes.values())))
    rows.measure(f"decode step, {shape.name}", partial(engine.decode_step, shape, asked, device))
    rows.measure("vllm", partial(engine.vllm, shape, asked, device))
    rows.measure("vllm alone", partial(engine.vllm_alone, shape, asked))


def training_speed(rows: CheckRows) -> None:
    settings = rows.settings
    shape = TINY if settings.tiny else SHAPES["1.7B"]
    work = train_step.random_work(shape, tiny=settings.tiny)
    peak = matmul("bf16", 8192, settings.device)["tflops"] if settings.device.type == "cuda" else None
    for way in ("shared", "padded", "unshared"):
        measure = partial(train_step.step, shape, work, way, settings.device, peak, lora=False)
        rows.measure(f"{shape.name}, {way}", measure)


def tree_attention_speed(rows: CheckRows) -> None:
    settings = rows.settings
    shapes = [(2, 20, 20)] if settings.tiny else tree_attention.SHAPES
    names = ("output", "d_query", "d_key", "d_value") if settings.device.type == "cuda" else ("output",)
    limits = [Limit(f"{name}_relative", ATTENTION, "dense mask, bf16") for name in names]
    if settings.device.type == "cuda":
        limits.append(Limit("different_bits", 0, "two backward passes of FlexAttention"))
    for shape in shapes:
        samples, prompt, completion = shape
        rounds = 1 if settings.tiny else 3
        measure = partial(tree_attention.measured, *shape, device=settings.device, rounds=rounds)
        rows.measure(f"{samples} samples of {prompt} + {completion}", measure, limits)
