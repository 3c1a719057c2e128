"""Environment processes: what is killed, what remains, and what survives their death."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import agent_environments as envs
from tests.agent_format import LineFormat, Play, call
from tests.processes import command_lines, processes_below
from tests.unit.agents.test_pool import open_pool
from tidemill.agents.find import find_environment
from tidemill.agents.pool import EnvironmentPool
from tidemill.config.agent import EnvConfig
from tidemill.extensions.processes import ForkServer

WAIT_S = 10.0


def ended(*pids: int) -> bool:
    """Whether processes have ended; waits for it."""
    deadline = time.monotonic() + WAIT_S
    while command_lines(pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def server_of(pool: EnvironmentPool) -> int | None:
    server = pool.placement._server
    assert isinstance(server, ForkServer)
    return server.pid


def written(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def test_a_late_step_is_killed_with_everything_that_it_started(tmp_path: Path) -> None:
    async with open_pool(envs.Counter, call_timeout_s=0.5) as pool:
        play = Play(pool, {})
        await play.act("a")
        seen = await play.act(f"hang {tmp_path}/pids")
        assert (seen.text, seen.timeouts, seen.end) == ("error: step did not return within 0.5 s", 1, "")
        assert ended(*map(int, (tmp_path / "pids").read_text().split()))
        assert (await play.act("b")).text.startswith("2 b")


async def test_what_a_dead_process_started_is_killed(tmp_path: Path) -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        await play.act(f"leave {tmp_path}/pid")
        own = int((await play.act("pid")).state_key)
        left = int((tmp_path / "pid").read_text())
        assert eventually(lambda: bool(command_lines([left])))  # empty until the program is loaded
        os.kill(own, signal.SIGKILL)
        assert ended(own, left)
        assert (await play.act("b")).text.startswith("3 b")
    async with open_pool(envs.Counter) as pool:
        await Play(pool, {}).act(f"leave {tmp_path}/pid")
    assert ended(int((tmp_path / "pid").read_text()))


async def test_what_a_live_process_started_survives_the_death_of_others(tmp_path: Path) -> None:
    async with open_pool(envs.Counter) as pool:
        await Play(pool, {}).act(f"daemon {tmp_path}/pid")
        daemon = int((tmp_path / "pid").read_text())
        for index in (1, 2):  # the second process is forked after the orphans of the first one were killed
            await Play(pool, {}, index=index).act(f"dieonce {tmp_path}/{index}")
        assert command_lines([daemon])
    assert ended(daemon)


async def test_a_process_whose_name_is_no_text_disturbs_no_other(tmp_path: Path) -> None:
    async with open_pool(envs.Counter, attempts=1) as pool:
        play, other = Play(pool, {}), Play(pool, {}, index=1)
        assert (await play.act(f"name {tmp_path}")).text == "named"
        assert (await other.act("die")).end == "failure"
        assert (await play.act("a")).text.startswith("2 a")


async def test_a_child_that_returns_from_a_call_does_not_answer() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        assert (await play.act("fork")).text == "forked"
        await asyncio.sleep(0.1)
        assert (await play.act("a")).text.startswith("2 a")


async def test_close_and_cancellation_leave_nothing(tmp_path: Path) -> None:
    before = set(processes_below(os.getpid()))
    async with open_pool(envs.Counter) as pool:
        acting = asyncio.create_task(Play(pool, {}).act(f"hang {tmp_path}/pids"))
        assert await asyncio.to_thread(eventually, lambda: bool(written(tmp_path / "pids")))
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        assert ended(*map(int, (tmp_path / "pids").read_text().split()))
        (tmp_path / "pids").unlink()
        acting = asyncio.create_task(Play(pool, {}, index=1).act(f"hang {tmp_path}/pids"))
        assert await asyncio.to_thread(eventually, lambda: bool(written(tmp_path / "pids")))
        below = set(processes_below(os.getpid())) - before
        await pool.close()
    acting.cancel()
    await asyncio.gather(acting, return_exceptions=True)
    assert ended(*below)


PARENT = """
import asyncio, sys
from tests import agent_environments as envs
from tests.agent_format import Play
from tests.unit.agents.test_pool import open_pool
from tidemill.config.agent import EnvConfig
from tidemill.agents.find import find_environment
from tidemill.agents.pool import EnvironmentPool

async def main():
    async with open_pool(envs.Counter) as pool:
        await Play(pool, {}).act(f"leave {sys.argv[1]}/left")
        await Play(pool, {}, index=1).act(f"hang {sys.argv[1]}/pids")

asyncio.run(main())
"""


def test_nothing_survives_a_killed_run(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    assert eventually(lambda: bool(written(tmp_path / "pids")))
    below = list(processes_below(parent.pid))
    assert len(below) == 5  # the server, two environments, and what they started
    assert {*map(int, (tmp_path / "pids").read_text().split()), int((tmp_path / "left").read_text())} < set(below)
    parent.kill()
    parent.wait(WAIT_S)
    assert ended(*below)


@pytest.mark.parametrize("environment", [envs.Counter, envs.Tools])
async def test_episodes_whose_processes_are_killed_equal_undisturbed_ones(environment: type) -> None:
    def action(index: int, turn: int) -> str:
        if environment is envs.Counter:
            return f"{index} {turn}"
        return call("add", number=index) + call("hang") * (turn == 3) + call("sleep", seconds=0.01)

    async def play_all(kill: bool) -> list[list[object]]:
        draw, count = random.Random(0), 30 if environment is envs.Counter else 8
        async with open_pool(environment, concurrency=2, attempts=20) as pool:
            plays = [Play(pool, {"seed": index, "prompt": ""}, index=index) for index in range(count)]
            killed = 0
            for turn in range(6):
                acting = [asyncio.create_task(each.act(action(each.sample_id.index, turn))) for each in plays]
                while kill and not all(each.done() for each in acting):
                    await asyncio.sleep(0.02)
                    server = server_of(pool)
                    below = list(processes_below(server)) if server is not None else []
                    if below and killed < 4 * (turn + 1):
                        os.kill(draw.choice(below), signal.SIGKILL)
                        killed += 1
                await asyncio.gather(*acting)
            assert killed >= 8 * kill
        return [[*each.turns] for each in plays]

    assert await play_all(kill=True) == await play_all(kill=False)


async def test_the_server_is_started_anew() -> None:
    async with open_pool(envs.Counter) as pool:
        play = Play(pool, {})
        await play.act("a")
        server = server_of(pool)
        assert server is not None
        os.kill(server, signal.SIGKILL)
        assert (await play.act("b")).text.startswith("2 b")


async def test_a_class_whose_import_starts_threads_is_imported_after_the_fork(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "from tidemill.agents.environment import Environment, Step\n"
        "thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)\n"
        "thread.start()\n"
        "class Threaded(Environment):\n"
        "    def reset(self, task, seed): return ''\n"
        "    def step(self, action): return Step(str(thread in threading.enumerate()))\n"
    )
    config = EnvConfig(name=f"{tmp_path}/threaded.py:Threaded")
    pool = EnvironmentPool(find_environment(config), config, LineFormat())
    assert (await Play(pool, {}).act("a")).text == "True"
    await pool.close()
