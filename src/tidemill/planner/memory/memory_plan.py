"""`plan memory`: the plan, why a number of GPUs is too small, and the options that help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from tidemill.core.errors import UserError
from tidemill.core.formatting import size
from tidemill.core.records import Record
from tidemill.hardware.figures import Derivation, Figure
from tidemill.planner.memory.per_gpu import (
    Fit,
    Shares,
    fewest_gpus,
    fit,
    generates_here,
    rounded_up,
    shares,
    training_unit,
    try_counts,
    unit,
    usable,
)
from tidemill.planner.memory.states import MemoryQuestion, RoleStates, all_states, check

USUAL_RANK = 16


class MemoryOption(Record):
    """One change of the question and its result."""

    option: str  # as written on the command line
    bytes_per_gpu: float
    missing_bytes: float

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


class Shortage(Record):
    """Why a number of GPUs is too small."""

    gpus: int
    missing_bytes: float  # on each
    parts: dict[str, float]  # bytes per GPU, largest first
    hints: tuple[MemoryOption, ...]  # options that help, the most effective first


def shortage_of(question: MemoryQuestion, parts: Shares, found: Fit) -> Shortage | None:
    """None if it fits."""
    if found.fits:
        return None
    helpful: list[MemoryOption] = []
    for option, changed in _changes(question):
        if found.gpus % unit(changed) == 0:  # else this number of GPUs cannot be divided in that way
            states = sum(each.on_gpus for each in all_states(changed, Derivation()))
            with_it = fit(changed, shares(changed, states, Derivation()), found.gpus)
            per_gpu, missing = with_it.bytes_per_gpu, with_it.missing_bytes
            if per_gpu < found.bytes_per_gpu:
                helpful.append(MemoryOption(option=option, bytes_per_gpu=per_gpu, missing_bytes=missing))
    on_each = {
        "states": found.bytes_per_gpu - parts.kv / found.gpus - parts.fixed,
        "keys and values": parts.kv / found.gpus,
        "activations": parts.activations,
        "logits": parts.logits,
        "gathered layers": parts.gathered,
        "engine": parts.engine,
        "runtime": parts.runtime,
    }
    return Shortage(
        gpus=found.gpus,
        missing_bytes=found.missing_bytes,
        parts=dict(sorted(on_each.items(), key=lambda item: -item[1])),
        hints=tuple(sorted(helpful, key=lambda hint: hint.bytes_per_gpu)),
    )


def _changes(question: MemoryQuestion) -> Iterator[tuple[str, MemoryQuestion]]:
    """(option, changed question) for every single change that is not yet made."""
    holding, parallel, load = question.holding, question.parallel, question.load

    def with_holding(**changes: object) -> MemoryQuestion:
        return replace(question, holding=replace(holding, **changes))

    if not holding.offload:
        yield "--offload", with_holding(offload=True)
    if holding.optimizer == "adam":
        yield "--optimizer adam-8bit", with_holding(optimizer="adam-8bit")
    if not holding.lora_rank:
        yield f"--lora-rank {USUAL_RANK}", with_holding(lora_rank=USUAL_RANK)
    if generates_here(question):
        yield "--generate elsewhere", replace(question, generates_here=False)
    if load.recompute == "none":
        changed = replace(load, recompute="full")
        yield "--recompute full", replace(question, load=changed)
    if parallel.fsdp:
        changed_degrees = replace(parallel, fsdp=0)
        yield "--fsdp 0", replace(question, parallel=changed_degrees)
    tp = question.gpu.gpus_per_machine
    if parallel.tp < tp and question.shape.heads % tp == 0:
        changed_degrees = replace(parallel, tp=tp)
        yield f"--tp {tp}", replace(question, parallel=changed_degrees)


def notes_on(question: MemoryQuestion, states: Sequence[RoleStates], parts: Shares) -> Iterator[str]:
    """Notes for the user, most important first."""
    yield from _one_machine(question, states)
    if fewest_gpus(question, parts) is None:
        yield _impossible_note(question, parts)
    if question.shape.assumed:
        shape = question.shape
        proportions = f"{shape.layers} layers, width {shape.hidden}, {shape.kv_heads} heads of keys and values"
        yield (
            f"the model's shape is estimated from its parameters ({proportions}, vocabulary {shape.vocab:,}); "
            "--model reads it from a config.json"
        )
    tp, machine = question.parallel.tp, question.gpu.gpus_per_machine
    if tp > machine:
        yield (
            f"tensor parallelism over {tp} GPUs exceeds the {machine} GPUs of a machine; its messages then cross the "
            "network, which is much slower"
        )


def _one_machine(question: MemoryQuestion, states: Sequence[RoleStates]) -> Iterator[str]:
    """Notes on trained roles whose states alone exceed the memory of one machine."""
    gpu = question.gpu
    machine = f"one machine of {gpu.gpus_per_machine} {gpu.name}"
    for role in states:
        share = role.on_gpus / gpu.gpus_per_machine
        if not role.trained or share <= gpu.memory_bytes:
            continue
        text = (
            f"{machine} cannot hold the {role.role}'s training state: {size(role.on_gpus)} / {gpu.gpus_per_machine} "
            f"= {size(share)} per GPU, {size(share - gpu.memory_bytes)} more than its memory"
        )
        without = (role.weights + role.gradients) / gpu.gpus_per_machine
        hint = f"shard it over {rounded_up(role.on_gpus / gpu.memory_bytes, 1)} GPUs or more"
        if not role.offloaded:
            fits = "" if without <= gpu.memory_bytes else ", still too much"
            hint = f"offload the optimizer (--offload: {size(without)} per GPU{fits}) or {hint}"
        yield f"{text}; {hint}"


def _impossible_note(question: MemoryQuestion, parts: Shares) -> str:
    """Explain why no number of GPUs suffices, and name the largest part that is not sharded."""
    room = usable(question)
    each = {
        "activations": (parts.activations, "--tp or a smaller --microbatch-tokens"),
        "logits": (parts.logits, "--tp or a smaller --microbatch-tokens"),
        "gathered layers": (parts.gathered, "--tp, or --ep for experts"),
        "the engine's weights": (parts.engine, "a larger --engine-tp"),
    }
    if question.parallel.fsdp:
        shards = question.parallel.fsdp * question.parallel.model_gpus
        each["states"] = (parts.states / shards, "a larger --fsdp")
    needed = sum(value for value, _ in each.values()) + parts.runtime
    largest, (value, hint) = max(each.items(), key=lambda item: item[1][0])
    return (
        f"no number of these GPUs is enough: every GPU must hold at least {size(needed)}, "
        f"{size(needed - room)} more than its usable {size(room)}; {largest} take {size(value)} of it, try {hint}"
    )


class MemoryPlan(Record):
    """Bytes over the whole cluster unless a name says otherwise."""

    total: float  # model states only, on GPUs and hosts
    on_host: float
    min_gpus: int  # minimum number for the states alone
    min_gpus_with_activations: int | None  # minimum number for everything, with a margin; None: no number is enough
    states: tuple[RoleStates, ...]
    parts: Shares
    kv: float  # keys and values of all samples in flight, on any machine
    fits: tuple[Fit, ...]
    why_not: Shortage | None  # of the requested GPUs, or of one machine; None if it fits
    notes: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def activations(self) -> float:
        """Activations and logits of a microbatch on one GPU."""
        return self.parts.activations + self.parts.logits


def plan_memory(question: MemoryQuestion, *, gpus: int | None = None) -> MemoryPlan:
    """Compute the memory of a run and the GPUs that it needs.

    Args:
        gpus: an additional number of GPUs to check, rounded up to a multiple of the parallel degrees; default: the
            GPUs of one machine.

    Raises:
        UserError: an option is invalid.
    """
    check(question)
    if gpus is not None and gpus < 1:
        raise UserError(f"needs 1 or more, was given {gpus}", where="--gpus", hint="correct it")
    sheet = Derivation()
    states = all_states(question, sheet)
    total, on_gpus = sum(each.total for each in states), sum(each.on_gpus for each in states)
    sheet.compute(
        "total_bytes",
        "bytes",
        formula=" + ".join(each.role for each in states),
        source="weights, gradients and optimizer state of every role",
        **{each.role: each.total for each in states},
    )
    parts = shares(question, on_gpus, sheet)
    min_gpus = sheet.compute(
        "min_gpus",
        "GPUs",
        formula="max(ceil(state_bytes / memory_bytes / step * (1 - 1e-12)), 1) * step",
        source=f"{question.gpu.source}; states alone, sharded over all GPUs",
        state_bytes=on_gpus,
        memory_bytes=question.gpu.memory_bytes,
        step=training_unit(question),
    )
    fewest = fewest_gpus(question, parts)
    if fewest is not None:
        _derive_per_gpu(question, parts, fewest, sheet)
    asked = fit(question, parts, rounded_up(gpus or question.gpu.gpus_per_machine, unit(question)))
    fits = {found.gpus: found for found in (*try_counts(question, parts, fewest), asked)}
    notes = list(notes_on(question, states, parts))
    if gpus is not None and asked.gpus != gpus:
        multiple = f"training and whole engines need multiples of {unit(question)}"
        notes.insert(0, f"--gpus {gpus} is rounded up to {asked.gpus}: {multiple}")
    return MemoryPlan(
        total=total,
        on_host=total - on_gpus,
        min_gpus=int(min_gpus),
        min_gpus_with_activations=fewest,
        states=tuple(states),
        parts=parts,
        kv=parts.kv_anywhere,
        fits=tuple(fits[count] for count in sorted(fits)),
        why_not=shortage_of(question, parts, asked),
        notes=tuple(notes),
        figures=tuple(sheet.figures),
    )


def _derive_per_gpu(question: MemoryQuestion, parts: Shares, fewest: int, sheet: Derivation) -> None:
    """The figures of one GPU, with the smallest number of GPUs that holds everything."""
    shards = question.parallel.fsdp * question.parallel.model_gpus or fewest
    sheet.compute(
        "per_gpu.bytes",
        "bytes",
        formula="state_bytes / shards + kv_bytes / gpus + (activations + logits + gathered + engine + runtime)",
        source="everything on every GPU at once; the smallest number of GPUs for which it fits the usable memory",
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
    sheet.compute(
        "per_gpu.usable_bytes",
        "bytes",
        formula="memory_bytes * (1 - margin)",
        source=f"{question.gpu.source}; the margin for fragmentation is assumed",
        memory_bytes=question.gpu.memory_bytes,
        margin=question.margin,
    )
