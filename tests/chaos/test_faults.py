"""Faults of workers, weights, pool and disk in virtual time do not change what the trainer learns."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.doubles.engine import FakeFrozenScorer
from tests.doubles.faults import FAULTS, fleet_config, herd, setting
from tests.doubles.journal import MemoryJournal, PowerCut
from tests.doubles.machines import World
from tests.doubles.session import Disk, Session, small_spec, trained
from tests.rotation import daily
from tests.virtual_time import run_virtual
from tidemill.controller.ledger import Ledger
from tidemill.core.errors import UserError

SPEC = small_spec(batch={"prompts": 5, "group_size": 4}, sampling={"max_new_tokens": 30}, trainer={"steps": 4})


@functools.cache
def quiet() -> object:
    session = Session(spec=SPEC, frozen_scorer=FakeFrozenScorer())
    run_virtual(session.run())
    return trained(session)


def world(seed: int, put: Callable[[World], None], **changes: Any) -> World:
    rng = random.Random(f"world {seed}")
    return World(spec=SPEC, setting=put, config=fleet_config(rng), reserved_engine=rng.random() < 0.7, **changes)


def lived(seed: int, put: Callable[[World], None], **changes: Any) -> World:
    """Run the world of a seed; its results equal those of an undisturbed run and no lease is left."""

    async def live() -> World:
        made = world(seed, put, **changes)
        await made.live()
        return made

    done = run_virtual(live())
    assert trained(done) == quiet()
    everybody_left(done)
    return done


def everybody_left(done: World) -> None:
    """Every lease ended, its worker was informed, and leases not taken by the provider were released."""
    told = done.telemetry.named
    assert told("quarantine") == []  # no worker computes with wrong bytes
    assert [f["lease"] for f in told("lease")] == [*dict.fromkeys(f["lease"] for f in told("lease"))]
    ends = {f["lease"]: f for f in told("lease_end")}
    assert len(ends) == len(told("lease_end"))
    assert {f["lease"] for f in told("lease")} == ends.keys() - {"local"}
    evicted = [lease for lease, end in ends.items() if end["evicted"]]
    assert sorted(evicted) == sorted(f["lease"] for f in told("eviction"))
    for machine in done.machines.values():
        if machine.lease_id in ends and machine.worker is not None:
            assert machine.worker.killed
            given_back = ends[machine.lease_id]["cause"] not in ("evicted", "the run ended")
            assert (machine.lease_id in done.provider.released) == given_back


@pytest.mark.parametrize("name", FAULTS)
def test_a_single_fault(name: str, chaos_rounds: int) -> None:
    worlds = [lived(seed, setting(seed, [name], helpers=seed % 2)) for seed in range(chaos_rounds)]

    assert any(not machine.spared for world in worlds for machine in world.machines.values())


def some(rng: random.Random) -> Sequence[str]:
    """A few faults, at most two of those that fail an attempt at a sample: three end the run."""
    names = rng.sample(sorted(FAULTS), rng.randint(3, 7))
    failing = [name for name in names if name.startswith(("crashes", "corrupts")) or name.endswith("reordered")]
    return [name for name in names if name not in failing[2:]]


@pytest.mark.parametrize("seed", daily(range(5), 2))
def test_combined_faults(seed: int, chaos_rounds: int) -> None:
    migrations = 0
    for each in range(5 * chaos_rounds):
        rng = random.Random(f"together {seed} {each}")
        names = some(rng)
        done = lived(rng.getrandbits(32), setting(rng.getrandbits(32), names, helpers=rng.randint(0, 2)))
        migrations += sum(int(step.values.get("migrations", 0)) for step in done.telemetry.steps)
    assert migrations > 10


@pytest.mark.parametrize("seed", daily(range(5), 2))
def test_combined_faults_and_a_killed_controller(seed: int, chaos_rounds: int) -> None:
    kills = 0
    for each in range(2 * chaos_rounds):
        rng, disk = random.Random(f"killed {seed} {each}"), Disk()
        for cut in [*(rng.randint(0, 12_000) for _ in range(rng.randint(1, 3))), None]:
            world = outlived(rng, disk, power_cut_after=cut)
            if world.result is not None:
                break
            kills += 1
        assert trained(world) == quiet()
    assert kills


def outlived(rng: random.Random, disk: Disk, **changes: Any) -> World:
    """One process among faults, until it ends or is cut off."""
    put = setting(rng.getrandbits(32), some(rng), helpers=rng.randint(0, 2))

    async def live() -> World:
        made = world(rng.getrandbits(32), put, disk=disk, **changes)
        try:
            await made.live()
        except PowerCut:
            assert changes["power_cut_after"] is not None
        return made

    done = run_virtual(live())
    everybody_left(done)
    return done


class FullDisk(MemoryJournal):
    """A journal that raises once a number of bytes is written."""

    room = 0

    async def append(self, blobs: Sequence[tuple[int, bytes]]) -> None:
        if len(self.disk) + sum(len(blob) for _, blob in blobs) > self.room:
            raise UserError("the disk is full", where="ledger.sqlite", hint="free some space")
        await super().append(blobs)


@pytest.mark.parametrize("seed", range(3))
def test_combined_faults_and_a_temporarily_full_disk(seed: int, chaos_rounds: int) -> None:
    for each in range(chaos_rounds):
        rng, disk = random.Random(f"full {seed} {each}"), Disk()
        put = setting(rng.getrandbits(32), some(rng), helpers=1)

        async def live(put: Callable[[World], None] = put, disk: Disk = disk, room: int = rng.randint(0, 9000)) -> None:
            made = world(seed, put, disk=disk)
            made.journal = FullDisk(disk.journal)
            made.journal.room = room
            made.ledger = Ledger(made.journal, round_size=SPEC.round_groups)
            await made.live()

        with pytest.raises(UserError, match="the disk is full"):
            run_virtual(live())
        assert trained(outlived(rng, disk)) == quiet()


@pytest.mark.parametrize("seed", range(3))
def test_a_provider_error_ends_the_run_and_a_resumed_one_gives_the_same_weights(seed: int) -> None:
    rng, disk = random.Random(seed), Disk()

    async def live() -> None:
        made = world(seed, setting(seed, some(rng), helpers=1), disk=disk)
        asyncio.get_running_loop().call_later(
            rng.uniform(0.0, 8.0), made.provider.tell, UserError("no credits left", where="pool")
        )
        await made.live()

    with pytest.raises(UserError, match="no credits left"):
        run_virtual(live())
    assert trained(outlived(rng, disk)) == quiet()


def test_two_hundred_workers_join_and_die_within_seconds(chaos_rounds: int) -> None:
    for seed in range(chaos_rounds):
        done = lived(seed, lambda world, seed=seed: herd(world, random.Random(seed), "h", size=200))  # type: ignore[misc]
        assert len(done.telemetry.named("lease")) == 200
        assert len(done.telemetry.named("eviction")) > 50
        assert len(done.telemetry.named("join_failed")) > 20
