"""What a seed asks for: a run, its fleet, and what befalls them in each life of the controller."""

from __future__ import annotations

import random
from typing import Any, Literal, TypeAlias, get_args

from tidemill.config.schema import RunSpec
from tidemill.core.records import Record
from tidemill.sim.costs import ConstantEngine, ConstantTrainer

Befalls: TypeAlias = Literal[
    "taken",  # its provider says so, sooner or later
    "warned",  # its provider says so before
    "told",  # the worker says so before
    "dies",  # its connection is closed
    "crashes",  # the worker raises
    "hangs",  # nothing comes of it, and nothing reaches it
    "slows",
    "delays",  # its messages come late, in order
    "reorders",
    "repeats",
    "loses",  # some of its messages never come
    "forgets",  # some of the samples it is given
    "lies",  # it says what does not fit
    "computes wrongly",
]

BREAKING: frozenset[Befalls] = frozenset({"crashes", "reorders", "loses", "lies"})
"""By these an attempt at a sample may fail; three failures are the run's end."""

Blow: TypeAlias = Literal[
    "power cut", "stop", "scorer raises", "scorer hangs", "provider raises", "reserved engine dies"
]
"""What ends a life of the controller."""


class Fate(Record):
    """Something that befalls a machine."""

    kind: Befalls
    at_s: float  # after it was granted
    lasts_s: float  # of a hang, a delay or a warning
    share: float  # of messages or samples that are hit
    lie: int  # which


class MachinePlan(Record):
    """A machine that is offered, and what becomes of it."""

    name: str
    granted_s: float
    told_late_s: float  # what its provider says arrives so much later
    told_twice: bool
    boot_s: float
    slowness: float
    fates: tuple[Fate, ...]


class LifePlan(Record):
    """One life of the controller, from its start to its end."""

    seed: int
    blow: Blow | None  # None in the last life: the run must end by itself
    blow_s: float
    journal_bytes: int  # that can be written before the power goes
    journal_s: float  # of every append
    loses_checkpoint: bool  # the newest one, before this life
    salt: str  # of the versions made in it
    spoiled: tuple[tuple[str, bool, int], ...]  # (kind of blob, torn rather than corrupt, reads)
    machines: tuple[MachinePlan, ...]


class Scenario(Record):
    """Everything that a seed decides."""

    seed: int
    sections: dict[str, Any]  # of the `RunSpec`
    engine: ConstantEngine
    trainer: ConstantTrainer
    tick_s: float
    heartbeat_timeout_s: float
    elastic: bool
    reserved: bool
    longest: int  # completion
    different_prompts: int
    score_s: float
    fetch_s: float
    lives: tuple[LifePlan, ...]

    @property
    def spec(self) -> RunSpec:
        return RunSpec.model_validate(self.sections)


INFINITE_S = float("inf")
MU_STEP = {"correction": {"kind": "mu_step"}}
"""Every publish asks for logprobs of what is in flight."""
LONG_SILENCE_S = 10.0


def draw(seed: int) -> Scenario:
    """The same scenario for the same seed, on every machine."""
    rng = random.Random(f"faults {seed}")
    sections = _sections(rng)
    elastic = rng.random() < 0.9
    lives = rng.choice([1, 1, 2, 2, 3, 4])
    heartbeat_timeout_s = rng.choice([3.0, 3.0, 6.0, INFINITE_S])
    engine = ConstantEngine(
        slots=rng.choice([1, 2, 3, 4, 8]),
        plateau=rng.choice([1, 2, 8]),
        step_s=rng.choice([0.02, 0.1, 0.3]),
        prefill_tokens_per_s=rng.choice([100.0, 10_000.0]),
    )
    longest = rng.choice([3, 12, 40])
    # A worker that tells of its samples only when they end must not look as if it made nothing.
    rarely = INFINITE_S if engine.decode_s(engine.slots, 0, longest) < LONG_SILENCE_S else 1.0
    return Scenario(
        seed=seed,
        sections=sections,
        engine=engine,
        trainer=ConstantTrainer(
            tokens_per_s=rng.choice([30.0, 300.0, 10_000.0]),
            commit=rng.choice([0.0, 0.3, 2.0]),
            checkpoint=rng.choice([0.0, 0.5]),
        ),
        tick_s=rng.choice([0.1, 0.3, 1.0, rarely]),
        heartbeat_timeout_s=heartbeat_timeout_s,
        elastic=elastic,
        reserved=not elastic or rng.random() < 0.7,
        longest=longest,
        different_prompts=rng.choice([17, 200]),
        score_s=rng.choice([0.0, 0.2, 2.0]),
        fetch_s=rng.choice([0.0, 0.15, 1.0]),
        lives=tuple(_life(rng, at, last=at == lives - 1, elastic=elastic) for at in range(lives)),
    )


def _sections(rng: random.Random) -> dict[str, Any]:
    prompts, lag = rng.randint(1, 5), rng.choice([0, 0, 1, 1, 2, 4])
    schedule: dict[str, Any] = {
        "max_policy_lag": lag,
        "membership": rng.choice(["planned", "first_finished"]),
        "unfinished": rng.choice(["continue", "finish", "restart"]),
        "on_lag_limit": rng.choice(["wait", "restart", "drop"]),
    }
    max_redraws = rng.randint(0, 3)
    overcommit = rng.choice(["none", "adaptive", "some", "fresh"])
    if lag and overcommit == "some":
        schedule["overcommit"] = rng.randint(0, lag * prompts)
    elif lag and overcommit == "adaptive":
        schedule["overcommit"] = "adaptive"
    if overcommit == "fresh":
        schedule["fresh_fraction"] = rng.choice([0.25, 0.5, 1.0])
    return {
        "schedule": schedule,
        "batch": {
            "prompts": prompts,
            "group_size": rng.choice([2, 2, 3, 4]),
            "order": rng.choice(["canonical", "arrival"]),
        },
        "sampling": {"max_new_tokens": rng.choice([2, 12, 30])},
        "trainer": {"steps": rng.randint(2, 5)},
        "algorithm": {
            "max_redraws": max_redraws,
            "dynamic_sampling": rng.random() < 0.25,
            **(MU_STEP if lag and rng.random() < 0.5 else {}),
        },
        "eval": {"every_steps": rng.choice([0, 2]), "prompts": rng.choice([1, 3])},
        "checkpoint": {"every_steps": rng.choice([0, 1, 2])},
        "fleet": {
            "size": rng.choice(["pool", "adaptive"]),
            "seeding": rng.random() < 0.7,
            "seed_window_s": rng.choice([0.0, 0.5, 5.0]),
            "queue_limit": rng.choice([1, 2, 8]),
            "max_moves": rng.choice([0, 2]),
            "tail_fraction": rng.choice([0.0, 0.0, 0.3, 0.9]),
            "drain_margin_s": rng.choice([0.0, 0.3, 2.0]),
            "join_timeout_s": 15.0,
        },
        "pool": {"kind": "static", "workers": 1},
    }


def _life(rng: random.Random, at: int, *, last: bool, elastic: bool) -> LifePlan:
    machines = [_machine(rng, f"{at}-{index}", last=last) for index in range(rng.randint(0, 6))] if elastic else []
    if elastic:
        machines.append(_sound(f"{at}-rescue", granted_s=60.0))
    blows: list[Blow] = [*get_args(Blow)]
    return LifePlan(
        seed=rng.getrandbits(32),
        blow=None if last else rng.choice([*blows, "power cut", "power cut", "power cut"]),
        blow_s=rng.expovariate(1 / 8),
        journal_bytes=int(rng.expovariate(1 / 6000)),
        journal_s=rng.choice([0.0, 0.0, 0.05, 0.5]),
        loses_checkpoint=rng.random() < 0.1,
        salt=rng.choice(["", "", f"life {at}"]),
        spoiled=tuple(
            (kind, rng.random() < 0.5, rng.choice([0, 0, 1, 2])) for kind in ("manifest", "snapshot", "delta")
        ),
        machines=tuple(machines),
    )


def _machine(rng: random.Random, name: str, *, last: bool) -> MachinePlan:
    kinds: list[Befalls] = [*get_args(Befalls)]
    if last:  # three failed attempts are a run's end, and this one is to reach its own
        kinds = [kind for kind in kinds if kind not in BREAKING]
    return MachinePlan(
        name=name,
        granted_s=rng.choice([0.0, rng.uniform(0, 12)]),
        told_late_s=rng.choice([0.0, 0.0, rng.uniform(0, 4)]),
        told_twice=rng.random() < 0.2,
        boot_s=rng.choice([0.0, 0.3, rng.uniform(0, 20)]),
        slowness=rng.choice([1.0, 1.0, 3.0, 10.0]),
        fates=tuple(_fate(rng, rng.choice(kinds)) for _ in range(rng.choice([0, 1, 1, 2, 3]))),
    )


def _sound(name: str, *, granted_s: float) -> MachinePlan:
    """A machine that nothing befalls."""
    return MachinePlan(
        name=name, granted_s=granted_s, told_late_s=0.0, told_twice=False, boot_s=0.1, slowness=1.0, fates=()
    )


def _fate(rng: random.Random, kind: Befalls) -> Fate:
    return Fate(
        kind=kind,
        at_s=rng.choice([0.0, rng.uniform(0, 1), rng.expovariate(1 / 5)]),
        lasts_s=rng.choice([rng.uniform(0, 2), rng.uniform(0, 8), 1e6]),
        share=rng.choice([0.02, 0.2, 1.0]),
        lie=rng.randrange(16),
    )
