"""Why a number of GPUs is too small, and which changes would make it enough."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidemill.core.records import Record
from tidemill.planner.figures import Sheet
from tidemill.planner.memory.fit import Fit, fit, unit
from tidemill.planner.memory.per_gpu import Shares, generates_here, shares
from tidemill.planner.memory.question import MemoryQuestion
from tidemill.planner.memory.states import all_states

USUAL_RANK = 16


class Cure(Record):
    """One change, and what it comes to."""

    option: str  # as it is written on the command line
    bytes_per_gpu: float
    missing_bytes: float

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


class WhyNot(Record):
    """A number of GPUs that is too small."""

    gpus: int
    missing_bytes: float  # on each
    parts: dict[str, float]  # bytes on each, largest first
    cures: tuple[Cure, ...]  # that help, the most helpful first


def why_not(question: MemoryQuestion, parts: Shares, found: Fit) -> WhyNot | None:
    """None where it fits."""
    if found.fits:
        return None
    tried = (_tried(option, changed, found.gpus) for option, changed in _changes(question))
    helpful = [cure for cure in tried if cure and cure.bytes_per_gpu < found.bytes_per_gpu]
    on_each = {
        "states": found.bytes_per_gpu - parts.kv / found.gpus - parts.fixed,
        "keys and values": parts.kv / found.gpus,
        "activations": parts.activations,
        "logits": parts.logits,
        "gathered layers": parts.gathered,
        "engine": parts.engine,
        "runtime": parts.runtime,
    }
    return WhyNot(
        gpus=found.gpus,
        missing_bytes=found.missing_bytes,
        parts=dict(sorted(on_each.items(), key=lambda item: -item[1])),
        cures=tuple(sorted(helpful, key=lambda cure: cure.bytes_per_gpu)),
    )


def _tried(option: str, question: MemoryQuestion, gpus: int) -> Cure | None:
    """None where so many GPUs cannot be divided that way."""
    if gpus % unit(question):
        return None
    found = fit(question, shares(question, sum(each.on_gpus for each in all_states(question, Sheet())), Sheet()), gpus)
    return Cure(option=option, bytes_per_gpu=found.bytes_per_gpu, missing_bytes=found.missing_bytes)


def _changes(question: MemoryQuestion) -> Iterator[tuple[str, MemoryQuestion]]:
    """(option, the question with it), each change by itself; only those that are not made yet."""
    holding, parallel, load = question.holding, question.parallel, question.load

    def with_holding(**changes: object) -> MemoryQuestion:
        return msgspec.structs.replace(question, holding=msgspec.structs.replace(holding, **changes))

    if not holding.offload:
        yield "--offload", with_holding(offload=True)
    if holding.optimizer == "adam":
        yield "--optimizer adam-8bit", with_holding(optimizer="adam-8bit")
    if not holding.lora_rank:
        yield f"--lora-rank {USUAL_RANK}", with_holding(lora_rank=USUAL_RANK)
    if generates_here(question):
        yield "--generate elsewhere", msgspec.structs.replace(question, generates_here=False)
    if load.recompute == "none":
        changed = msgspec.structs.replace(load, recompute="full")
        yield "--recompute full", msgspec.structs.replace(question, load=changed)
    if parallel.fsdp:
        changed_degrees = msgspec.structs.replace(parallel, fsdp=0)
        yield "--fsdp 0", msgspec.structs.replace(question, parallel=changed_degrees)
    tp = question.gpu.gpus_per_machine
    if parallel.tp < tp and question.shape.heads % tp == 0:
        changed_degrees = msgspec.structs.replace(parallel, tp=tp)
        yield f"--tp {tp}", msgspec.structs.replace(question, parallel=changed_degrees)
