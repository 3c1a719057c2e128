"""Speed of what a run consists of, with sizes that fit a session; the scripts of the same names measure more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import engine, train_step, tree_attention
from benchmarks.gpu.check_rows import CheckRows, Limit, Settings, Skip
from benchmarks.gpu.device_peaks import peak_tflops, share_of_bound
from benchmarks.gpu.matmul import matmul, memory
from benchmarks.gpu.qwen_shapes import SHAPES, TINY, Shape, random_model
from benchmarks.gpu.rows import seconds as seconds_of
from tidemill.models.weights_digest import weights_digest

ROUNDING = 0.01
"""Largest relative error of a bf16 product: inputs and output have 8 bits, sums are in fp32."""
ATTENTION = 0.02
"""Largest relative difference of two bf16 attentions."""
TARGET = "target of the project"
OF_BOUND = [Limit("share_of_bound", 0.6, TARGET, least=True)]
OF_TRANSFORMERS = [Limit("times_faster", 3.0, TARGET, least=True)]
PADDED = 3.0
"""Least ratio of the times of transformers' padded step and of one in shared trees; 8 samples of 512 + 256 tokens."""
DIGEST = 0.01
"""Largest share of a step that the digest of its weights may take."""


def matrix_products(rows: CheckRows) -> None:
    settings = rows.settings
    on_gpu = settings.device.type == "cuda"
    for dtype in ("bf16", "tf32", "fp32") if on_gpu else ("bf16", "fp32"):
        rows.measure(dtype, partial(matmul, dtype, 256 if settings.tiny else 8192, settings.device))
    rows.measure("memory", partial(memory, settings.device))
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
    """Targets are limits on a GPU only."""
    settings = rows.settings
    shape, on_gpu = TINY if settings.tiny else SHAPES["0.6B"], settings.device.type == "cuda"
    sizes = [(2, 3, 12, 8)] if settings.tiny else [(32, 8, 512, 512), (32, 8, 512, 256), (32, 8, 64, 128)]
    first = f"{shape.name}, {_named(sizes[0])}"
    asked = engine.requests(shape, *sizes[0])
    bound = partial(share_of_bound, shape, sizes[0], settings.device)

    def measured(name: str, generate: Callable[[], dict[str, Any]], limits: Sequence[Limit] = ()) -> dict[str, Any]:
        found = rows.measure(f"{name}, {first}", partial(engine.with_bound, generate, bound), limits)
        return dict(found["figures"])

    own = measured("embedded", partial(engine.embedded, shape, asked, settings.device), OF_BOUND if on_gpu else ())
    rows.measure(f"decode step, {shape.name}", partial(engine.decode_step, shape, asked, settings.device))
    for each in sizes[1:]:
        again = engine.requests(shape, *each)
        generate = partial(engine.embedded, shape, again, settings.device)
        reached = partial(share_of_bound, shape, each, settings.device)
        rows.measure(f"embedded, {shape.name}, {_named(each)}", partial(engine.with_bound, generate, reached))
    others = measured("transformers", partial(engine.transformers_batches, shape, asked, settings.device))
    rows.measure("embedded against transformers", partial(_times, own, others), OF_TRANSFORMERS if on_gpu else ())
    measured("vllm", partial(engine.vllm, shape, asked, settings.device))
    measured("vllm alone", partial(engine.vllm_alone, shape, asked))


def _named(sizes: tuple[int, int, int, int]) -> str:
    groups, size, prompt, new_tokens = sizes
    return f"{groups * size} samples of {prompt} + {new_tokens}"


def _times(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How many times as fast one is as the other on equal work.

    Raises:
        Skip: one of them was not measured.
    """
    if "seconds" not in own or "seconds" not in other:
        raise Skip("one of them was not measured")
    return {"times_faster": other["seconds"] / own["seconds"]}


def training_speed(rows: CheckRows) -> None:
    """Targets are limits on a GPU only."""
    settings = rows.settings
    on_gpu = settings.device.type == "cuda"
    peak = peak_tflops(settings.device) if on_gpu else None
    seconds: dict[str, dict[str, Any]] = {}
    for shape, completion, ways, mfu in (
        (SHAPES["1.7B"], 512, ("shared", "padded", "unshared"), 0.45),
        (SHAPES["1.7B"], 256, ("shared", "padded"), None),
        (SHAPES["0.6B"], 512, ("shared",), 0.35),
    ):
        model = TINY if settings.tiny else shape
        work = train_step.random_work(model, tiny=settings.tiny, completion=completion)
        samples, length = work.tokens.shape
        size = f"{samples // work.group_size} × {work.group_size} × ({work.prompt} + {length - work.prompt})"
        for way in ways:
            limits = [Limit("mfu", mfu, TARGET, least=True)] if way == "shared" and mfu and on_gpu else []
            measure = partial(train_step.step, model, work, way, settings.device, peak, lora=False)
            seconds[way] = rows.measure(f"{model.name}, {way}, {size}", measure, limits)["figures"]
        if completion == 256:
            limits = [Limit("times_faster", PADDED, TARGET, least=True)] if on_gpu else []
            measure = partial(_times, seconds["shared"], seconds["padded"])
            rows.measure(f"{model.name}, shared against padded, {size}", measure, limits)
        if completion == 512 and shape.name == "1.7B":
            limits = [Limit("share_of_step", DIGEST, TARGET)] if on_gpu else []
            rows.measure(f"digest, {model.name}", partial(_digest_share, settings, model, seconds["shared"]), limits)


def _digest_share(settings: Settings, shape: Shape, step: Mapping[str, Any]) -> dict[str, Any]:
    """The digest of fp32 weights after a step, and its share of the step."""
    model = random_model(shape, settings.device, torch.float32)
    took_s = seconds_of(partial(weights_digest, model), settings.device, 3)
    return {"seconds": took_s, "share_of_step": took_s / step["seconds"]}


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
