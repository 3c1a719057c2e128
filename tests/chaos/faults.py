"""The faults there are, by name: what can happen to a worker at which stage of its life, the lies it may tell, and what
befalls everybody. A seed picks some and says when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tests.chaos.world import Lie, Machine, World, repeated, shuffled
from tidemill.config.pool import FleetConfig
from tidemill.core.records import TokenDelta, WorkerReport
from tidemill.weights.snapshot import corrupt, torn

SILENCE_S, JOIN_S, HAND_BACK_S = 3.0, 15.0, 0.5

Fault = Callable[[World, random.Random, str], None]
"""Puts something into a world that will happen to it; the text is a name for machines that no other fault uses."""

STAGES = ("boot", "first pull", "later pull", "decode", "notice", "hand back")

BLOWS: dict[str, Callable[[random.Random], Callable[[Machine], None]]] = {
    "taken": lambda rng: Machine.taken,
    "dies": lambda rng: Machine.dies,
    "crashes": lambda rng: Machine.crashes,
    "stops for ever": lambda rng: Machine.stops,
    "stops too long": lambda rng: partial(Machine.stops_for, seconds=SILENCE_S * rng.uniform(1.5, 3)),
    "stops a while": lambda rng: partial(Machine.stops_for, seconds=SILENCE_S * rng.uniform(0.1, 0.7)),
    "slows": lambda rng: Machine.slows,
    "cut off": lambda rng: partial(Machine.is_cut_off, seconds=_cut_s(rng), mend=list),
    "cut off, heard twice": lambda rng: partial(Machine.is_cut_off, seconds=_cut_s(rng), mend=repeated),
    "cut off, heard in disorder": lambda rng: partial(
        Machine.is_cut_off, seconds=_cut_s(rng), mend=shuffled(rng.getrandbits(32))
    ),
}


def _cut_s(rng: random.Random) -> float:
    return SILENCE_S * rng.uniform(0.1, 2.5)


def machine(
    world: World, rng: random.Random, name: str, *, stage: str = "", happens: Callable[[Machine], None] | None = None
) -> Machine:
    """One that comes early on; it is warned if what happens does so only to the warned."""
    made = Machine(world, name)
    if stage in ("notice", "hand back"):
        made.at("decode", rng.uniform(0.0, 2.0), Machine.warned)
    if happens is not None:
        made.at(stage, rng.uniform(0.0, 0.4), happens)
    world.after(rng.uniform(0.0, 4.0), made.grant)
    return made


def _blow(blow: str, stage: str) -> Fault:
    def fault(world: World, rng: random.Random, name: str) -> None:
        machine(world, rng, name, stage=stage, happens=BLOWS[blow](rng))

    return fault


# What a worker may say that is not so: its reports from some moment on.


def _each(change: Callable[[TokenDelta], TokenDelta]) -> Lie:
    def lie(report: WorkerReport) -> WorkerReport:
        return msgspec.structs.replace(report, deltas=tuple(map(change, report.deltas)))

    return lie


_replace = msgspec.structs.replace


def _in_others_names(world: World, own: str) -> Lie:
    """Besides its own it ends, with wrong tokens, what others have."""

    def lie(report: WorkerReport) -> WorkerReport:
        engines = [world.engine, *(one.engine for one in world.present if one.engine is not None)]
        jobs = [job for engine in engines for job in engine.jobs.values() if job[0].lease_id != own]
        wrong = [
            _replace(
                report.deltas[0],
                sample_id=job.sample_id,
                lease_id=job.lease_id,
                attempt=job.attempt,
                start=at,
                finish="stop",
            )
            for job, at in jobs
        ]
        return _replace(report, deltas=(*report.deltas, *wrong))

    return lie


LIES: dict[str, Lie] = {
    "leaves tokens out": _each(lambda delta: _replace(delta, start=delta.start + 2)),
    "names other weights": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=delta.version.number + 1))
    ),
    "forgets logprobs": _each(lambda delta: _replace(delta, logprobs=delta.logprobs[:-4])),
    "breaks tokens": _each(lambda delta: _replace(delta, token_ids=delta.token_ids[:-1])),
    "makes up samples": _each(
        lambda delta: _replace(delta, sample_id=_replace(delta.sample_id, prompt_id="nobody's"), finish="stop")
    ),
    "says everything twice": lambda report: _replace(report, deltas=report.deltas * 2),
    "says it again and again": _each(lambda delta: _replace(delta, start=0)),
    "speaks nonsense": lambda report: b"\xff",  # type: ignore[dict-item, return-value]
}


def _lie(told: str) -> Fault:
    def fault(world: World, rng: random.Random, name: str) -> None:
        machine(world, rng, name, stage="decode", happens=partial(Machine.lies, lie=LIES[told]))

    return fault


def _impostor(world: World, rng: random.Random, name: str) -> None:
    lie = _in_others_names(world, f"lease-{name}")
    machine(world, rng, name, stage="decode", happens=partial(Machine.lies, lie=lie))


# What befalls everybody.


def _outage(world: World, rng: random.Random, name: str) -> None:
    """Everybody who is there goes at once, and later others come."""

    def begins() -> None:
        for one in world.present:
            one.taken()
        world.after(rng.uniform(5, 40), Machine(world, name).grant)

    machine(world, rng, f"{name}-before")
    world.after(rng.uniform(1.0, 6.0), begins)


def herd(world: World, rng: random.Random, name: str, *, size: int = 40) -> None:
    """They come together and die within seconds, each at its own stage."""
    at_s = rng.uniform(0.0, 3.0)
    for each in range(size):
        one = Machine(world, f"{name}-{each}")
        world.after(at_s, one.grant)
        world.after(at_s + rng.expovariate(1 / 1.5), one.taken)


def _spoiled_pulls(world: World, rng: random.Random, name: str) -> None:
    """Some of what is read arrives torn or with a wrong bit; it is read again."""
    for kind in ("manifest", "snapshot", "delta"):
        for fault in (torn, corrupt):
            world.transport.spoil(kind, fault, times=rng.randint(1, 3))
    for each in range(2):
        machine(world, rng, f"{name}-{each}")


def _slow_publisher(world: World, rng: random.Random, name: str) -> None:
    world.publisher.seconds = rng.uniform(2.0, 20.0)
    machine(world, rng, name)


def _slow_network(world: World, rng: random.Random, name: str) -> None:
    """What a pull began with is no longer published when it ends."""
    world.transport.delay_s = rng.uniform(0.5, 2.5)
    machine(world, rng, name)


FAULTS: dict[str, Fault] = {
    **{
        f"{blow}: {stage}": _blow(blow, stage)
        for blow in BLOWS
        for stage in STAGES
        if not (stage == "boot" and blow.startswith("cut off"))  # there is no line yet
    },
    **{f"lies: {told}": _lie(told) for told in LIES},
    "lies: speaks for others": _impostor,
    "outage": _outage,
    "herd": herd,
    "spoiled pulls": _spoiled_pulls,
    "slow publisher": _slow_publisher,
    "slow network": _slow_network,
}


def setting(seed: int, names: Sequence[str], *, helpers: int) -> Callable[[World], None]:
    """Puts the faults into a world, among `helpers` machines that nothing is planned for."""

    def put(world: World) -> None:
        rng = random.Random(seed)
        for at, name in enumerate(names):
            FAULTS[name](world, rng, f"f{at}")
        for at in range(helpers):
            machine(world, rng, f"h{at}")
        world.after(60.0, Machine(world, "rescue").grant)

    return put


def fleet_config(rng: random.Random) -> FleetConfig:
    return FleetConfig(
        heartbeat_timeout_s=SILENCE_S,
        join_timeout_s=JOIN_S,
        drain_margin_s=HAND_BACK_S,
        seed_window_s=rng.choice([0.0, 0.5, 5.0]),
        queue_limit=rng.choice([1, 8]),
        max_moves=rng.choice([0, 2]),
        seeding=rng.random() < 0.7,
    )
