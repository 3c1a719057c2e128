"""Transfers that share a link, by hand."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.core.protocols import LoopClock
from tidemill.sim.simulated_trainer import Uplink
from tidemill.sim.virtual_time import run_virtual


async def ends(uplink: Uplink, transfers: list[tuple[float, float]]) -> list[float]:
    """When each of the (begin, bytes) transfers is done."""

    async def carry(begin_s: float, nbytes: float) -> float:
        await asyncio.sleep(begin_s)
        await uplink.carry(nbytes)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(carry(*transfer) for transfer in transfers)))


def test_concurrent_pulls_share_the_uplink() -> None:
    async def run() -> list[float]:
        return await ends(Uplink(100.0, 60.0, LoopClock()), [(0.0, 120.0), (1.0, 100.0), (1.0, 300.0)])

    # One second alone at 60: 60 of 120 are left. Then three at 33.3: 1.8 s for them, at 2.8 s. The second has 40 left,
    # two at 50: 0.8 s, at 3.6 s. The third has 200 left, alone at 60: 3.33 s.
    assert run_virtual(run()) == pytest.approx([2.8, 3.6, 3.6 + 200 / 60])


def test_a_cancelled_transfer_frees_its_share() -> None:
    async def run() -> float:
        uplink = Uplink(100.0, 100.0, LoopClock())
        other = asyncio.create_task(uplink.carry(1000.0))
        asyncio.get_running_loop().call_later(2.0, other.cancel)
        await uplink.carry(200.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == pytest.approx(3.0)  # 2 s at 50, then 1 s at 100


def test_infinite_links_take_no_time() -> None:
    async def run() -> list[float]:
        return await ends(Uplink(float("inf"), float("inf"), LoopClock()), [(0.0, 1e12), (1.0, 1e12)])

    assert run_virtual(run()) == [0.0, 1.0]
