"""What to know about a plan beside its numbers: what does not fit where, by how much, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.planner.memory.fit import fewest_gpus, rounded_up, usable
from tidemill.planner.memory.per_gpu import Shares
from tidemill.planner.memory.question import MemoryQuestion
from tidemill.planner.memory.states import RoleStates
from tidemill.planner.words import size


def notes_on(question: MemoryQuestion, states: Sequence[RoleStates], parts: Shares) -> Iterator[str]:
    """In the order to read them."""
    yield from _one_machine(question, states)
    if fewest_gpus(question, parts) is None:
        yield _never(question, parts)
    if question.shape.assumed:
        shape = question.shape
        proportions = f"{shape.layers} layers, width {shape.hidden}, {shape.kv_heads} heads of keys and values"
        yield (
            f"the model's shape is assumed from its parameters ({proportions}, vocabulary {shape.vocab:,}); "
            "--model takes it from a config.json"
        )
    tp, machine = question.parallel.tp, question.gpu.gpus_per_machine
    if tp > machine:
        yield (
            f"tensor parallelism over {tp} GPUs leaves the machine, which has {machine}; its messages then cross the "
            "network, at a small part of the speed"
        )


def _one_machine(question: MemoryQuestion, states: Sequence[RoleStates]) -> Iterator[str]:
    """Trained roles whose states alone are more than a machine has."""
    gpu = question.gpu
    machine = f"one machine of {gpu.gpus_per_machine} {gpu.name}"
    for role in states:
        share = role.on_gpus / gpu.gpus_per_machine
        if not role.trained or share <= gpu.memory_bytes:
            continue
        text = (
            f"{machine} does not hold the {role.role}'s training state: {size(role.on_gpus)} / {gpu.gpus_per_machine} "
            f"= {size(share)} per GPU, {size(share - gpu.memory_bytes)} more than it has"
        )
        without = (role.weights + role.gradients) / gpu.gpus_per_machine
        cure = f"shard it over {rounded_up(role.on_gpus / gpu.memory_bytes, 1)} GPUs or more"
        if not role.offloaded:
            fits = "" if without <= gpu.memory_bytes else ", still too much"
            cure = f"offload the optimizer (--offload: {size(without)} per GPU{fits}) or {cure}"
        yield f"{text}; {cure}"


def _never(question: MemoryQuestion, parts: Shares) -> str:
    """Why no number of GPUs is enough, and which of the parts that are not sharded is to blame."""
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
    largest, (value, cure) = max(each.items(), key=lambda item: item[1][0])
    return (
        f"no number of these GPUs is enough: what each must hold whatever their number is {size(needed)}, "
        f"{size(needed - room)} more than the {size(room)} it can use; {largest} take {size(value)} of it, try {cure}"
    )
