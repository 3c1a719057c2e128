"""The estimate of one placement: a step's parts, idle shares and money.

Three ways to place, one formula. On the *shared* side the training GPUs also generate, on the *dedicated* side others
do: colocated has only the first, split only the second, hybrid both (RLBoost, arXiv 2510.19225).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from tidemill.core.records import Record
from tidemill.hardware.engine_profile import (
    EngineProfile,
    cache_bytes,
    engine_profile,
    generation_s,
    steady_tokens_per_s,
)
from tidemill.hardware.gpu_catalog import Link, fan_out_s
from tidemill.hardware.model_shape import DTYPE_BYTES
from tidemill.planner.memory.states import WHOLE_BATCH
from tidemill.planner.placement.training import Offer, PlacementQuestion, Training, learned_parameters


class Engine(Record):
    """One engine on a kind of machine."""

    offer: Offer
    gpus: int
    profile: EngineProfile
    fewest_gpus: int  # that hold the model and its longest sample
    smallest: EngineProfile  # of an engine on those

    @property
    def per_machine(self) -> int:
        return self.offer.machine.gpus // self.gpus


class TooSmall(Record):
    """A kind of machine that holds no engine."""

    offer: Offer
    missing_bytes: float  # in one machine, for the longest sample
    missing_alone: float  # the same if nothing trained there


def best_engine(
    question: PlacementQuestion, offer: Offer, *, samples_per_gpu: float, held_per_gpu: float = 0.0
) -> Engine | TooSmall:
    """The number of GPUs with which an engine's share of a batch is generated soonest: at lag 0 with its tail, else as
    a stream.

    Args:
        samples_per_gpu: of a batch, more or less.
        held_per_gpu: bytes that training keeps there.
    """
    needed = question.longest * question.shape.kv_bytes_per_token()
    sizes = [gpus for gpus in powers_of_two(offer.machine.gpus) if question.shape.heads % gpus == 0]
    free = {gpus: _free(question, offer, gpus, held_per_gpu) for gpus in sizes}
    fit = [gpus for gpus in sizes if free[gpus] >= needed]
    if not fit:
        alone = max(_free(question, offer, gpus, 0.0) for gpus in sizes)
        return TooSmall(offer=offer, missing_bytes=needed - max(free.values()), missing_alone=max(needed - alone, 0.0))
    profiles = {gpus: _profile(question, offer, gpus, free[gpus]) for gpus in fit}
    fewest = min(fit)
    engines = [
        Engine(offer=offer, gpus=gpus, profile=profile, fewest_gpus=fewest, smallest=profiles[fewest])
        for gpus, profile in profiles.items()
    ]

    def seconds(engine: Engine) -> float:
        samples = samples_per_gpu * engine.gpus
        if question.lag == 0:
            return generation_s(engine.profile, question.rollout, samples)
        return samples / max(steady_tokens_per_s(engine.profile, question.rollout, samples * question.lag), 1e-9)

    return min(engines, key=seconds)


def powers_of_two(most: int) -> Sequence[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _free(question: PlacementQuestion, offer: Offer, gpus: int, held_per_gpu: float) -> float:
    """Bytes for keys and values; with training on the same GPUs, within its margin."""
    free = cache_bytes(question.shape, offer.gpu, gpus=gpus, dtype=question.engine_dtype, efficiency=question.engine)
    if not held_per_gpu:
        return free
    return free - gpus * (held_per_gpu + offer.gpu.memory_bytes * (question.engine.memory - (1 - question.margin)))


def _profile(question: PlacementQuestion, offer: Offer, gpus: int, free: float) -> EngineProfile:
    profile = engine_profile(
        question.shape, offer.gpu, gpus=gpus, dtype=question.engine_dtype, efficiency=question.engine
    )
    return msgspec.structs.replace(profile, cache_tokens=free / question.shape.kv_bytes_per_token())


class Side(Record):
    """Engines that generate at the same time: (engine, machines that are there on average)."""

    engines: tuple[tuple[Engine, float], ...] = ()

    @property
    def machines(self) -> float:
        return sum(machines for _, machines in self.engines)

    @property
    def usd_per_hour(self) -> float:
        return sum(engine.offer.usd_per_hour * machines for engine, machines in self.engines)

    @property
    def words(self) -> str:
        """`4 × a + 3.2 × b (preemptible)`"""
        return " + ".join(f"{machines:.3g} × {engine.offer.words}" for engine, machines in self.engines)

    @property
    def token_s(self) -> float:
        """Least time of one token of one sample, on the slowest of them."""
        return max((engine.profile.decode_step_s(1, 0) for engine, _ in self.engines), default=0.0)

    def steady(self, question: PlacementQuestion, samples: float = math.inf) -> float:
        """Tokens per second while there is always another sample to begin, `samples` being in flight at most."""
        count = sum(machines * engine.per_machine for engine, machines in self.engines)
        return sum(
            machines * engine.per_machine * steady_tokens_per_s(engine.profile, question.rollout, samples / count)
            for engine, machines in self.engines
        )

    def batch_s(self, question: PlacementQuestion, samples: float) -> float:
        """Of `samples` begun together, each kind taking as many as its speed is of the whole."""
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
"""Of generating a batch at lag 0, the share after which there is something to learn from; assumed, and 1 where
advantages need the whole batch."""
LAST = 0.1
"""Of a batch, what is still to be learned when its last sample arrives; the same."""
SECONDS_PER_HOUR = 3600.0
ROUNDING = 1e-9


class Placement(Record):
    """Where everything is."""

    training: Training
    shared: Side = Side()
    dedicated: Side = Side()

    @property
    def kind(self) -> Kind:
        if not self.shared.engines:
            return "split"
        return "hybrid" if self.dedicated.engines else "colocated"

    @property
    def words(self) -> str:
        """`hybrid: training on 1 × a, generating also on 4 × b`"""
        text = f"{self.kind}: training on {self.training.group.words}"
        if not self.dedicated.engines:
            return text
        return f"{text}, generating {'also ' if self.shared.engines else ''}on {self.dedicated.words}"

    @property
    def usd_per_hour(self) -> float:
        return self.training.group.usd_per_hour + self.dedicated.usd_per_hour


class Estimate(Record):
    """A step of a placement, on average. Seconds, shares of the step's time, dollars."""

    placement: Placement
    step_s: float
    training_s: float
    seeding_s: float  # the training GPUs generate
    generation_s: float  # from the first token of a batch to its last, or what one step's share of generating takes
    pull_s: float  # new weights travel to the dedicated engines
    exposed_pull_s: float  # of which nothing else goes on
    tokens: float  # completion tokens trained per step
    shared_rate: float  # tokens per second of each side
    dedicated_rate: float
    longest_s: float  # the longest sample, with an engine to itself
    trainer_idle: float
    dedicated_idle: float
    hours: float  # of all steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def usd_per_million(self) -> float:
        return self.placement.usd_per_hour * self.step_s / SECONDS_PER_HOUR / self.tokens * 1e6

    @property
    def usd(self) -> float:
        return self.placement.usd_per_hour * self.hours


def estimate(question: PlacementQuestion, placement: Placement) -> Estimate:
    return _on_policy(question, placement) if question.lag == 0 else _with_lag(question, placement)


def _on_policy(question: PlacementQuestion, placement: Placement) -> Estimate:
    """Lag 0: a batch is generated, learned from while its last samples are finished, published, and only then the next.

    The seeding window is the one in which neither side waits for the other: with rates r of the shared and d of the
    dedicated side, W tokens and X seconds of training, t_seed r + t_gen d = W and t_gen = t_seed + (1 - last) X.
    """
    work, training_s = question.rollout.tokens, placement.training.seconds
    shared, dedicated = _rates(question, placement)
    first, last = streaming(question)
    overlap_s = (1 - last) * training_s
    seeding_s = max(0.0, (work - dedicated * overlap_s) / (shared + dedicated)) if shared else 0.0
    generation_s = seeding_s
    if dedicated:
        generation_s = max((work - shared * seeding_s) / dedicated, longest_seconds(question, placement))
    start_s = max(seeding_s, first * generation_s)
    pull_s = pull_seconds(question, placement)
    step_s = max(start_s + training_s, generation_s + last * training_s) + pull_s
    return _estimate(
        question,
        placement,
        rates=(shared, dedicated),
        step_s=step_s,
        seeding_s=seeding_s,
        generation_s=generation_s,
        pull_s=pull_s,
        exposed_pull_s=pull_s,
        dedicated_idle=1 - generation_s / step_s if dedicated else 0.0,
    )


def streaming(question: PlacementQuestion) -> tuple[float, float]:
    """(share of generating after which learning begins, share of learning that is left when generating ends), lag 0"""
    return (1.0, 1.0) if question.algorithm in WHOLE_BATCH else (FIRST, LAST)


def portions(question: PlacementQuestion, placement: Placement) -> tuple[float, float]:
    """The shares of a batch that the shared and the dedicated side generate: as their speeds are."""
    shared, dedicated = placement.shared.steady(question), placement.dedicated.steady(question)
    return shared / (shared + dedicated), dedicated / (shared + dedicated)


def _rates(question: PlacementQuestion, placement: Placement) -> tuple[float, float]:
    """Tokens per second of the shared and the dedicated side, each with its portion: at lag 0 of a batch and with its
    tail, else of what is in flight."""
    rates = []
    for side, portion in zip((placement.shared, placement.dedicated), portions(question, placement), strict=True):
        samples = question.rollout.samples * portion
        if not samples:
            rates.append(0.0)
        elif question.lag:
            rates.append(side.steady(question, samples * question.lag))
        else:
            rates.append(samples * question.rollout.mean / side.batch_s(question, samples))
    return rates[0], rates[1]


def _with_lag(question: PlacementQuestion, placement: Placement) -> Estimate:
    """Lag 1 or more: the next batch is generated meanwhile, so that slots stay full and there is no tail.

    In a step the training GPUs generate for f seconds and learn for X, and the dedicated ones generate all the while:
    f r + step d = W. The longest sample has lag + 1 steps to finish, or the trainer waits for it.
    """
    work, training_s = question.rollout.tokens, placement.training.seconds
    shared, dedicated = _rates(question, placement)
    longest_s = longest_seconds(question, placement)
    busy_s = max((work + shared * training_s) / (shared + dedicated), training_s, longest_s / (question.lag + 1))
    pull_s = pull_seconds(question, placement)
    exposed_s = max(0.0, pull_s - question.lag * busy_s)
    seeding_s = max(0.0, work - dedicated * busy_s) / shared if shared else 0.0
    return _estimate(
        question,
        placement,
        rates=(shared, dedicated),
        step_s=busy_s + exposed_s,
        seeding_s=seeding_s,
        generation_s=(work - shared * seeding_s) / dedicated if dedicated else seeding_s,
        pull_s=pull_s,
        exposed_pull_s=exposed_s,
        dedicated_idle=1 - (work - shared * seeding_s) / dedicated / (busy_s + exposed_s) if dedicated else 0.0,
    )


def longest_seconds(question: PlacementQuestion, placement: Placement) -> float:
    """Of the longest sample alone on the slowest engine of those that generate all the time, if there are any."""
    side = placement.dedicated if placement.dedicated.engines else placement.shared
    return question.rollout.lengths[-1] * side.token_s


def pull_seconds(question: PlacementQuestion, placement: Placement) -> float:
    """Of a full version, or an adapter, by all dedicated machines at once from the training ones."""
    if not placement.dedicated.engines:
        return 0.0
    size = learned_parameters(question) * DTYPE_BYTES["bf16"]
    slowest = min(engine.offer.machine.network_bytes_per_s for engine, _ in placement.dedicated.engines)
    sources = sum(offer.machine.network_bytes_per_s * count for offer, count in placement.training.group.members)
    receivers = max(1, math.ceil(placement.dedicated.machines))
    source, sink = Link(bytes_per_s=sources), Link(bytes_per_s=slowest)
    return fan_out_s(size, source=source, sink=sink, receivers=receivers)


def _estimate(
    question: PlacementQuestion,
    placement: Placement,
    *,
    rates: tuple[float, float],
    step_s: float,
    seeding_s: float,
    generation_s: float,
    pull_s: float,
    exposed_pull_s: float,
    dedicated_idle: float,
) -> Estimate:
    training_s = placement.training.seconds
    return Estimate(
        placement=placement,
        step_s=step_s,
        training_s=training_s,
        seeding_s=seeding_s,
        generation_s=generation_s,
        pull_s=pull_s,
        exposed_pull_s=exposed_pull_s,
        tokens=question.rollout.tokens,
        shared_rate=rates[0],
        dedicated_rate=rates[1],
        longest_s=longest_seconds(question, placement),
        trainer_idle=_share(1 - (training_s + seeding_s) / step_s),
        dedicated_idle=_share(dedicated_idle),
        hours=question.steps * step_s / SECONDS_PER_HOUR,
    )


def _share(value: float) -> float:
    """Without what rounding leaves of nothing."""
    return value if value > ROUNDING else 0.0
