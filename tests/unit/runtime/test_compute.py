"""The compute thread: order, exceptions, cancellation, ending."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest

from tidemill.core.errors import DeadlineError
from tidemill.runtime.compute import ComputeThread


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread("test-compute")
    yield thread
    await thread.close(5.0)


async def test_calls_run_one_at_a_time_in_order_off_the_loop(compute: ComputeThread) -> None:
    order: list[int] = []
    threads: set[int] = set()

    def call(number: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.002)
        order.append(number)
        return number * 2

    results = await asyncio.gather(*(compute.run(lambda n=number: call(n)) for number in range(10)))  # type: ignore[misc]

    assert results == [number * 2 for number in range(10)]
    assert order == list(range(10))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_the_loop_runs_during_a_call(compute: ComputeThread) -> None:
    ready = threading.Event()
    call = asyncio.create_task(compute.run(lambda: ready.wait(5.0)))
    await asyncio.sleep(0.01)  # would never end if the call ran on the loop
    ready.set()
    assert await call


@pytest.mark.parametrize("raised", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()])
async def test_an_exception_is_raised_in_the_caller_and_the_thread_survives(
    compute: ComputeThread, raised: BaseException
) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(type(raised)):
        await compute.run(fail)
    assert await compute.run(lambda: "alive") == "alive"


async def test_stop_iteration_cannot_be_awaited_and_is_wrapped(compute: ComputeThread) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await compute.run(lambda: next(iter(())))


async def test_a_cancelled_call_that_has_not_started_is_skipped_and_a_running_one_is_not(
    compute: ComputeThread,
) -> None:
    started, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def first() -> None:
        started.set()
        go_on.wait(5.0)
        done.append("first")

    running = asyncio.create_task(compute.run(first))
    waiting = asyncio.create_task(compute.run(lambda: done.append("second")))
    await asyncio.to_thread(started.wait, 5.0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    go_on.set()

    await compute.run(lambda: done.append("third"))

    assert done == ["first", "third"]


async def test_a_closed_thread_refuses_calls() -> None:
    class SlowToEnd(ComputeThread):
        def _serve(self) -> None:
            super()._serve()
            time.sleep(0.05)

    thread = SlowToEnd("brief")
    last = asyncio.create_task(thread.run(lambda: 7))
    await asyncio.sleep(0)
    await thread.close(5.0)
    await thread.close(5.0)

    assert await last == 7
    with pytest.raises(RuntimeError, match="brief is closed"):
        await thread.run(lambda: 8)
    assert not any(found.name == "brief" for found in threading.enumerate())


async def test_closing_has_a_deadline() -> None:
    thread, go_on = ComputeThread("stuck"), threading.Event()
    call = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
    await asyncio.sleep(0.01)

    with pytest.raises(DeadlineError, match=r"waited 0.1 s for computations to end; look at the call .* stuck"):
        await thread.close(0.1)

    go_on.set()
    assert await call
    await thread.close(5.0)


def test_a_result_after_the_loop_was_closed_is_ignored() -> None:
    thread, go_on = ComputeThread("late"), threading.Event()

    async def leave() -> None:
        call = asyncio.create_task(thread.run(lambda: go_on.wait(10.0)))
        await asyncio.sleep(0.01)
        call.cancel()

    asyncio.run(leave())
    go_on.set()

    async def again() -> int:
        return await thread.run(lambda: 5)

    assert asyncio.run(again()) == 5
    asyncio.run(thread.close(5.0))


async def test_low_priority_calls_wait_until_the_thread_is_idle() -> None:
    thread, done, go_on = ComputeThread("busy"), list[str](), threading.Event()

    def note(word: str) -> None:
        go_on.wait(10.0)
        done.append(word)

    calls = [asyncio.create_task(thread.run(lambda: note("low priority"), when_idle=True))]
    calls += [asyncio.create_task(thread.run(partial(note, word))) for word in ("first", "second")]
    await asyncio.sleep(0)  # all three calls are made
    go_on.set()
    await asyncio.gather(*calls)
    assert done == ["first", "second", "low priority"]
    await thread.close(5.0)


async def test_waiting_low_priority_calls_are_cancelled_at_the_end() -> None:
    thread = ComputeThread("ending")
    waiting = asyncio.create_task(thread.run(lambda: 1, when_idle=True))
    await asyncio.sleep(0)
    await thread.close(5.0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(RuntimeError, match="ending is closed"):
        await thread.run(lambda: 2, when_idle=True)
