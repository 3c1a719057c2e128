"""Functions in other processes: deadlines that hold whatever they do, and what a killed call costs its neighbours."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import processes_below
from tests.unit.extensions import reward_functions
from tidemill.extensions.calls import CallError, CallTimeout
from tidemill.extensions.function_pool import FunctionProcesses, ProcessFunction, is_async
from tidemill.extensions.portable import Target, target_of
from tidemill.extensions.registry import import_path

MOST = 4


@pytest.fixture
async def processes() -> AsyncIterator[FunctionProcesses]:
    before = set(processes_below(os.getpid()))
    processes = FunctionProcesses(MOST)
    yield processes
    await processes.close()
    assert set(processes_below(os.getpid())) <= before


def added(processes: FunctionProcesses, function: Callable[..., Any], *, lists: bool = False) -> ProcessFunction:
    target = target_of(function, import_path(function), name=function.__name__)
    return processes.add(target, weights={}, together=is_async(function), lists=lists)


async def outcome(function: ProcessFunction, text: str, timeout_s: float = 1.0) -> float | str:
    """The value, or how the call failed."""
    try:
        ((score),) = await function.call({"text": text}, timeout_s=timeout_s)
    except CallTimeout:
        return "late"
    except CallError as error:
        return str(error)
    assert isinstance(score, tuple)
    return score[0]


HARM = {
    "backtrack": "late",
    "sleep 1000": "late",
    "exit": "its process ended with exit code 7",
    "crash": "its process was ended by SIGSEGV",
    "kill the group": "its process was ended by SIGKILL",
}


@pytest.mark.parametrize("harm", HARM)
async def test_only_the_call_that_does_harm_fails(processes: FunctionProcesses, harm: str) -> None:
    function = added(processes, reward_functions.act)
    await outcome(function, "start", 30.0)
    texts = [f"good {number}" for number in range(40)]
    texts.insert(3, harm)
    outcomes = await asyncio.gather(*(outcome(function, text) for text in texts))
    assert outcomes.pop(3) == HARM[harm]
    assert all(isinstance(each, float) for each in outcomes)


@pytest.mark.parametrize("harm", HARM)
async def test_only_the_async_call_that_does_harm_fails(processes: FunctionProcesses, harm: str) -> None:
    function = added(processes, reward_functions.act_later)
    await outcome(function, "start", 30.0)
    outcomes = await asyncio.gather(*(outcome(function, text) for text in ["a", harm, "b", "c", "d", "e"]))
    assert outcomes.pop(1) == HARM[harm]
    assert all(isinstance(each, float) for each in outcomes)


async def test_async_calls_run_at_the_same_time_in_one_process(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act_later)
    values = await asyncio.gather(*(outcome(function, "a", 30.0) for _ in range(20)))
    assert len(set(values)) == 1
    assert await asyncio.gather(*(outcome(function, each, 0.3) for each in ("never", "stubborn"))) == ["late", "late"]
    assert await outcome(function, "a") == values[0]  # the process goes on


async def test_a_deadline_counts_from_the_start_of_the_call(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act_on_all, lists=True)  # one process
    pending = [
        function.call({"text": ["sleep 0.3"]}, timeout_s=30.0 if not number else 0.9, count=1) for number in range(5)
    ]
    assert len(await asyncio.gather(*pending)) == 5  # 1.5 s one after another


async def test_slow_calls_get_more_processes_and_fast_ones_do_not(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act)
    assert len(set(await asyncio.gather(*(outcome(function, "fast", 30.0) for _ in range(200))))) == 1
    start_s = time.monotonic()
    values = await asyncio.gather(*(outcome(function, "sleep 0.5", 30.0) for _ in range(8)))
    assert len(set(values)) == MOST
    assert time.monotonic() - start_s < 8 * 0.5


async def test_a_function_of_lists_has_one_process(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act_on_all, lists=True)
    calls = [function.call({"text": [each]}, timeout_s=30.0, count=1) for each in ("count", "count", "count")]
    assert await asyncio.gather(*calls) == [((float(number), {}),) for number in (1, 2, 3)]
    with pytest.raises(CallError, match="returned 1 rewards for 2 samples"):
        await function.call({"text": ["a"]}, timeout_s=30.0, count=2)


async def test_what_a_killed_call_started_is_killed(processes: FunctionProcesses, tmp_path: Path) -> None:
    function = added(processes, reward_functions.act)
    await outcome(function, f"leave {tmp_path}/done", 30.0)
    assert (tmp_path / "done").exists()
    left = len(list(processes_below(os.getpid())))
    assert await outcome(function, "exit") == HARM["exit"]
    deadline = time.monotonic() + 10
    while len(list(processes_below(os.getpid()))) >= left:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_program_that_a_function_starts_can_be_interrupted(processes: FunctionProcesses) -> None:
    assert await outcome(added(processes, reward_functions.act), "interrupt a program", 30.0) == -signal.SIGINT


async def test_a_process_whose_name_is_no_text_ends_no_other(processes: FunctionProcesses) -> None:
    other, function = added(processes, reward_functions.act_later), added(processes, reward_functions.act)
    process = await outcome(function, "bad name", 30.0)
    assert await outcome(other, "exit", 30.0) == HARM["exit"]
    assert await outcome(function, "a") == process


async def test_a_process_that_an_import_starts_goes_on(processes: FunctionProcesses, tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(
        "import os, subprocess\n"
        "helper = subprocess.Popen(['sleep', '1000'])\n"
        "def score(text): return os._exit(7) if text == 'exit' else float(helper.poll() is None)\n"
    )
    function = processes.add(
        Target(name="score", path=f"{tmp_path}/helped.py:score"), weights={}, together=False, lists=False
    )
    assert [await outcome(function, text, 30.0) for text in ("a", "exit", "a")] == [1, HARM["exit"], 1]


async def test_a_result_that_is_too_large_is_one_invalid_sample(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act_on_all, lists=True)
    good, large = await function.call({"text": ["a", "large"]}, timeout_s=30.0, count=2)
    assert isinstance(good, tuple)
    assert isinstance(large, str)
    assert large.startswith("OverflowError")


async def test_memory_that_runs_out_ends_the_function_first(processes: FunctionProcesses, tmp_path: Path) -> None:
    def score() -> float:
        with open("/proc/self/oom_score_adj") as file:  # noqa: PTH123
            return float(file.read())

    assert await added(processes, score).call({}, timeout_s=30.0) == ((1000.0, {}),)


async def test_a_function_travels_by_value_with_its_constants(processes: FunctionProcesses) -> None:
    words = ("a", "b")

    def score(text: str) -> float:
        return float(words.index(text))

    assert await outcome(added(processes, score), "b", 30.0) == 1.0


async def test_closing_fails_the_calls_that_run_and_wait() -> None:
    processes = FunctionProcesses(1)
    function = added(processes, reward_functions.act)
    await outcome(function, "start", 30.0)
    pending = [asyncio.create_task(outcome(function, "sleep 1000", 30.0)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await processes.close()
    assert await asyncio.gather(*pending) == ["closed before the sample was scored"] * 3


async def test_arguments_that_cannot_be_copied_are_named(processes: FunctionProcesses) -> None:
    function = added(processes, reward_functions.act)
    with pytest.raises(CallError, match="an argument cannot be copied: TypeError"):
        await function.call({"text": (each for each in "ab")}, timeout_s=30.0)
