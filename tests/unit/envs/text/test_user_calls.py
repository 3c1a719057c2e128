"""Calls of user functions: results, errors, and calls that hang."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tidemill.envs.text.loop_thread import CallTimeout
from tidemill.envs.text.user_calls import CallError, HangingError, UserCalls, call_blocking


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def call(calls: UserCalls, function: Callable[[], Any], *, timeout_s: float) -> Any:
    return await calls.call(function, convert=lambda result: result, timeout_s=timeout_s)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- a thread's end sets no event of the loop
            await asyncio.sleep(0.005)


async def test_results_come_from_a_daemon_thread_that_is_used_again() -> None:
    calls = UserCalls(most_hanging=1)
    first = await call(calls, threading.current_thread, timeout_s=10)
    second = await call(calls, threading.current_thread, timeout_s=10)
    assert first is second
    assert first.daemon
    assert first is not threading.current_thread()
    await calls.close()
    await until(lambda: not first.is_alive())


async def test_every_exception_arrives_as_a_call_error() -> None:
    def fail(error: BaseException) -> None:
        raise error

    calls = UserCalls(most_hanging=1)
    with pytest.raises(CallError, match="KeyError"):
        await call(calls, lambda: fail(KeyError("x")), timeout_s=10)
    for error in (SystemExit(3), StopIteration("end"), KeyboardInterrupt()):
        with pytest.raises(CallError, match=type(error).__name__):
            await call(calls, partial(fail, error), timeout_s=10)
    await calls.close()


async def test_a_hanging_call_is_left_behind_and_its_thread_comes_back_when_it_returns(gate: threading.Event) -> None:
    calls = UserCalls(most_hanging=2)
    with pytest.raises(CallTimeout):
        await call(calls, gate.wait, timeout_s=0.01)
    assert calls.hanging == 1
    assert await call(calls, lambda: 7, timeout_s=10) == 7  # another thread
    gate.set()
    await until(lambda: calls.hanging == 0)
    await calls.close()


async def test_too_many_hanging_calls_refuse_the_next_at_once(gate: threading.Event) -> None:
    calls = UserCalls(most_hanging=1)
    with pytest.raises(CallTimeout):
        await call(calls, gate.wait, timeout_s=0.01)
    before = time.monotonic()
    with pytest.raises(HangingError, match="1 earlier"):
        await call(calls, lambda: 7, timeout_s=60)
    assert time.monotonic() - before < 5
    await calls.close()


async def test_a_cancelled_caller_leaves_its_call_behind(gate: threading.Event) -> None:
    calls = UserCalls(most_hanging=1)
    caller = asyncio.create_task(call(calls, gate.wait, timeout_s=60))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert calls.hanging == 1
    await calls.close()
    gate.set()
    await until(lambda: calls.hanging == 0)


async def test_closed_calls_refuse() -> None:
    calls = UserCalls(most_hanging=1)
    await calls.close()
    with pytest.raises(RuntimeError, match="closed"):
        await call(calls, lambda: 1, timeout_s=1)


async def test_awaitables_run_on_a_loop_of_their_own_and_share_it() -> None:
    calls = UserCalls(most_hanging=1)

    async def loop() -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    first, second = await call(calls, loop, timeout_s=10), await call(calls, loop, timeout_s=10)
    assert first is second
    assert first is not asyncio.get_running_loop()
    await calls.close()
    await until(lambda: not first.is_running())


async def test_an_awaitable_that_blocks_its_loop_is_replaced_and_later_ones_run() -> None:
    calls, gate = UserCalls(most_hanging=4), threading.Event()

    async def blocks() -> None:
        gate.wait(30)

    async def quick() -> int:
        return 7

    with pytest.raises(CallTimeout):
        await call(calls, blocks, timeout_s=0.05)
    await until(lambda: calls._loop_thread._loop is None)
    assert await call(calls, quick, timeout_s=10) == 7
    gate.set()
    await calls.close()


async def test_an_awaitable_that_ignores_its_cancellation_does_not_hold_up_the_close() -> None:
    calls, ending = UserCalls(most_hanging=4), threading.Event()

    async def stubborn() -> None:
        while not ending.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    with pytest.raises(CallTimeout):
        await call(calls, stubborn, timeout_s=0.05)
    async with asyncio.timeout(10):
        await calls.close()
    ending.set()


async def test_the_conversion_of_a_result_has_the_same_deadline(gate: threading.Event) -> None:
    calls = UserCalls(most_hanging=1)
    with pytest.raises(CallTimeout):
        await calls.call(lambda: 1, convert=lambda _: gate.wait(), timeout_s=0.01)
    await calls.close()


def test_a_blocking_call_has_a_deadline_without_a_loop(gate: threading.Event) -> None:
    assert call_blocking(lambda: 7, timeout_s=10) == 7
    with pytest.raises(CallTimeout):
        call_blocking(gate.wait, timeout_s=0.01)
