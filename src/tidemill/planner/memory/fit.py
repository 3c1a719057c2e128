"""How many GPUs hold a run, and why fewer do not."""

from __future__ import annotations

import math

from tidemill.core.records import Record
from tidemill.planner.memory.per_gpu import Shares, engine_gpus, generates_here
from tidemill.planner.memory.question import MemoryQuestion

SHOWN = 6
ROUNDING = 1e-12


class Fit(Record):
    """One number of GPUs, tried."""

    gpus: int
    bytes_per_gpu: float
    usable_bytes: float

    @property
    def missing_bytes(self) -> float:
        """On every GPU; 0 where it fits. Less than one byte is rounding."""
        missing = self.bytes_per_gpu - self.usable_bytes
        return missing if missing >= 1 else 0.0

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


def usable(question: MemoryQuestion) -> float:
    return question.gpu.memory_bytes * (1 - question.margin)


def training_unit(question: MemoryQuestion) -> int:
    """Training takes multiples of so many GPUs."""
    parallel = question.parallel
    return parallel.model_gpus * (parallel.fsdp or parallel.ep)


def unit(question: MemoryQuestion) -> int:
    """With whole engines on them, too, GPUs come in multiples of this."""
    engine = engine_gpus(question) if generates_here(question) else 1
    return math.lcm(training_unit(question), engine)


def fit(question: MemoryQuestion, parts: Shares, gpus: int) -> Fit:
    """With so many GPUs, a multiple of `unit`."""
    parallel = question.parallel
    shards = parallel.fsdp * parallel.model_gpus if parallel.fsdp else gpus
    return Fit(gpus=gpus, bytes_per_gpu=parts.on_one(shards=shards, gpus=gpus), usable_bytes=usable(question))


def fewest_gpus(question: MemoryQuestion, parts: Shares) -> int | None:
    """The smallest number that holds everything; None where no number does, as what is not sharded is too much."""
    step, parallel = unit(question), question.parallel
    per_gpu = parts.fixed + (parts.states / (parallel.fsdp * parallel.model_gpus) if parallel.fsdp else 0.0)
    sharded = parts.kv + (0.0 if parallel.fsdp else parts.states)
    room = usable(question) - per_gpu
    if room < 0 or (room == 0 and sharded > 0):
        return None
    return rounded_up(sharded / room if sharded else 1, step)


def rounded_up(gpus: float, step: int) -> int:
    """To the next multiple of `step`, at least one of them; what a division is too large by does not count."""
    return max(math.ceil(gpus / step * (1 - ROUNDING)), 1) * step


def tried(question: MemoryQuestion, parts: Shares, fewest: int | None) -> list[Fit]:
    """From one machine's worth on, doubling, up to the first that fits; the fewest itself and the next fewer."""
    step = unit(question)
    machine = rounded_up(question.gpu.gpus_per_machine, step)
    counts = {machine * 2**power for power in range(SHOWN)}
    if fewest is not None:
        counts = {count for count in counts if count < 2 * fewest} | {fewest, max(fewest - step, step), machine}
    return [fit(question, parts, count) for count in sorted(counts)]
