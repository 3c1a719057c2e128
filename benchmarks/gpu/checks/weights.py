"""Weights of a model on the device: digest, snapshot, binding and export equal those on the CPU; and their speed."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.check_rows import CheckRows, Limit, Settings
from benchmarks.gpu.qwen_shapes import SHAPES, TINY, random_model
from benchmarks.gpu.rows import wait
from tidemill.models.snapshots import Bytes, bind_snapshot, empty_copy, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.models.weights_digest import bit_sum, weights_digest
from tidemill.weights.snapshot import allocate, checksum

BF16 = torch.bfloat16
SAME = "the same bytes as on the CPU"
BYTES_4B = 8.04e9  # of a snapshot of Qwen3-4B


def weights(rows: CheckRows) -> None:
    settings = rows.settings
    model = random_model(TINY if settings.tiny else SHAPES["0.6B"], settings.device, torch.float32)
    on_cpu = copy.deepcopy(model).cpu()
    rows.measure("digest", partial(_digest, settings, model, on_cpu), [Limit("differ", 0, SAME)])
    rows.measure("sums of bits", partial(_bit_sums, model, on_cpu), [Limit("differ", 0, SAME)])
    for pinned in (False, True):
        name = f"snapshot, {'pinned' if pinned else 'pageable'}"
        measure = partial(_snapshot, settings, model, on_cpu, pinned=pinned)
        limits = [Limit("differ", 0, SAME), Limit("bound_differ", 0, "bound again")]
        if settings.device.type == "cuda":
            limits.append(Limit("swap_of_4b_s", 1.0, "target of the project: written and bound at this rate"))
        rows.measure(name, measure, limits)
    rows.measure("export", partial(_export, settings, model, on_cpu), [Limit("differ", 0, "loaded by transformers")])


def _timed(function: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def _bytes_of(model: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _digest(settings: Settings, model: PreTrainedModel, on_cpu: PreTrainedModel) -> dict[str, Any]:
    found = weights_digest(model)  # loads kernels
    took_s = _timed(partial(weights_digest, model), settings.device)
    return {
        "seconds": took_s,
        "gb_per_s": _bytes_of(model) / took_s / 1e9,
        "differ": int(found != weights_digest(on_cpu)),
    }


def _bit_sums(model: PreTrainedModel, on_cpu: PreTrainedModel) -> dict[str, Any]:
    pairs = zip(model.parameters(), on_cpu.parameters(), strict=True)
    return {"differ": sum(int(bit_sum([one])) != int(bit_sum([two])) for one, two in pairs)}


def _snapshot(settings: Settings, model: PreTrainedModel, on_cpu: PreTrainedModel, *, pinned: bool) -> dict[str, Any]:
    """Write a bf16 snapshot to host memory, and make a copy of the model compute with it."""
    if pinned and settings.device.type == "cpu":
        pinned = False  # there is nothing to pin memory for
    layout = snapshot_layout(model, BF16)
    buffer, expected = _buffer(snapshot_bytes(layout), pinned=pinned), allocate(snapshot_bytes(layout))
    buffer[:], expected[:] = 0, 0  # the gaps, too
    written_s = _timed(partial(write_snapshot, model, layout, buffer), settings.device)
    write_snapshot(on_cpu, layout, expected)
    twin = empty_copy(model, BF16)
    bind_snapshot(twin, layout, buffer)  # allocates
    bound_s = _timed(partial(bind_snapshot, twin, layout, buffer), settings.device)
    again = allocate(len(buffer))
    again[:] = 0
    write_snapshot(twin, layout, again)
    return {
        "gb": len(buffer) / 1e9,
        "write_s": written_s,
        "bind_s": bound_s,
        "swap_of_4b_s": (written_s + bound_s) * BYTES_4B / len(buffer),
        "differ": int(checksum(buffer) != checksum(expected)),
        "bound_differ": int(checksum(again) != checksum(expected)),
    }


def _buffer(nbytes: int, *, pinned: bool) -> Bytes:
    if not pinned:
        return allocate(nbytes)
    buffer: Bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return buffer


def _export(settings: Settings, model: PreTrainedModel, on_cpu: PreTrainedModel) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tidemill-gpu-") as folder:
        took_s = _timed(partial(model.save_pretrained, folder), settings.device)
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        "seconds": took_s,
        "gb": nbytes / 1e9,
        "differ": int(weights_digest(loaded) != weights_digest(on_cpu)),
    }
