"""Tokens of a worker whose weights changed in memory are generated again: the run learns what a healthy one learns."""

from __future__ import annotations

import functools
import random
from typing import Any, cast

import pytest

from tests.chaos.test_faults import everybody_left
from tests.doubles.engine import FakeFrozenScorer
from tests.doubles.faults import fleet_config, machine
from tests.doubles.machines import Machine, World
from tests.doubles.session import Session, small_spec, trained
from tests.virtual_time import run_virtual
from tidemill.guard.machines import MachineWatch

SPEC = small_spec(
    batch={"prompts": 5, "group_size": 4},
    sampling={"max_new_tokens": 30},
    trainer={"steps": 3},
    eval={"every_steps": 0},
)


@functools.cache
def healthy() -> object:
    session = Session(spec=SPEC, frozen_scorer=FakeFrozenScorer())
    run_virtual(session.run())
    return trained(session)


def lived(part: int, seed: int) -> World:
    """A bit in a part of the first machine's weights flips while it decodes; two others are healthy."""

    async def live() -> World:
        rng = random.Random(f"sick {seed}")

        def put(world: World) -> None:
            machine(world, rng, "sick", stage="decode", happens=functools.partial(Machine.flip_a_bit, part=part))
            for name in ("a", "b"):
                machine(world, rng, name)

        made = World(spec=SPEC, setting=put, config=fleet_config(rng), reserved_engine=False, watch=MachineWatch())
        await made.live()
        return made

    done = run_virtual(live())
    everybody_left(done)
    (health,) = done.telemetry.named("worker_health")
    assert (health["worker"], health["state"]) == ("spot-sick", "quarantined")
    assert done.provider.avoided == {"spot-sick": 1800.0}
    return done


@pytest.mark.parametrize(("part", "seed"), [(5, 4), (5, 21), (12, 7), (15, 12)])
def test_tainted_samples_that_were_not_accumulated_are_generated_again(part: int, seed: int) -> None:
    done = lived(part, seed)
    (tainted,) = done.telemetry.named("tainted")
    assert tainted["restarted"] > 0
    assert tainted["trained"] == {}
    assert trained(done) == healthy()


@pytest.mark.parametrize(("part", "seed"), [(12, 21), (15, 6)])
def test_samples_that_were_accumulated_before_are_named(part: int, seed: int) -> None:
    done = lived(part, seed)
    (tainted,) = done.telemetry.named("tainted")
    wrong = [
        (str(step), f"{sample[0].prompt_id}/{sample[0].index}")
        for step, batch in enumerate(done.trainer.state.history, start=1)
        for _, _, samples in cast("Any", batch)
        for sample in samples
        if any(run.version.digest == "wrong bit" for run in sample[7])
    ]
    assert wrong
    assert {name for _, name in wrong} <= set(tainted["samples"])
    assert {step for step, _ in wrong} <= tainted["trained"].keys()
