"""Bytes per publish: SmolLM2 is trained, and published in bf16 after every step."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.subjects import check_counts
from tidemill.config.load import RECIPES, load_spec
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion, StepMetrics
from tidemill.jobs.train import train
from tidemill.models.snapshots import snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Blob, MemoryTransport, Snapshot, allocate
from tidemill.weights.store import WeightStore

T = TypeVar("T")

RECIPE = RECIPES / "smollm2-addition.toml"


@dataclass(frozen=True, kw_only=True)
class Publish:
    """One step. `encode_s` includes checksums of the snapshot, `apply_s` those of the result."""

    step: int
    changed: float  # share of elements
    pulled_nbytes: int  # delta and manifests
    full_nbytes: int
    encode_s: float
    apply_s: float
    identical: bool  # every byte of every tensor


@dataclass
class Stopwatch:
    """Implements `core.protocols.Compute` inline, and measures the time."""

    seconds: float = 0.0

    async def run(self, function: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return function()
        finally:
            self.seconds += time.perf_counter() - began


@dataclass
class Watcher:
    """Publishes and pulls after every step, and compares the result with the source."""

    publishes: list[Publish] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._publishing, self._pulling = Stopwatch(), Stopwatch()
        transport = MemoryTransport(zero_copy=False)
        self._store = WeightStore(transport, compute=self._publishing)
        self._puller = Puller(transport, self._pulling, clock=LoopClock())
        self._held: list[Snapshot] = []
        self._last: Blob | None = None

    async def step(self, model: PreTrainedModel, number: int) -> None:
        layout = snapshot_layout(model, torch.bfloat16)
        snapshot = allocate(snapshot_bytes(layout))
        snapshot[:] = 0  # including the gaps between tensors
        write_snapshot(model, layout, snapshot)
        version = PolicyVersion(number=number, digest=str(number))
        self._publishing.seconds = self._pulling.seconds = 0.0
        await self._store.make_room()
        manifest = await self._store.publish(version, layout, snapshot)
        pulled = await self._puller.prepare(version)
        self._puller.swap(pulled, self._held.extend)
        del self._held[:-1]
        if self._last is not None:
            made = self._held[-1].buffer
            changed = np.count_nonzero(self._last.view(np.uint16) != snapshot.view(np.uint16))
            self.publishes.append(
                Publish(
                    step=number,
                    changed=changed / sum(entry.nbytes // 2 for entry in layout),
                    pulled_nbytes=pulled.nbytes,
                    full_nbytes=manifest.nbytes,
                    encode_s=self._publishing.seconds,
                    apply_s=self._pulling.seconds,
                    identical=all(
                        np.array_equal(made[e.offset : e.offset + e.nbytes], snapshot[e.offset : e.offset + e.nbytes])
                        for e in layout
                    ),
                )
            )
        self._last = snapshot


def check_publishes(publishes: Sequence[Publish]) -> None:
    """Raises RuntimeError: a step changed no weights, or a worker that pulled its version has other bytes."""
    for one in publishes:
        check_counts(f"step {one.step}", changed_weights=one.changed)
        if not one.identical:
            raise RuntimeError(f"step {one.step}: the pulled weights differ from the published ones")


def publishes_of_a_run(model: Path, *, learning_rate: float, steps: int, more: Sequence[str] = ()) -> list[Publish]:
    """Train the demo's recipe at another learning rate with additional arguments; one row per step.

    Raises:
        RuntimeError: see `check_publishes`.
    """
    watcher = Watcher()
    finish_batch = PolicyTrainer.finish_batch

    def watched(self: PolicyTrainer, step: int) -> StepMetrics:  # on the compute thread, where no loop runs
        if step == 1:
            asyncio.run(watcher.step(self.model, 0))
        metrics = finish_batch(self, step)
        asyncio.run(watcher.step(self.model, step))
        return metrics

    PolicyTrainer.finish_batch = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory(prefix="tidemill-weights-") as folder:
            given = ["--run.dir", f"{folder}/run", "--model.source", str(model), "--trainer.steps", str(steps)]
            given += ["--optimizer.learning_rate", str(learning_rate), "--trainer.threads", "1"]
            given += ["--trainer.precision", "fp32", "--eval.every_steps", "0", "--eval.prompts", "1"]
            given += ["--checkpoint.every_steps", "0", "--telemetry.live", "false", *more]
            train(load_spec([f"@{RECIPE}", *given]))
    finally:
        PolicyTrainer.finish_batch = finish_batch  # type: ignore[method-assign]
    check_publishes(watcher.publishes)
    return watcher.publishes
