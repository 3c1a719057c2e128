"""Daemon threads: results, faults, and calls that hang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tidemill.envs.text.threads import DaemonThreads, HangingError


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- a thread's end sets no event of the loop
            await asyncio.sleep(0.005)


async def test_results_come_from_a_daemon_thread_that_is_used_again() -> None:
    threads = DaemonThreads(most_hanging=1)
    first = await threads.call(threading.current_thread, timeout_s=10)
    second = await threads.call(threading.current_thread, timeout_s=10)
    assert first is second
    assert first.daemon
    assert first is not threading.current_thread()
    threads.close()
    await until(lambda: not first.is_alive())


async def test_exceptions_arrive_and_those_that_would_end_the_loop_are_wrapped() -> None:
    def fail(error: BaseException) -> None:
        raise error

    threads = DaemonThreads(most_hanging=1)
    with pytest.raises(KeyError):
        await threads.call(lambda: fail(KeyError("x")), timeout_s=10)
    for error in (SystemExit(3), StopIteration("end"), KeyboardInterrupt()):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await threads.call(partial(fail, error), timeout_s=10)
    threads.close()


async def test_a_hanging_call_is_left_behind_and_its_thread_comes_back_when_it_returns(gate: threading.Event) -> None:
    threads = DaemonThreads(most_hanging=2)
    with pytest.raises(TimeoutError):
        await threads.call(gate.wait, timeout_s=0.01)
    assert threads.hanging == 1
    assert await threads.call(lambda: 7, timeout_s=10) == 7  # another thread
    gate.set()
    await until(lambda: threads.hanging == 0)
    threads.close()


async def test_too_many_hanging_calls_refuse_the_next_at_once(gate: threading.Event) -> None:
    threads = DaemonThreads(most_hanging=1)
    with pytest.raises(TimeoutError):
        await threads.call(gate.wait, timeout_s=0.01)
    before = time.monotonic()
    with pytest.raises(HangingError, match="1 earlier"):
        await threads.call(lambda: 7, timeout_s=60)
    assert time.monotonic() - before < 5
    threads.close()


async def test_a_cancelled_caller_leaves_its_call_behind(gate: threading.Event) -> None:
    threads = DaemonThreads(most_hanging=1)
    caller = asyncio.create_task(threads.call(gate.wait, timeout_s=60))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert threads.hanging == 1
    threads.close()
    gate.set()
    await until(lambda: threads.hanging == 0)


async def test_closed_threads_take_no_calls() -> None:
    threads = DaemonThreads(most_hanging=1)
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        await threads.call(lambda: 1, timeout_s=1)
