"""Engines on machines: over how many GPUs each, and how fast several kinds generate together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tidemill.core.records import Record
from tidemill.planner.placement.question import Offer, PlacementQuestion
from tidemill.sim.profiles.engine import EngineProfile, cache_bytes, engine_profile
from tidemill.sim.profiles.generation import generation_s, steady_tokens_per_s


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
