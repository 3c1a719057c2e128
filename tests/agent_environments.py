"""Environments that misbehave on purpose; environment processes import them from this file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

from tidemill.agents.environment import AgentMistake, Environment, Split, Step, ToolEnvironment, tool


class Opaque(Exception):
    """Its texts cannot be read."""

    def __repr__(self) -> str:
        sys.exit(3)

    __str__ = __repr__


class Special(Step):
    """A step of a user's class."""


class Counter(Environment):
    """Observations count the actions; some actions misbehave."""

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self.seen: list[str] = []
        self.seed = seed
        if task.get("once") and Path(task["once"]).exists():
            raise RuntimeError("cannot be reset again")
        if task.get("once"):
            Path(task["once"]).touch()
        return str(task.get("prompt", ""))

    def step(self, action: str) -> Any:
        self.seen.append(action)
        kind, _, value = action.partition(" ")
        if hasattr(self, f"do_{kind}"):
            return getattr(self, f"do_{kind}")(value)
        return Step(f"{len(self.seen)} {action} {self.seed}", reward=0.5, state_key=f"k{len(self.seen)}")

    def do_number(self, value: str) -> Any:
        return 7

    def do_none(self, value: str) -> Any:
        return Step(None)  # type: ignore[arg-type]

    def do_nul(self, value: str) -> Any:
        return Step("a\0b")

    def do_huge(self, value: str) -> Any:
        return Step("x" * 10_000_000)

    def do_surrogate(self, value: str) -> Any:
        return Step("\ud800")

    def do_long(self, value: str) -> Any:
        return Step("ab" * int(value))

    def do_nan(self, value: str) -> Any:
        return Step("x", reward=float("nan"))

    def do_vast(self, value: str) -> Any:
        return Step("x", reward=10**400)

    def do_key(self, value: str) -> Any:
        return Step("x", state_key="\ud800")

    def do_digits(self, value: str) -> Any:
        return Step("x", reward=10**5000)

    def do_array(self, value: str) -> Any:
        import numpy as np  # not for the servers of all other tests

        return Step("x", reward=np.array([1.0, 2.0]))  # type: ignore[arg-type]

    def do_flag(self, value: str) -> Any:
        return Step("x", done=1)  # type: ignore[arg-type]

    def do_opaque(self, value: str) -> Any:
        return Step(Opaque(), done=Opaque())  # type: ignore[arg-type]

    def do_longkey(self, value: str) -> Any:
        return Step("x", state_key="k" * 20_000 + value)

    def do_scalars(self, value: str) -> Any:
        import numpy as np

        return Special(np.str_("x"), reward=np.float32(0.5), done=np.bool_(True), state_key=np.int64(3))  # type: ignore[arg-type]

    def do_mistake(self, value: str) -> Any:
        raise AgentMistake("a\0b\ud800" + "c" * int(value))

    def do_silent(self, value: str) -> Any:
        raise Opaque

    def do_done(self, value: str) -> Any:
        return Step("over", reward=1.0, done=True)

    def do_raise(self, value: str) -> Any:
        raise ValueError(f"bad action {object()}")

    def do_exit(self, value: str) -> Any:
        sys.exit(3)

    def do_die(self, value: str) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_dieonce(self, value: str) -> Any:
        if not Path(value).exists():
            Path(value).touch()
            os._exit(7)
        return Step("survived")

    def do_hang(self, value: str) -> Any:
        """A loop that no Python code can interrupt, and a process in a session of its own."""
        sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(value).write_text(f"{os.getpid()} {sleeper.pid}")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        while True:
            pass

    def do_sleep(self, value: str) -> Any:
        time.sleep(1000)

    def do_leave(self, value: str) -> Any:
        Path(value).write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
        return Step("left")

    def do_daemon(self, value: str) -> Any:
        subprocess.run(["sh", "-c", f"sleep 1000 & echo $! > {value}"], check=True)
        return Step("started")

    def do_fork(self, value: str) -> Any:
        return Step("forked" if os.fork() else "child")

    def do_name(self, value: str) -> Any:
        """A process with a name that is no text."""
        link = Path(value) / os.fsdecode(b"\xff")
        link.symlink_to("/bin/sleep")
        subprocess.Popen([link, "1000"])
        return Step("named")

    def do_random(self, value: str) -> Any:
        return Step(f"{time.time_ns()} {os.getpid()}")

    def do_order(self, value: str) -> Any:
        return Step(" ".join({str(number) for number in range(20)}))

    def do_pid(self, value: str) -> Any:
        return Step("", state_key=str(os.getpid()))


class CostlyCounter(Counter):
    """Its processes are costly."""

    costly_process = True


class OnceCounter(Counter):
    """Its steps must not be repeated."""

    idempotent = False
    lowest_reward = -2.0


class AsyncCounter(Environment):
    async def reset(self, task: dict[str, Any], seed: int) -> str:
        self.count = 0
        return "go"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        self.count += 1
        return Step(str(self.count), done=self.count == 3)


class Tools(ToolEnvironment):
    """Tools that sleep, fail and leave traces in a file."""

    offer_finish = True

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self.total = 0
        return super().reset(task, seed)  # type: ignore[return-value]

    @tool(timeout_s=2)
    def add(self, number: int) -> str:
        """Add a number to the total."""
        self.total += number
        return f"{self.total}"

    @tool(timeout_s=2)
    def sleep(self, seconds: float, text: str = "slept") -> str:
        """Sleep."""
        time.sleep(seconds)
        return text

    @tool(timeout_s=2)
    async def wait(self, seconds: float) -> str:
        """Sleep without a thread."""
        await asyncio.sleep(seconds)
        return "waited"

    @tool
    def wrong(self) -> str:
        """Return a number."""
        return 5  # type: ignore[return-value]

    @tool(timeout_s=0.3)
    def hang(self) -> str:
        """Never return."""
        while True:
            pass

    @tool(timeout_s=2, idempotent=False)
    def pay(self, file: str, seconds: float = 0.0, how: Literal["well", "die"] = "well") -> str:
        """Write a line to a file."""
        with Path(file).open("a") as out:
            out.write(f"{self.call_id}\n")
        time.sleep(seconds)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return "paid"

    @tool
    def fail(self, text: str) -> str:
        """Raise."""
        raise RuntimeError(text)

    def score(self, answer: str) -> float:
        if answer == "broken":
            raise ValueError("no score")
        if answer == "slow":
            time.sleep(3)
        if answer == "none":
            return None  # type: ignore[return-value]
        return float(answer == str(self.total))


class Loose(Tools):
    @tool
    def find(self, text: str) -> str:
        """Find a text in nothing."""
        return next(each for each in list[str]() if each == text)

    @tool
    def now(self) -> str:
        """The time."""
        return str(time.time_ns())


class Unscored(Tools):
    """Cannot score any answer."""

    def score(self, answer: str) -> float:
        raise OSError("no grader")


class Stateless(ToolEnvironment):
    stateful = False

    @tool
    def now(self) -> str:
        """The time."""
        return str(time.time_ns())


class Moody(Environment):
    """Its texts depend on the number of episodes of its process."""

    episodes = 0

    def reset(self, task: dict[str, Any], seed: int) -> str:
        type(self).episodes += 1
        return ""

    def step(self, action: str) -> Step:
        return Step(f"{self.episodes}")


class Broken(Environment):
    def reset(self, task: dict[str, Any], seed: int) -> str:
        raise ConnectionError("no database")

    def step(self, action: str) -> Step:
        return Step()


class DiesAtReset(Broken):
    def reset(self, task: dict[str, Any], seed: int) -> str:
        os._exit(9)


class Shell(ToolEnvironment):
    """Runs commands in the sandbox."""

    needs_sandbox = True

    @tool(timeout_s=10)
    def run(self, command: str) -> str:
        """Run a command.

        Args:
            command: for the shell.
        """
        if command == "lose the sandbox" and not Path(self.task["mark"]).exists():
            Path(self.task["mark"]).touch()
            vars(self.sandbox)["_connection"].close()
        return self.sandbox.run(["sh", "-c", command]).stdout.decode()


class Forgetful(ToolEnvironment):
    """Uses a sandbox without saying so."""

    @tool
    def run(self) -> str:
        """Run nothing."""
        return str(self.sandbox)


class Disturbed:
    """One of its methods fails; with `mark`, a file, only once.

    Args:
        method: name.
        how: "exit", "sleep" or "raise".
    """

    def __init__(self, method: str = "", how: str = "", mark: str = "") -> None:
        self.settings = (method, how, mark)

    @staticmethod
    def disturb(method: str, settings: tuple[str, str, str]) -> None:
        name, how, mark = settings
        if method != name or (mark and Path(mark).exists()):
            return
        if mark:
            Path(mark).touch()
        if how == "exit":
            os._exit(0)
        if how == "sleep":
            time.sleep(1000)
        raise ConnectionError("no service")


class Lesson(Disturbed, Environment):
    """Its teacher counts to 3, with a state of its own; `folder` gets a line for every reset and close."""

    def __init__(self, folder: str = "", **disturbance: str) -> None:
        super().__init__(**disturbance)
        self.said, self.folder = 0, folder

    @classmethod
    def tasks_for(cls, params: dict[str, Any], split: Split, count: int) -> list[dict[str, Any]]:
        given = {key: str(value) for key, value in params.items() if key != "folder"}
        cls.disturb("tasks", Lesson(**given).settings)
        return super().tasks_for(params, split, count)

    def reset(self, task: dict[str, Any], seed: int) -> str:
        self.disturb("reset", self.settings)
        self._log("reset")
        return f"go {seed}"

    def step(self, action: str) -> Step:
        self.disturb("step", self.settings)
        return Step(f"seen {action} " + "x" * 500, done=self.said == 3)

    def demonstrate(self) -> str:
        self.disturb("demonstrate", self.settings)
        self.said += 1
        return str(self.said)

    def close(self) -> None:
        self._log("close")

    def _log(self, line: str) -> None:
        if self.folder:
            (Path(self.folder) / str(os.getpid())).open("a").write(f"{line}\n")


class ToolLesson(Disturbed, ToolEnvironment):
    """Its teacher calls a tool, and then answers."""

    called = False

    def demonstrate(self) -> str:
        if self.called:
            return "found"
        self.called = True
        return '{"name": "look", "arguments": {"place": "here"}}\n'

    @tool(timeout_s=0.6)
    def look(self, place: str) -> str:
        """Look."""
        self.disturb("look", self.settings)
        return "there"


class ToolLessonOnce(ToolLesson):
    """Its tool must not be called twice."""

    @tool(timeout_s=0.6, idempotent=False)
    def look(self, place: str) -> str:
        """Look."""
        self.disturb("look", self.settings)
        return "there"
