"""Peak memory of a training step against the memory plan, and of the engine's cache while it grows.

On a CPU the same code runs, and nothing is counted.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import train_step
from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from benchmarks.gpu.qwen_shapes import SHAPES, TINY, Shape, config_fields
from benchmarks.gpu.rows import peak_gb, wait
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.model_config import shape_of_config
from tidemill.hardware.trainer_profile import Recompute
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.states import Load, MemoryQuestion
from tidemill.rollout.engines.embedded.cache import SlotCache

PLANNED = 1.2
"""Largest ratio of the peak to the plan: what a run's own check of its memory allows."""
CACHE = 1.5
"""Largest ratio of the memory that growing takes from the device to that of the final cache."""
GB = 1e9


def memory(rows: CheckRows) -> None:
    settings = rows.settings
    for shape in (TINY,) if settings.tiny else (SHAPES["0.6B"], SHAPES["1.7B"]):
        rows.measure(
            f"training, {shape.name}",
            partial(_training, settings, shape),
            [Limit("peak_to_plan", PLANNED, "plan memory: states, activations, logits")],
        )
    rows.measure("engine cache", partial(_growing_cache, settings), [Limit("reserved_to_final", CACHE, "reallocation")])
    largest = TINY if settings.tiny else SHAPES["4B"]
    rows.measure(
        f"does it fit, {largest.name}",
        partial(_fits, settings, largest),
        [Limit("plan_is_wrong", 0, "the plan says whether it fits the free memory")],
    )


def _training(settings: Settings, shape: Shape) -> dict[str, Any]:
    work = train_step.random_work(shape, tiny=settings.tiny)
    found = train_step.step(shape, work, "shared", settings.device, None, lora=False)
    recompute: Recompute = "full" if found["recomputes"] else "none"
    planned_gb, peak = _planned_gb(shape, work, recompute), found["peak_memory_gb"]
    return {
        "recomputation": found["recomputation"],
        "peak_gb": peak,
        "planned_gb": planned_gb,
        "peak_to_plan": None if peak is None else peak / planned_gb,
        "reserved_gb": torch.cuda.max_memory_reserved() / GB if settings.device.type == "cuda" else None,
    }


def _planned_gb(shape: Shape, work: train_step.Work, recompute: Recompute = "full") -> float:
    """States, activations and logits of a step."""
    nodes = train_step.tree_of(next(train_step.split(work, share=True)), share=True).size
    question = MemoryQuestion(
        algorithm="sft",  # one model that is trained and generates nothing
        shape=shape_of_config(config_fields(shape), source=shape.name),
        gpu=load_catalog().gpu("h100-80gb"),  # of no importance for the parts
        load=Load(context=work.tokens.shape[1], microbatch_tokens=nodes, recompute=recompute),
    )
    parts = plan_memory(question).parts
    return (parts.states + parts.activations + parts.logits) / GB


def _fits(settings: Settings, shape: Shape) -> dict[str, Any]:
    """A step of one group, and whether memory suffices as planned."""
    whole = train_step.random_work(shape, tiny=settings.tiny)
    group = whole.group_size
    work = dataclasses.replace(whole, tokens=whole.tokens[:group], advantages=whole.advantages[:group])
    planned_gb = _planned_gb(shape, work)
    on_gpu = settings.device.type == "cuda"
    free_gb = torch.cuda.mem_get_info()[0] / GB if on_gpu else None
    try:
        train_step.step(shape, work, "shared", settings.device, None, lora=False)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    return {
        "fits": fits,
        "planned_gb": planned_gb,
        "free_gb": free_gb,
        "plan_is_wrong": None if free_gb is None else int(fits != (planned_gb <= free_gb)),
        "peak_gb": peak_gb(settings.device),
    }


def _growing_cache(settings: Settings) -> dict[str, Any]:
    """Keys and values of 256 rows that grow to 1,024 tokens, as the embedded engine reserves them."""
    shape = TINY if settings.tiny else SHAPES["0.6B"]
    rows, context = (4, 64) if settings.tiny else (256, 1024)
    like = torch.empty(1, shape.kv_heads, 1, shape.head_dim, dtype=torch.bfloat16, device=settings.device)
    cache = SlotCache(rows=rows, context=context, device=settings.device)
    growths = 0
    began = time.perf_counter()
    for length in range(1, context + 1):
        before = cache.capacity
        cache.reserve(length)
        growths += cache.capacity > before
        for layer in range(shape.layers):
            cache.layer(layer, like, like)
    wait(settings.device)
    took_s = time.perf_counter() - began
    final = 2 * shape.layers * rows * shape.kv_heads * cache.capacity * shape.head_dim * like.element_size()
    reserved = torch.cuda.max_memory_reserved() if settings.device.type == "cuda" else None
    return {
        "final_gb": final / GB,
        "reserved_to_final": None if reserved is None else reserved / final,
        "growths": growths,
        "seconds": took_s,
    }
