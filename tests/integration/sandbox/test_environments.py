"""Environments with a sandbox: the built-in Python tool, and what happens when a sandbox fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import agent_environments as envs
from tests.agent_format import LineFormat, Play, call
from tests.sandboxes import need_bubblewrap
from tidemill.agents.builtin import PythonTool
from tidemill.agents.find import find_environment
from tidemill.agents.pool import EnvironmentPool
from tidemill.config.agent import EnvConfig
from tidemill.config.sandbox import SandboxConfig

FAST = SandboxConfig(memory_mb=128, cpu_s=1.0, wall_s=20.0)


@asynccontextmanager
async def open_pool(name: str) -> AsyncIterator[EnvironmentPool]:
    need_bubblewrap()
    config = EnvConfig(name=name, concurrency=8)
    pool = EnvironmentPool(find_environment(config), config, LineFormat(), sandbox=FAST)
    try:
        yield pool
    finally:
        await pool.close()


def own(name: str) -> str:
    return f"{envs.__file__}:{name}"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(37 * 41)", "1517\n"),
        (
            "print(open('/etc/passwd').read())",
            "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'\n",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero\n"),
        ("while True: pass", "error: ended by its limit of cpu\n"),
        ("import time; time.sleep(60)", "error: ended by its limit of wall\n"),  # the tool's own, of 5 s
        ("print('\\0')", "\\0\n"),
        ("a = 1\0", "SyntaxError: source code cannot contain null bytes\n"),
        (f"print(len('{'x' * 200_000}'))", "200000\n"),
    ],
)
async def test_the_python_tool_returns_what_a_program_prints(code: str, printed: str) -> None:
    async with open_pool("python") as pool:
        play = Play(pool, {"prompt": "go", "answer": "1517"}, "go")
        seen = await play.act(call("python", code=code))
        assert seen.text == printed
        assert (await play.act("It is 1517.")).reward == 1.0


async def test_files_stay_within_an_episode_and_are_not_shared() -> None:
    async with open_pool(own("Shell")) as pool:
        first, second = (Play(pool, {"prompt": "go"}, "go", index=number) for number in range(2))
        assert (await first.act(call("run", command="echo kept > file; cat file"))).text == "kept\n"
        assert (await first.act(call("run", command="cat file"))).text == "kept\n"
        assert (await second.act(call("run", command="ls"))).text == ""


async def test_a_sandbox_that_fails_is_not_the_agents_mistake(tmp_path: Path) -> None:
    async with open_pool(own("Shell")) as pool:
        play = Play(pool, {"prompt": "go", "mark": str(tmp_path / "mark")}, "go")
        await play.act(call("run", command="echo kept > file"))
        seen = await play.act(call("run", command="lose the sandbox"))
        assert (seen.end, seen.text) == ("", "")
        assert pool.take_counts()["retries"] == 1
        assert (await play.act(call("run", command="cat file"))).text == "kept\n"  # its calls were repeated


async def test_a_sandbox_that_was_not_declared_is_a_fault() -> None:
    async with open_pool(own("Forgetful")) as pool:
        seen = await Play(pool, {"prompt": "go"}, "go").act(call("run"))
        assert seen.end == "fault"
        assert "needs_sandbox" in seen.reason


async def test_episodes_run_at_the_same_time() -> None:
    async with open_pool(own("Shell")) as pool:
        plays = [Play(pool, {"prompt": "go"}, "go", index=number) for number in range(8)]
        await asyncio.gather(*(play.act(call("run", command="true")) for play in plays))
        began = time.monotonic()
        seen = await asyncio.gather(*(play.act(call("run", command="sleep 0.5; echo x")) for play in plays))
        assert [each.text for each in seen] == ["x\n"] * 8
        assert time.monotonic() - began < 8 * 0.5


def test_the_questions_of_the_python_tool_have_right_answers() -> None:
    train, held_out = PythonTool.tasks("train", 300), PythonTool.tasks("held_out", 100)
    for row in train + held_out:
        printed: list[object] = []
        exec(row["program"], {"print": printed.append})
        assert str(printed[0]) == row["answer"]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
