"""Calls of the user's functions: results, faults, deadlines, and what is abandoned."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tidemill.extensions import calls as calls_module
from tidemill.extensions.calls import CallError, CallTimeout, HangingError, UserCalls, call_blocking, call_error


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def calls() -> AsyncIterator[UserCalls]:
    calls = UserCalls(max_hanging=2)
    yield calls
    await calls.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- a thread's end sets no event of the loop
            await asyncio.sleep(0.005)


async def ask(calls: UserCalls, function: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    return await calls.call(function, convert=lambda result: result, timeout_s=timeout_s)


async def test_results_come_from_a_daemon_thread_that_is_used_again(calls: UserCalls) -> None:
    first = await ask(calls, threading.current_thread)
    assert first is await ask(calls, threading.current_thread)
    assert first.daemon
    assert first is not threading.current_thread()
    await calls.close()
    await until(lambda: not first.is_alive())


async def test_an_awaitable_runs_on_another_loop_and_all_share_it(calls: UserCalls) -> None:
    async def running_loop() -> object:
        return asyncio.get_running_loop()

    first = await ask(calls, running_loop)
    assert first is not asyncio.get_running_loop()
    assert first is await ask(calls, running_loop)


async def test_the_conversion_of_a_result_runs_in_the_thread_and_within_the_deadline(
    calls: UserCalls, gate: threading.Event
) -> None:
    def convert(result: int) -> threading.Thread:
        return threading.current_thread()

    assert await calls.call(lambda: 1, convert=convert, timeout_s=10) is not threading.current_thread()
    with pytest.raises(CallTimeout):
        await calls.call(lambda: 1, convert=lambda result: gate.wait(), timeout_s=0.05)


class Speechless(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("end"), "StopIteration: end"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("half a pair: \ud800"), "ValueError: half a pair: \\ud800"),
        (Speechless(), "Speechless: its __str__ raised KeyError"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_arrives_as_text_with_its_place(
    calls: UserCalls, error: BaseException, text: str, asynchronous: bool
) -> None:
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    with pytest.raises(CallError) as caught:
        await ask(calls, fail_later if asynchronous else fail)
    if not (asynchronous and isinstance(error, StopIteration)):  # which Python itself turns into a RuntimeError
        assert str(caught.value).startswith(f"{text} (test_calls.py:")
    str(caught.value).encode()


async def test_a_text_that_hangs_is_abandoned_too(calls: UserCalls, gate: threading.Event) -> None:
    class Slow(Exception):
        def __str__(self) -> str:
            gate.wait()
            return ""

    def fail() -> None:
        raise Slow

    with pytest.raises(CallTimeout):
        await ask(calls, fail, timeout_s=0.05)


async def test_a_hanging_call_is_abandoned_and_its_thread_comes_back_when_it_returns(
    calls: UserCalls, gate: threading.Event
) -> None:
    with pytest.raises(CallTimeout):
        await ask(calls, gate.wait, timeout_s=0.01)
    assert calls.hanging == 1
    assert await ask(calls, lambda: 7) == 7  # another thread
    gate.set()
    await until(lambda: calls.hanging == 0)


async def test_a_coroutine_that_blocks_the_loop_is_abandoned_with_its_loop(
    calls: UserCalls, gate: threading.Event
) -> None:
    async def blocks() -> None:
        gate.wait()

    async def answers() -> int:
        return 7

    with pytest.raises(CallTimeout):
        await ask(calls, blocks, timeout_s=0.01)
    await asyncio.sleep(1.5)  # until the loop counts as blocked
    assert await ask(calls, answers) == 7


async def test_too_many_hanging_calls_refuse_the_next_at_once(calls: UserCalls, gate: threading.Event) -> None:
    for _ in range(2):
        with pytest.raises(CallTimeout):
            await ask(calls, gate.wait, timeout_s=0.01)
    before = time.monotonic()
    with pytest.raises(HangingError, match="2 earlier"):
        await ask(calls, lambda: 7, timeout_s=60)
    assert time.monotonic() - before < 5


async def test_a_cancelled_caller_abandons_its_call(calls: UserCalls, gate: threading.Event) -> None:
    caller = asyncio.create_task(ask(calls, gate.wait, timeout_s=60))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert calls.hanging == 1
    gate.set()
    await until(lambda: calls.hanging == 0)


async def test_closed_calls_refuse_more() -> None:
    calls = UserCalls(max_hanging=1)
    await calls.close()
    with pytest.raises(RuntimeError, match="closed"):
        await ask(calls, lambda: 1)


def test_a_blocking_call_returns_raises_and_has_a_deadline(gate: threading.Event) -> None:
    assert call_blocking(lambda: 7, timeout_s=10) == 7
    with pytest.raises(CallError, match="ZeroDivisionError"):
        call_blocking(lambda: 1 // 0, timeout_s=10)
    with pytest.raises(CallTimeout):
        call_blocking(partial(gate.wait, 60), timeout_s=0.01)


WATCHED = """
import asyncio, re
from tidemill.extensions import calls
calls.WATCHDOG_S = 0.5

async def main():
    watched = calls.UserCalls()
    await watched.call(lambda: 1, convert=float, timeout_s=1.0, watched=True)
    await asyncio.sleep(1.0)
    print("the loop runs", flush=True)
    await watched.call(lambda: re.match(r"^(\\d+)+$", "1" * 64 + "x"), convert=bool, timeout_s=0.1, watched=True)

asyncio.run(main())
"""


def test_a_function_that_holds_the_interpreter_lock_ends_the_process_with_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "the loop runs\n")
    assert "Timeout" in done.stderr
    assert "in match" in done.stderr


async def test_closed_calls_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "WATCHDOG_S", 0.2)
    closed = UserCalls()
    await closed.call(lambda: 1, convert=float, timeout_s=1.0, watched=True)
    await closed.close()
    time.sleep(0.4)  # noqa: ASYNC251 -- the loop is blocked, and nothing ends this process


def test_the_text_of_an_exception_has_no_control_characters() -> None:
    error = call_error(ValueError("\x1b[2J a\nb \x9b1m \ud800"))
    assert str(error) == r"ValueError: \x1b[2J a b \x9b1m \ud800"
