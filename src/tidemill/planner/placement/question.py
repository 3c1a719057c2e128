"""What `plan placement` is asked."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.planner.memory.question import Holding
from tidemill.planner.memory.roles import GENERATE_NOTHING
from tidemill.sim.profiles.catalog import Gpu, Machine
from tidemill.sim.profiles.engine import EngineEfficiency
from tidemill.sim.profiles.generation import Rollout
from tidemill.sim.profiles.model_shape import ModelShape
from tidemill.sim.profiles.trainer import TrainerEfficiency

Objective: TypeAlias = Literal["cost", "time"]


class Offer(Record):
    """Machines of one kind that may be rented."""

    machine: Machine
    gpu: Gpu
    count: int  # at most
    preemptible: bool = False
    availability: float = 1.0  # mean share of those wanted that are there; only those are paid for

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def words(self) -> str:
        return f"{self.name} (preemptible)" if self.preemptible else self.name

    @property
    def usd_per_hour(self) -> float:
        """Of one machine while it is there; 0 where no price is known."""
        price = self.machine.preemptible_usd_per_hour if self.preemptible else self.machine.usd_per_hour
        return price or 0.0


class PlacementQuestion(Record):
    """Everything that a placement is judged by."""

    algorithm: str
    shape: ModelShape
    offers: tuple[Offer, ...]
    rollout: Rollout
    longest: int  # tokens of the longest prompt with its completion
    lag: int = 0
    objective: Objective = "cost"
    steps: int = 100
    budget_usd: float | None = None  # for all steps
    holding: Holding = Holding()
    microbatch_tokens: int = 16_384  # on one data-parallel rank
    margin: float = 0.1  # share of a GPU's memory that fragmentation takes
    engine_dtype: str = "bf16"  # of an engine's weights and arithmetic
    engine: EngineEfficiency = EngineEfficiency()
    trainer: TrainerEfficiency = TrainerEfficiency()

    @property
    def reserved(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if not offer.preemptible)

    @property
    def preemptible(self) -> tuple[Offer, ...]:
        return tuple(offer for offer in self.offers if offer.preemptible)


def check(question: PlacementQuestion) -> PlacementQuestion:
    """The question itself.

    Raises:
        UserError: what cannot be asked.
    """
    if question.algorithm in GENERATE_NOTHING:
        what = f"{question.algorithm} generates nothing, and a placement is of what generates and what learns"
        raise UserError(what, where="--algorithm", cure="see `tidemill plan memory` for how many GPUs it needs")
    if not question.reserved:
        raise UserError(
            "no reserved machines to train on", where="--machines", cure="give NAME:COUNT from the catalogue"
        )
    names = [offer.words for offer in question.offers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is offered twice", where="--machines", cure="name it once, with all there are")
    for offer in question.offers:
        where = f"{'--preemptible' if offer.preemptible else '--machines'} {offer.name}"
        if offer.count < 1:
            raise UserError(f"{offer.count} machines cannot be", where=where, cure="write NAME:COUNT")
        if not offer.usd_per_hour:
            kind = "preemptible_usd_per_hour" if offer.preemptible else "usd_per_hour"
            cure = f"give --price, or a row with {kind} in --catalog FILE"
            raise UserError("the catalogue has no price for it", where=where, cure=cure)
        if not 0 < offer.availability <= 1:
            what = f"needs a share above 0 and at most 1, was given {offer.availability:g}"
            raise UserError(what, where="--availability", cure="correct it")
    for option, value in {"--lag": question.lag, "--steps": question.steps - 1}.items():
        if value < 0:
            raise UserError("is too small", where=option, cure="a lag is 0 or more, steps are 1 or more")
    if question.budget_usd is not None and not question.budget_usd > 0:
        raise UserError(
            f"{question.budget_usd:g} dollars are no budget", where="--budget-usd", cure="give more, or none"
        )
    if question.objective == "time" and question.budget_usd is None:
        cure = "give --budget-usd, or --objective cost"
        raise UserError("the shortest time needs a budget", where="--objective time", cure=cure)
    return question
