"""Named faults for sessions with real workers: of a machine at a stage of its life, of its reports, of the whole fleet.

A seed chooses faults and times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tests.doubles.machines import Corruption, Machine, World, repeated, shuffled
from tests.doubles.transport import corrupt, torn
from tidemill.config.pool import FleetConfig
from tidemill.core.records import TokenDelta, WorkerReport

HEARTBEAT_TIMEOUT_S, JOIN_S, DRAIN_MARGIN_S = 3.0, 15.0, 0.5

Fault = Callable[[World, random.Random, str], None]
"""Schedules a fault in a world; the text is a unique prefix for machine names."""

STAGES = ("boot", "first pull", "later pull", "decode", "notice", "drain")

MACHINE_FAULTS: dict[str, Callable[[random.Random], Callable[[Machine], None]]] = {
    "evicted": lambda rng: Machine.evict,
    "dies": lambda rng: Machine.die,
    "crashes": lambda rng: Machine.crash,
    "stops": lambda rng: Machine.stop,
    "stops past the heartbeat timeout": lambda rng: partial(
        Machine.stop_for, seconds=HEARTBEAT_TIMEOUT_S * rng.uniform(1.5, 3)
    ),
    "stops briefly": lambda rng: partial(Machine.stop_for, seconds=HEARTBEAT_TIMEOUT_S * rng.uniform(0.1, 0.7)),
    "slows": lambda rng: Machine.slow_down,
    "disconnected": lambda rng: partial(Machine.disconnect, seconds=_cut_s(rng), redelivery=list),
    "disconnected, repeated": lambda rng: partial(Machine.disconnect, seconds=_cut_s(rng), redelivery=repeated),
    "disconnected, reordered": lambda rng: partial(
        Machine.disconnect, seconds=_cut_s(rng), redelivery=shuffled(rng.getrandbits(32))
    ),
}


def _cut_s(rng: random.Random) -> float:
    return HEARTBEAT_TIMEOUT_S * rng.uniform(0.1, 2.5)


def machine(
    world: World, rng: random.Random, name: str, *, stage: str = "", happens: Callable[[Machine], None] | None = None
) -> Machine:
    """A machine that is granted early; it gets a notice if the stage needs one."""
    made = Machine(world, name)
    if stage in ("notice", "drain"):
        made.at("decode", rng.uniform(0.0, 2.0), Machine.notice)
    if happens is not None:
        made.at(stage, rng.uniform(0.0, 0.4), happens)
    world.after(rng.uniform(0.0, 4.0), made.grant)
    return made


def _machine_fault(kind: str, stage: str) -> Fault:
    def fault(world: World, rng: random.Random, name: str) -> None:
        machine(world, rng, name, stage=stage, happens=MACHINE_FAULTS[kind](rng))

    return fault


# Corrupted reports, from some moment on.


def _each(change: Callable[[TokenDelta], TokenDelta]) -> Corruption:
    def corruption(report: WorkerReport) -> WorkerReport:
        return msgspec.structs.replace(report, deltas=tuple(map(change, report.deltas)))

    return corruption


_replace = msgspec.structs.replace


def _in_others_names(world: World, own: str) -> Corruption:
    """It also finishes samples of other workers, with wrong tokens."""

    def corruption(report: WorkerReport) -> WorkerReport:
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

    return corruption


REPORT_CORRUPTIONS: dict[str, Corruption] = {
    "omits tokens": _each(lambda delta: _replace(delta, start=delta.start + 2)),
    "names another version": _each(
        lambda delta: _replace(delta, version=_replace(delta.version, number=delta.version.number + 1))
    ),
    "omits logprobs": _each(lambda delta: _replace(delta, logprobs=delta.logprobs[:-4])),
    "breaks tokens": _each(lambda delta: _replace(delta, token_ids=delta.token_ids[:-1])),
    "invents samples": _each(
        lambda delta: _replace(delta, sample_id=_replace(delta.sample_id, prompt_id="nobody's"), finish="stop")
    ),
    "repeats deltas": lambda report: _replace(report, deltas=report.deltas * 2),
    "restarts at token 0": _each(lambda delta: _replace(delta, start=0)),
    "sends garbage": lambda report: b"\xff",  # type: ignore[dict-item, return-value]
}


def _corrupted_reports(kind: str) -> Fault:
    def fault(world: World, rng: random.Random, name: str) -> None:
        corrupt = partial(Machine.corrupt_reports, corruption=REPORT_CORRUPTIONS[kind])
        machine(world, rng, name, stage="decode", happens=corrupt)

    return fault


def _impostor(world: World, rng: random.Random, name: str) -> None:
    corruption = _in_others_names(world, f"lease-{name}")
    machine(world, rng, name, stage="decode", happens=partial(Machine.corrupt_reports, corruption=corruption))


# Faults of the whole fleet.


def _outage(world: World, rng: random.Random, name: str) -> None:
    """All machines are evicted at once; others come later."""

    def begins() -> None:
        for one in world.present:
            one.evict()
        world.after(rng.uniform(5, 40), Machine(world, name).grant)

    machine(world, rng, f"{name}-before")
    world.after(rng.uniform(1.0, 6.0), begins)


def herd(world: World, rng: random.Random, name: str, *, size: int = 40) -> None:
    """Many machines join together and are evicted within seconds, each at another stage."""
    at_s = rng.uniform(0.0, 3.0)
    for each in range(size):
        one = Machine(world, f"{name}-{each}")
        world.after(at_s, one.grant)
        world.after(at_s + rng.expovariate(1 / 1.5), one.evict)


def _spoiled_pulls(world: World, rng: random.Random, name: str) -> None:
    """Some reads are torn or have a flipped bit, and are repeated."""
    for kind in ("manifest", "snapshot", "delta"):
        for fault in (torn, corrupt):
            world.transport.spoil(kind, fault, times=rng.randint(1, 3))
    for each in range(2):
        machine(world, rng, f"{name}-{each}")


def _slow_publisher(world: World, rng: random.Random, name: str) -> None:
    world.publisher.seconds = rng.uniform(2.0, 20.0)
    machine(world, rng, name)


def _slow_network(world: World, rng: random.Random, name: str) -> None:
    """A pull takes so long that its version is deleted meanwhile."""
    world.transport.delay_s = rng.uniform(0.5, 2.5)
    machine(world, rng, name)


FAULTS: dict[str, Fault] = {
    **{
        f"{fault}: {stage}": _machine_fault(fault, stage)
        for fault in MACHINE_FAULTS
        for stage in STAGES
        if not (stage == "boot" and fault.startswith("disconnected"))  # there is no connection yet
    },
    **{f"corrupts: {kind}": _corrupted_reports(kind) for kind in REPORT_CORRUPTIONS},
    "corrupts: finishes samples of others": _impostor,
    "outage": _outage,
    "herd": herd,
    "spoiled pulls": _spoiled_pulls,
    "slow publisher": _slow_publisher,
    "slow network": _slow_network,
}


def setting(seed: int, names: Sequence[str], *, helpers: int) -> Callable[[World], None]:
    """Schedules the faults in a world with `helpers` undisturbed machines."""

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
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        join_timeout_s=JOIN_S,
        drain_margin_s=DRAIN_MARGIN_S,
        seed_window_s=rng.choice([0.0, 0.5, 5.0]),
        queue_limit=rng.choice([1, 8]),
        max_moves=rng.choice([0, 2]),
        seeding=rng.random() < 0.7,
    )
