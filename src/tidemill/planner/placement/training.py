"""Where training goes: a group of machines, its degrees of parallelism, and whether the model fits there."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidemill.core.records import Record
from tidemill.planner.memory.fit import usable
from tidemill.planner.memory.plan import plan_memory
from tidemill.planner.memory.question import Load, MemoryQuestion, Parallel
from tidemill.planner.memory.roles import roles_of
from tidemill.planner.placement.question import Offer, PlacementQuestion
from tidemill.sim.profiles.catalog import Gpu
from tidemill.sim.profiles.model_shape import adapter_parameters
from tidemill.sim.profiles.network import Link
from tidemill.sim.profiles.trainer import TrainerProfile, learning_passes, trainer_profile, updating_s

PIPELINES = (1, 2, 4)


class Group(Record):
    """Machines that train together."""

    members: tuple[tuple[Offer, int], ...]  # and how many of each kind

    @property
    def gpus(self) -> int:
        return sum(offer.machine.gpus * count for offer, count in self.members)

    @property
    def mixed(self) -> bool:
        return len({offer.gpu.name for offer, _ in self.members}) > 1

    @property
    def weakest(self) -> Gpu:
        """What every GPU of the group is at least: all wait for the slowest, and hold as much as the smallest."""
        gpus = [offer.gpu for offer, _ in self.members]
        dtypes = set.intersection(*(set(gpu.flops_per_s) for gpu in gpus))
        return msgspec.structs.replace(
            gpus[0],
            name=" + ".join(dict.fromkeys(gpu.name for gpu in gpus)),
            memory_bytes=min(gpu.memory_bytes for gpu in gpus),
            bandwidth_bytes_per_s=min(gpu.bandwidth_bytes_per_s for gpu in gpus),
            link_bytes_per_s=min(gpu.link_bytes_per_s for gpu in gpus),
            flops_per_s={dtype: min(gpu.flops_per_s[dtype] for gpu in gpus) for dtype in dtypes},
        )

    @property
    def gpus_per_machine(self) -> int:
        return min(offer.machine.gpus for offer, _ in self.members)

    @property
    def network(self) -> Link:
        """Of one machine, the slowest."""
        return Link(bytes_per_s=min(offer.machine.network_bytes_per_s for offer, _ in self.members))

    @property
    def usd_per_hour(self) -> float:
        return sum(offer.usd_per_hour * count for offer, count in self.members)

    @property
    def words(self) -> str:
        return " + ".join(f"{count} × {offer.name}" for offer, count in self.members)


class Training(Record):
    """A group with its degrees."""

    group: Group
    tp: int
    pp: int
    profile: TrainerProfile
    seconds: float  # of learning from a batch
    held_per_gpu: float  # bytes of model states that stay while the GPU generates

    @property
    def fsdp(self) -> int:
        return self.group.gpus // (self.tp * self.pp)


class TooLarge(Record):
    """A group that does not hold the model."""

    group: Group
    missing_per_gpu: float  # at its best degrees
    needs_gpus: int | None  # of this kind; None: no number of them is enough


def best_training(question: PlacementQuestion, group: Group) -> Training | TooLarge:
    """The degrees with the shortest step, or how far the best of them is from fitting."""
    found: list[Training] = []
    refused: list[TooLarge] = []
    for tp, pp in _degrees(question, group):
        memory = memory_question(question, group, tp, pp)
        plan = plan_memory(memory)
        held = plan.parts.states / group.gpus
        missing = held + plan.parts.fixed - usable(memory)
        if missing > 0:
            refused.append(TooLarge(group=group, missing_per_gpu=missing, needs_gpus=plan.min_gpus_with_activations))
            continue
        profile = trainer_profile(
            question.shape,
            group.weakest,
            gpus=group.gpus,
            tp=tp,
            pp=pp,
            gpus_per_machine=group.gpus_per_machine,
            network=group.network,
            update_s=_update_s(question, group),
            efficiency=question.trainer,
        )
        learned = learning(question)
        seconds = profile.step_s(
            learned.tokens, learned.context, passes=learned.passes, microbatch=question.microbatch_tokens
        )
        found.append(Training(group=group, tp=tp, pp=pp, profile=profile, seconds=seconds, held_per_gpu=held))
    if found:
        return min(found, key=lambda each: each.seconds)
    return min(refused, key=lambda each: each.missing_per_gpu)


class Learning(Record):
    """What is computed for a batch."""

    tokens: float  # with the prompts, each once for its group
    context: float  # mean length of a sequence
    passes: int  # forward-sized, of all roles


def learning(question: PlacementQuestion) -> Learning:
    """A critic learns as the policy does, frozen models only look; activations are computed again."""
    rollout = question.rollout
    each = learning_passes(recompute=True, adapter=question.holding.lora_rank > 0)
    return Learning(
        tokens=rollout.tokens + rollout.samples / rollout.group_size * rollout.prompt_tokens,
        context=rollout.prompt_tokens + rollout.mean,
        passes=sum(each if role.trained else 1 for role in roles_of(question.algorithm)),
    )


def learned_parameters(question: PlacementQuestion) -> float:
    """Of the policy: what an update changes, and what is sent to workers afterwards."""
    rank = question.holding.lora_rank
    return adapter_parameters(question.shape, rank) if rank else question.shape.parameters


def _update_s(question: PlacementQuestion, group: Group) -> float:
    learning_roles = sum(role.trained for role in roles_of(question.algorithm))
    return updating_s(
        learned_parameters(question) * learning_roles,
        group.weakest,
        gpus=group.gpus,
        machines=sum(count for _, count in group.members),
        optimizer=question.holding.optimizer,
        offload=question.holding.offload,
        efficiency=question.trainer,
    )


def _degrees(question: PlacementQuestion, group: Group) -> Iterator[tuple[int, int]]:
    """Powers of two within a machine that divide the heads, by pipelines that divide what is left."""
    tp = 1
    while tp <= group.gpus_per_machine:
        for pp in PIPELINES:
            if group.gpus % (tp * pp) == 0 and question.shape.heads % tp == 0 and pp <= question.shape.layers:
                yield tp, pp
        tp *= 2


def memory_question(question: PlacementQuestion, group: Group, tp: int, pp: int) -> MemoryQuestion:
    """Without an engine: one on the same GPUs gives its weights and cache back while they train."""
    return MemoryQuestion(
        algorithm=question.algorithm,
        shape=question.shape,
        gpu=group.weakest,
        holding=question.holding,
        parallel=Parallel(tp=tp, pp=pp),
        load=Load(
            context=question.longest,
            microbatch_tokens=max(question.microbatch_tokens, question.longest),
            samples_in_flight=0,
        ),
        generates_here=False,
        margin=question.margin,
    )
