"""Time, idle fractions and cost of one placement.

The *shared* side are the training GPUs if they also generate, the *dedicated* side are machines that only generate. A
colocated placement has only the first, a split one only the second, a hybrid one both (RLBoost, arXiv 2510.19225).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.hardware.engine_profile import (
    EngineProfile,
    cache_bytes,
    engine_profile,
    generation_s,
    steady_tokens_per_s,
)
from tidemill.hardware.engine_ranks import undivided
from tidemill.hardware.figures import Derivation, Formulas
from tidemill.hardware.gpu_catalog import ETHERNET_LATENCY_S
from tidemill.planner.memory.states import WHOLE_BATCH
from tidemill.planner.placement.training import Offer, PlacementQuestion, Training, learned_parameters


class Engine(Record):
    """One engine on a kind of machine."""

    offer: Offer
    gpus: int
    profile: EngineProfile
    fewest_gpus: int  # minimum number that holds the model and the longest sample
    smallest: EngineProfile  # profile of an engine on fewest_gpus

    @property
    def per_machine(self) -> int:
        return self.offer.machine.gpus // self.gpus


class TooSmall(Record):
    """A kind of machine that cannot hold an engine."""

    offer: Offer
    missing_bytes: float  # on one machine, for the longest sample
    missing_alone: float  # the same without training states on it


def engines_on(question: PlacementQuestion, offer: Offer, *, held_per_gpu: float = 0.0) -> dict[int, Engine] | TooSmall:
    """The engines that a machine can hold, by their GPUs: numbers that divide the model, as vLLM divides it.

    Args:
        held_per_gpu: bytes of training states on each GPU.
    """
    needed = question.longest * question.shape.kv_bytes_per_token()
    sizes = [gpus for gpus in range(1, offer.machine.gpus + 1) if not undivided(question.shape, gpus)]
    free = {gpus: _free(question, offer, gpus, held_per_gpu) for gpus in sizes}
    fit = [gpus for gpus in sizes if free[gpus] >= needed]
    if not fit:
        alone = max(_free(question, offer, gpus, 0.0) for gpus in sizes)
        return TooSmall(offer=offer, missing_bytes=needed - max(free.values()), missing_alone=max(needed - alone, 0.0))
    shape, fewest, efficiency = question.shape, min(fit), question.efficiencies_on(offer.gpu).engine
    profiles = {
        gpus: replace(
            engine_profile(shape, offer.gpu, gpus=gpus, dtype=question.engine_dtype, efficiency=efficiency),
            cache_tokens=free[gpus] / shape.kv_bytes_per_token(),
        )
        for gpus in fit
    }
    return {
        gpus: Engine(offer=offer, gpus=gpus, profile=profile, fewest_gpus=fewest, smallest=profiles[fewest])
        for gpus, profile in profiles.items()
    }


def _free(question: PlacementQuestion, offer: Offer, gpus: int, held_per_gpu: float) -> float:
    """Bytes for keys and values; training on the same GPUs takes its states and its margin first."""
    efficiency = question.efficiencies_on(offer.gpu).engine
    free = cache_bytes(question.shape, offer.gpu, gpus=gpus, dtype=question.engine_dtype, efficiency=efficiency)
    if not held_per_gpu:
        return free
    return free - gpus * (held_per_gpu + offer.gpu.memory_bytes * (efficiency.memory - (1 - question.margin)))


class Side(Record):
    """Engines that generate at the same time: (engine, mean number of machines)."""

    engines: tuple[tuple[Engine, float], ...] = ()

    @property
    def machines(self) -> float:
        return sum(machines for _, machines in self.engines)

    @property
    def usd_per_hour(self) -> float:
        return sum(engine.offer.usd_per_hour * machines for engine, machines in self.engines)

    @property
    def description(self) -> str:
        """`1 reserved engine + 4 × a + 3.2 × b (preemptible)`"""
        parts = (
            counted(round(engine.per_machine * machines), "reserved engine")
            if engine.offer.included
            else f"{machines:.3g} × {engine.offer.description}"
            for engine, machines in self.engines
        )
        return " + ".join(parts)

    @property
    def workers(self) -> tuple[tuple[Engine, float], ...]:
        """The engines without the reserved one."""
        return tuple((engine, machines) for engine, machines in self.engines if not engine.offer.included)

    @property
    def token_s(self) -> float:
        """Minimum time per token of a sample on the slowest engine, in seconds."""
        return max((engine.profile.decode_step_s(1, 0) for engine, _ in self.engines), default=0.0)

    def steady(
        self,
        question: PlacementQuestion,
        samples: float = math.inf,
        *,
        label: str = "",
        sheet: Derivation | None = None,
    ) -> float:
        """Tokens per second if free slots are always refilled, with at most `samples` in flight."""
        if not self.engines:
            return 0.0
        count = sum(machines * engine.per_machine for engine, machines in self.engines)
        inputs: dict[str, float] = {}
        for number, (engine, machines) in enumerate(self.engines):
            inputs[f"engines_{number}"] = machines * engine.per_machine
            inputs[f"each_{number}"] = steady_tokens_per_s(engine.profile, question.rollout, samples / count)
        return (sheet or Derivation()).compute(
            label,
            "tokens/s",
            formula=" + ".join(f"engines_{number} * each_{number}" for number in range(len(self.engines))),
            source="lag 1 or more: free slots are refilled at once, up to the samples in flight that the lag allows",
            **inputs,
        )

    def tokens_per_s(self, question: PlacementQuestion, samples: float, name: str, sheet: Derivation) -> float:
        """Tokens per second of this side with its samples of a batch; at lag 0 with the tail."""
        label = f"{name}.tokens_per_s"
        if not samples:
            return 0.0
        if question.lag:
            return self.steady(question, samples * question.lag, label=label, sheet=sheet)
        return sheet.compute(
            label,
            "tokens/s",
            formula="samples * mean / seconds",
            source="lag 0: this side's part of a batch; decoding steps are summed while fewer and fewer samples run",
            samples=samples,
            mean=question.rollout.mean,
            seconds=self.batch_s(question, samples),
        )

    def batch_s(self, question: PlacementQuestion, samples: float) -> float:
        """Seconds to generate `samples` that start together, divided among engines in proportion to their speed."""
        rates = [
            machines * engine.per_machine * steady_tokens_per_s(engine.profile, question.rollout)
            for engine, machines in self.engines
        ]
        return max(
            generation_s(engine.profile, question.rollout, samples * rate / sum(rates) / machines / engine.per_machine)
            for (engine, machines), rate in zip(self.engines, rates, strict=True)
        )


Kind: TypeAlias = Literal["colocated", "split", "hybrid"]
FIRST = 0.1
"""Fraction of a batch's generation after which training starts at lag 0; assumed. 1 if advantages need the whole batch.
"""
LAST = 0.1
"""Fraction of a batch's training that remains when its last sample arrives; assumed, and 1 in the same case."""
SECONDS_PER_HOUR = 3600.0


class Placement(Record):
    """Machines and GPUs of training and generation."""

    training: Training
    shared: Side = Side()
    dedicated: Side = Side()

    @property
    def kind(self) -> Kind:
        if not self.shared.engines:
            return "split"
        return "hybrid" if self.dedicated.engines else "colocated"

    @property
    def description(self) -> str:
        """`hybrid: training on 1 × a, generating also on 4 × b`"""
        text = f"{self.kind}: training on {self.training.group.description}"
        if not self.dedicated.engines:
            return text
        return f"{text}, generating {'also ' if self.shared.engines else ''}on {self.dedicated.description}"

    @property
    def usd_per_hour(self) -> float:
        return self.training.group.usd_per_hour + self.dedicated.usd_per_hour


class Estimate(Record):
    """An average step of a placement: seconds, fractions of the step, and USD."""

    placement: Placement
    tokens: float  # completion tokens per step
    shared_rate: float  # tokens per second
    dedicated_rate: float  # tokens per second
    longest_s: float  # the longest sample on an otherwise idle engine
    training_s: float
    seeding_s: float  # the training GPUs generate
    generation_s: float  # lag 0: from a batch's first token to its last; otherwise the dedicated side's time per step
    pull_s: float  # transfer of new weights to the dedicated engines
    exposed_pull_s: float  # part of pull_s in which training and generation wait
    step_s: float
    trainer_idle: float
    dedicated_idle: float
    usd_per_million: float  # per million completion tokens
    hours: float  # of all steps
    usd: float  # of all steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


def estimate(question: PlacementQuestion, placement: Placement, sheet: Derivation | None = None) -> Estimate:
    """Estimate an average step."""
    sheet = sheet or Derivation()
    tokens = batch_tokens(question, sheet)
    # The sides divide a batch in proportion to their speed.
    steady = placement.shared.steady(question), placement.dedicated.steady(question)
    parts = [question.rollout.samples * (rate / sum(steady)) for rate in steady]
    shared = placement.shared.tokens_per_s(question, parts[0], "shared", sheet)
    dedicated = placement.dedicated.tokens_per_s(question, parts[1], "dedicated", sheet)
    side = placement.dedicated if placement.dedicated.engines else placement.shared
    first, last = streaming(question)
    used = [offer for offer, _ in placement.training.group.members]
    used += [engine.offer for engine, _ in placement.dedicated.engines]
    prices = "; ".join(dict.fromkeys(f"{offer.name}: {offer.machine.price_source}" for offer in used))
    step = _with_lag if question.lag else _on_policy
    values = sheet.evaluate(
        {
            **step(shared=shared > 0, dedicated=dedicated > 0),
            "trainer_idle_share": (
                "of a step",
                "positive(1 - (training_s + seeding_s) / step_s)",
                "time in which the training GPUs neither train nor generate",
            ),
            "dedicated_idle_share": (
                "of a step",
                "positive(1 - generation_s / step_s)" if dedicated else "0.0",
                "time in which the dedicated machines do not generate; 0 without any",
            ),
            "usd_per_hour": ("USD", "training + generating", prices),
            **COSTS,
        },
        tokens=tokens,
        shared=shared,
        dedicated=dedicated,
        longest_s=question.rollout.lengths[-1] * side.token_s,
        training_s=placement.training.seconds,
        pull_s=_pull_s(question, placement, sheet),
        lag=question.lag,
        first=first,
        last=last,
        training=placement.training.group.usd_per_hour,
        generating=placement.dedicated.usd_per_hour,
        steps=question.steps,
        seconds_per_hour=SECONDS_PER_HOUR,
        million=1e6,
    )
    return Estimate(
        placement=placement,
        tokens=tokens,
        shared_rate=shared,
        dedicated_rate=dedicated,
        longest_s=values["longest_s"],
        training_s=values["training_s"],
        seeding_s=values["seeding_s"],
        generation_s=values["generation_s"],
        pull_s=values["pull_s"],
        exposed_pull_s=values["exposed_pull_s"] if question.lag else values["pull_s"],
        step_s=values["step_s"],
        trainer_idle=values["trainer_idle_share"],
        dedicated_idle=values["dedicated_idle_share"],
        usd_per_million=values["usd_per_million_tokens"],
        hours=values["hours"],
        usd=values["cost_usd"],
    )


def batch_tokens(question: PlacementQuestion, sheet: Derivation) -> float:
    """Completion tokens of a batch."""
    return sheet.compute(
        "tokens",
        "tokens",
        formula="samples * mean",
        source="completion tokens of a batch, from the mean of the given lengths",
        samples=question.rollout.samples,
        mean=question.rollout.mean,
    )


COSTS: Formulas = {
    "usd_per_million_tokens": (
        "USD",
        "usd_per_hour * step_s / seconds_per_hour / tokens * million",
        "completion tokens trained on",
    ),
    "hours": ("h", "steps * step_s / seconds_per_hour", "all steps are assumed to be equal"),
    "cost_usd": ("USD", "usd_per_hour * hours", "of all steps"),
}


def _on_policy(*, shared: bool, dedicated: bool) -> Formulas:
    """Lag 0: training starts during the last samples of its batch; the next batch starts after the publish.

    In the seeding window neither side waits for the other: with rates r of the shared and d of the dedicated side, W
    tokens and X seconds of training, t_seed r + t_gen d = W and t_gen = t_seed + (1 - last) X.
    """
    seeding = "max(0, (tokens - dedicated * ((1 - last) * training_s)) / (shared + dedicated))"
    return {
        "seeding_s": (
            "s",
            seeding if shared else "0.0",
            "RLBoost's seeding window, arXiv 2510.19225, in which neither side waits; 0 without a shared side",
        ),
        "generation_s": (
            "s",
            "max((tokens - shared * seeding_s) / dedicated, longest_s)" if dedicated else "seeding_s",
            "the dedicated side generates the rest; a batch takes at least as long as its longest sample",
        ),
        "step_s": (
            "s",
            "max(max(seeding_s, first * generation_s) + training_s, generation_s + last * training_s) + pull_s",
            "lag 0: training overlaps the generation of the last samples if advantages allow it; fractions assumed",
        ),
    }


def _with_lag(*, shared: bool, dedicated: bool) -> Formulas:
    """Lag 1 or more: the next batch is generated during training, so slots stay full and there is no tail.

    In a step the training GPUs generate for f seconds and train for X, and the dedicated ones generate all the time:
    f r + step d = W. The longest sample has lag + 1 steps to finish, or the trainer waits for it.
    """
    return {
        "busy_s": (
            "s",
            "max((tokens + shared * training_s) / (shared + dedicated), training_s, longest_s / (lag + 1))",
            "lag 1 or more: both sides work all the time; the longest sample has lag + 1 steps",
        ),
        "exposed_pull_s": ("s", "max(0.0, pull_s - lag * busy_s)", "the steps of the lag hide the transfer of weights"),
        "step_s": ("s", "busy_s + exposed_pull_s", "what is not hidden delays the next step"),
        "seeding_s": (
            "s",
            "max(0.0, tokens - dedicated * busy_s) / shared" if shared else "0.0",
            "the training GPUs generate what the dedicated side does not; 0 without a shared side",
        ),
        "generation_s": (
            "s",
            "(tokens - shared * seeding_s) / dedicated" if dedicated else "seeding_s",
            "the dedicated side's part of a step",
        ),
    }


def streaming(question: PlacementQuestion) -> tuple[float, float]:
    """At lag 0: (fraction of the generation before training starts, fraction of the training after generation ends)."""
    return (1.0, 1.0) if question.algorithm in WHOLE_BATCH else (FIRST, LAST)


def _pull_s(question: PlacementQuestion, placement: Placement, sheet: Derivation) -> float:
    """Seconds to send a full version, or an adapter, from the training machines to all dedicated machines at once."""
    if not placement.dedicated.engines:
        return 0.0
    members = placement.training.group.members
    return sheet.compute(
        "pull_s",
        "s",
        formula="max(latency + parameters * 2 * receivers / trainer_rate, latency + parameters * 2 / worker_rate)",
        source="a full version for every dedicated machine, over their networks; a delta is smaller",
        parameters=learned_parameters(question),
        receivers=max(1, math.ceil(placement.dedicated.machines)),
        trainer_rate=sum(offer.machine.network_bytes_per_s * count for offer, count in members),
        worker_rate=min(engine.offer.machine.network_bytes_per_s for engine, _ in placement.dedicated.engines),
        latency=ETHERNET_LATENCY_S,
    )
