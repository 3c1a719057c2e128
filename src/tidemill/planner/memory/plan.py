"""The whole of `plan memory`: states by role, the parts of one GPU, what fits and why fewer GPUs do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.planner.figures import Figure, Sheet
from tidemill.planner.memory.cures import WhyNot, why_not
from tidemill.planner.memory.fit import Fit, fewest_gpus, fit, rounded_up, training_unit, tried, unit
from tidemill.planner.memory.notes import notes_on
from tidemill.planner.memory.per_gpu import Shares, kv_bytes, shares
from tidemill.planner.memory.question import MemoryQuestion, check
from tidemill.planner.memory.states import RoleStates, all_states

MOST_GPUS = 1_000_000
"""That can be asked for."""


class MemoryPlan(Record):
    """Bytes over the whole cluster unless a name says otherwise."""

    total: float  # model states only, wherever they are
    on_host: float
    min_gpus: int  # that hold the states alone, with nothing beside them
    min_gpus_with_activations: int | None  # that hold everything with a margin; None: no number does
    states: tuple[RoleStates, ...]
    parts: Shares
    kv: float  # keys and values of everything in flight, wherever it is generated
    fits: tuple[Fit, ...]
    why_not: WhyNot | None  # of the GPUs asked for, or of one machine; None where they do
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def activations(self) -> float:
        """Of a microbatch on one GPU, with its logits."""
        return self.parts.activations + self.parts.logits


def plan_memory(question: MemoryQuestion, *, gpus: int | None = None) -> MemoryPlan:
    """What a run keeps, and what holds it.

    Args:
        gpus: a number of GPUs to look at beside those tried anyway, by default one machine's; rounded up to what the
            degrees allow.

    Raises:
        UserError: what cannot be asked.
    """
    check(question)
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"needs 1 to {MOST_GPUS:,}, was given {gpus}", where="--gpus", cure="correct it")
    sheet = Sheet()
    states = all_states(question, sheet)
    total, on_gpus = sum(each.total for each in states), sum(each.on_gpus for each in states)
    sheet.note(
        "total_bytes",
        total,
        "bytes",
        formula=" + ".join(each.role for each in states),
        source="weights, gradients and optimizer state of every role",
        **{each.role: each.total for each in states},
    )
    parts = shares(question, on_gpus, sheet)
    return MemoryPlan(
        total=total,
        on_host=total - on_gpus,
        min_gpus=_states_only(question, on_gpus, sheet),
        min_gpus_with_activations=_everything(question, parts, sheet),
        states=tuple(states),
        parts=parts,
        kv=kv_bytes(question),
        fits=tuple(_fits(question, parts, gpus)),
        why_not=why_not(question, parts, fit(question, parts, _asked(question, gpus))),
        notes=(*_rounding(question, gpus), *notes_on(question, states, parts)),
        figures=tuple(sheet.figures),
    )


def _states_only(question: MemoryQuestion, on_gpus: float, sheet: Sheet) -> int:
    step, memory = training_unit(question), question.gpu.memory_bytes
    return int(
        sheet.note(
            "min_gpus",
            rounded_up(on_gpus / memory, step),
            "GPUs",
            formula="ceil(state_bytes / memory_bytes / step) * step",
            source=f"{question.gpu.source}; states alone, sharded over all GPUs, nothing beside them",
            state_bytes=on_gpus,
            memory_bytes=memory,
            step=step,
        )
    )


def _everything(question: MemoryQuestion, parts: Shares, sheet: Sheet) -> int | None:
    fewest = fewest_gpus(question, parts)
    if fewest is None:
        return None
    found = fit(question, parts, fewest)
    shards = question.parallel.fsdp * question.parallel.model_gpus or fewest
    sheet.note(
        "per_gpu.bytes",
        found.bytes_per_gpu,
        "bytes",
        formula="state_bytes / shards + kv_bytes / gpus + activations + logits + gathered + engine + runtime",
        source="everything at once on every GPU; the smallest number of GPUs for which it is at most the usable memory",
        state_bytes=parts.states,
        shards=shards,
        kv_bytes=parts.kv,
        gpus=fewest,
        activations=parts.activations,
        logits=parts.logits,
        gathered=parts.gathered,
        engine=parts.engine,
        runtime=parts.runtime,
    )
    sheet.note(
        "per_gpu.usable_bytes",
        found.usable_bytes,
        "bytes",
        formula="memory_bytes * (1 - margin)",
        source=f"{question.gpu.source}; the margin for fragmentation is assumed",
        memory_bytes=question.gpu.memory_bytes,
        margin=question.margin,
    )
    return fewest


def _asked(question: MemoryQuestion, gpus: int | None) -> int:
    return rounded_up(question.gpu.gpus_per_machine if gpus is None else gpus, unit(question))


def _rounding(question: MemoryQuestion, gpus: int | None) -> Iterator[str]:
    asked = _asked(question, gpus)
    if gpus is not None and asked != gpus:
        yield f"--gpus {gpus} is looked at as {asked}: training and whole engines take multiples of {unit(question)}"


def _fits(question: MemoryQuestion, parts: Shares, gpus: int | None) -> Sequence[Fit]:
    found = tried(question, parts, fewest_gpus(question, parts))
    asked = _asked(question, gpus)
    if any(each.gpus == asked for each in found):
        return found
    return sorted([*found, fit(question, parts, asked)], key=lambda each: each.gpus)
