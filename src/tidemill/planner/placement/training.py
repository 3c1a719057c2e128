"""The question of `plan placement`; training on a group of machines: memory and time."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import Rollout
from tidemill.hardware.figures import Derivation
from tidemill.hardware.gpu_catalog import Gpu, Link, Machine
from tidemill.hardware.measured_rows import ASSUMED, Efficiencies
from tidemill.hardware.model_shape import ModelShape, adapter_parameters
from tidemill.hardware.trainer_profile import TrainerProfile, learning_passes, trainer_profile, updating_s
from tidemill.planner.memory.memory_plan import plan_memory
from tidemill.planner.memory.per_gpu import usable
from tidemill.planner.memory.states import GENERATE_NOTHING, Holding, Load, MemoryQuestion, roles_of

Objective: TypeAlias = Literal["cost", "time"]

LOGITS_BUDGET = 2048 * 2**20
"""Bytes of logits at once on a GPU: the default of trainer.logits_budget_mb."""


class Offer(Record):
    """Machines of one kind that can be rented."""

    machine: Machine
    gpu: Gpu
    count: int  # at most
    preemptible: bool = False
    availability: float = 1.0  # mean fraction of the requested machines that is available; only those are paid for
    included: bool = False  # GPUs of the training machines, whose price includes them

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def description(self) -> str:
        return f"{self.name} (preemptible)" if self.preemptible else self.name

    @property
    def usd_per_hour(self) -> float:
        """Price of one available machine; 0 if unknown."""
        price = self.machine.preemptible_usd_per_hour if self.preemptible else self.machine.usd_per_hour
        return 0.0 if self.included else price or 0.0


class PlacementQuestion(Record):
    """Everything that determines a placement."""

    algorithm: str
    shape: ModelShape
    offers: tuple[Offer, ...]
    rollout: Rollout
    longest: int  # tokens of the longest prompt and its completion
    lag: int = 0
    objective: Objective = "cost"
    steps: int = 100
    budget_usd: float | None = None  # for all steps
    holding: Holding = Holding()
    microbatch_tokens: int = 16_384  # per data-parallel rank
    logits_budget: float = LOGITS_BUDGET
    margin: float = 0.1  # fraction of a GPU's memory lost to fragmentation
    engine_dtype: str = "bf16"  # engine weights and arithmetic
    efficiencies: dict[str, Efficiencies] = {}  # by name of the GPU; assumed for others

    @property
    def reserved(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if not offer.preemptible)

    @property
    def preemptible(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if offer.preemptible)

    def efficiencies_on(self, gpu: Gpu) -> Efficiencies:
        return self.efficiencies.get(gpu.name, ASSUMED)


def check(question: PlacementQuestion) -> None:
    """Raises UserError: an option is invalid or missing."""
    if question.algorithm in GENERATE_NOTHING:
        what = f"{question.algorithm} does not generate; a placement is for algorithms that generate and train"
        raise UserError(what, where="--algorithm", hint="`tidemill plan memory` computes how many GPUs it needs")
    if not question.reserved:
        hint = "give NAME:COUNT from the catalogue"
        raise UserError("no reserved machines to train on", where="--machines", hint=hint)
    names = [offer.description for offer in question.offers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is given twice", where="--machines", hint="give it once, with the total number")
    for offer in question.offers:
        where = f"{'--preemptible' if offer.preemptible else '--machines'} {offer.name}"
        if offer.count < 1:
            raise UserError(f"needs 1 or more machines, was given {offer.count}", where=where, hint="write NAME:COUNT")
        if not offer.usd_per_hour:
            kind = "preemptible_usd_per_hour" if offer.preemptible else "usd_per_hour"
            hint = f"give --price, or a row with {kind} in --catalog FILE"
            raise UserError("the catalogue has no price for this machine", where=where, hint=hint)
        if not 0 < offer.availability <= 1:
            what = f"needs a share above 0 and at most 1, was given {offer.availability:g}"
            raise UserError(what, where="--availability", hint="correct it")
    for option, value in {"--lag": question.lag, "--steps": question.steps - 1}.items():
        if value < 0:
            raise UserError("is too small", where=option, hint="the lag is 0 or more, steps are 1 or more")
    if question.budget_usd is not None and not question.budget_usd > 0:
        what = f"needs a budget above 0, was given {question.budget_usd:g}"
        raise UserError(what, where="--budget-usd", hint="raise it, or leave it out")
    if question.objective == "time" and question.budget_usd is None:
        hint = "give --budget-usd, or --objective cost"
        raise UserError("the objective time needs a budget", where="--objective time", hint=hint)


class Group(Record):
    """Machines with equal GPUs that train together."""

    members: tuple[tuple[Offer, int], ...]  # (kind, number of machines)
    apart: int = 0  # GPUs of these machines that do not train: those of the reserved engine and of models on actors

    @property
    def all_gpus(self) -> int:
        return sum(offer.machine.gpus * count for offer, count in self.members)

    @property
    def gpus(self) -> int:
        """Training GPUs: `trainer.shards`."""
        return self.all_gpus - self.apart

    @property
    def gpu(self) -> Gpu:
        return self.members[0][0].gpu

    @property
    def gpus_per_machine(self) -> int:
        return min(offer.machine.gpus for offer, _ in self.members)

    @property
    def network(self) -> Link:
        """The network of the group's machine with the slowest one."""
        return Link(bytes_per_s=min(offer.machine.network_bytes_per_s for offer, _ in self.members))

    @property
    def usd_per_hour(self) -> float:
        return sum(offer.usd_per_hour * count for offer, count in self.members)

    @property
    def description(self) -> str:
        return " + ".join(f"{count} × {offer.name}" for offer, count in self.members)


class Training(Record):
    """A group that trains, fully sharded over its GPUs."""

    group: Group
    profile: TrainerProfile
    seconds: float  # training time of a batch
    held_per_gpu: float  # bytes of model states that stay on the GPU during generation


class TooLarge(Record):
    """A group whose memory is too small for the model."""

    group: Group
    missing_per_gpu: float  # bytes
    needs_gpus: int | None  # number of these GPUs that would fit; None: no number


def best_training(question: PlacementQuestion, group: Group) -> Training | TooLarge:
    """Training on a group, or its missing memory."""
    memory = memory_question(question, group)
    plan = plan_memory(memory)
    # trainer.offload moves all states to the host, the --offload of `plan memory` only the optimizer's.
    held = 0.0 if question.holding.offload else plan.parts.states / group.gpus
    missing = held + plan.parts.fixed - usable(memory)
    if missing > 0:
        fewest = plan.min_gpus_with_activations
        needs_gpus = None if fewest is None else fewest + group.apart
        return TooLarge(group=group, missing_per_gpu=missing, needs_gpus=needs_gpus)
    profile, seconds = training_time(question, group)
    return Training(group=group, profile=profile, seconds=seconds, held_per_gpu=held)


def training_time(
    question: PlacementQuestion, group: Group, sheet: Derivation | None = None
) -> tuple[TrainerProfile, float]:
    """The profile, and the training time of a batch."""
    learned, efficiency = learning(question), question.efficiencies_on(group.gpu).trainer
    update_s = updating_s(
        learned_parameters(question) * sum(role.trained for role in roles_of(question.algorithm)),
        group.gpu,
        gpus=group.gpus,
        machines=math.ceil(group.gpus / group.gpus_per_machine),
        optimizer=question.holding.optimizer,
        offload=question.holding.offload,
        efficiency=efficiency,
        sheet=sheet,
    )
    profile = trainer_profile(
        question.shape,
        group.gpu,
        gpus=group.gpus,
        gpus_per_machine=group.gpus_per_machine,
        network=group.network,
        update_s=update_s,
        efficiency=efficiency,
        sheet=sheet,
    )
    work, microbatch = (learned.tokens, learned.context), question.microbatch_tokens
    return profile, profile.step_s(*work, passes=learned.passes, microbatch=microbatch, sheet=sheet)


class Learning(Record):
    """The training work of a batch."""

    tokens: float  # with the prompts, each once per group
    context: float  # mean length of a sequence
    passes: int  # forward-sized passes of all roles


def learning(question: PlacementQuestion) -> Learning:
    """The training work of a batch with recomputed activations; frozen roles only cost a forward pass."""
    rollout = question.rollout
    each = learning_passes(recompute=True, adapter=question.holding.lora_rank > 0)
    return Learning(
        tokens=rollout.tokens + rollout.samples / rollout.group_size * rollout.prompt_tokens,
        context=rollout.prompt_tokens + rollout.mean,
        passes=sum(each if role.trained else 1 for role in roles_of(question.algorithm)),
    )


def learned_parameters(question: PlacementQuestion) -> float:
    """Parameters of the policy that an update changes and a publish sends."""
    rank = question.holding.lora_rank
    return adapter_parameters(question.shape, rank) if rank else question.shape.parameters


def memory_question(question: PlacementQuestion, group: Group) -> MemoryQuestion:
    """The memory question of training, without an engine: colocated engines free their memory during training."""
    return MemoryQuestion(
        algorithm=question.algorithm,
        shape=question.shape,
        gpu=group.gpu,
        holding=question.holding,
        load=Load(
            context=question.longest,
            microbatch_tokens=max(question.microbatch_tokens, question.longest),
            samples_in_flight=0,
            logits_budget=question.logits_budget,
        ),
        generates_here=False,
        margin=question.margin,
    )
