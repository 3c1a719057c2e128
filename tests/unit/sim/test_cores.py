"""Threads on shared cores, by hand."""

from __future__ import annotations

import asyncio

import pytest

from tidemill.core.protocols import LoopClock
from tidemill.sim.virtual_time import Cores, VirtualThread, run_virtual


async def ends(*works: tuple[VirtualThread, float]) -> list[float]:
    """When each call is over, all asked for at once."""

    async def call(thread: VirtualThread, seconds: float) -> float:
        await thread.work(seconds)
        return asyncio.get_running_loop().time()

    return list(await asyncio.gather(*(call(*work) for work in works)))


def test_a_thread_runs_calls_in_order() -> None:
    async def run() -> list[float]:
        thread = VirtualThread(Cores(2, LoopClock()))
        return await ends((thread, 1.0), (thread, 2.0))

    assert run_virtual(run()) == pytest.approx([1.0, 3.0])


def test_more_threads_than_cores_share_them() -> None:
    async def run(cores: float) -> list[float]:
        machine = Cores(cores, LoopClock())
        return await ends(*((VirtualThread(machine), seconds) for seconds in (1.0, 2.0, 2.0)))

    assert run_virtual(run(3)) == pytest.approx([1.0, 2.0, 2.0])
    # Three on two cores: at two thirds until 1.5 s; then the two others have a core each, and 1 s left.
    assert run_virtual(run(2)) == pytest.approx([1.5, 2.5, 2.5])


def test_a_call_returns_its_result_after_the_time_spent() -> None:
    async def run() -> tuple[str, float]:
        thread = VirtualThread(Cores(1, LoopClock()))

        def compute() -> str:
            thread.spend(0.25)
            thread.spend(0.5)
            return "done"

        return await thread.run(compute), asyncio.get_running_loop().time()

    result, ended_s = run_virtual(run())
    assert result == "done"
    assert ended_s == pytest.approx(0.75)
