"""The reward of tasks that a package scores: its function may evaluate an answer as Python, and runs in sandboxes.

scorer ── Unix socket ──▶ launcher ──▶ sandbox: programs/check_answers.py ── fork ──▶ worker: one answer

Only a prompt's entry and the answer go in, and a number comes out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tidemill.config.sandbox import SandboxConfig
from tidemill.core import ipc
from tidemill.core.errors import ScorerLost, UserError
from tidemill.core.records import Record
from tidemill.data.prompts import PackageCheck
from tidemill.extensions.calls import CallError
from tidemill.sandbox.local import LocalSandbox, SandboxedProgram
from tidemill.sandbox.open_sandbox import open_local_sandbox
from tidemill.sandbox.records import MEGABYTE, SandboxError
from tidemill.scoring.batch_rewards import RewardInput

PROGRAM = Path(__file__).parent / "programs" / "check_answers.py"
START_S = 120.0
GRACE_S = 10.0
"""Deadline of a program beyond that of an answer."""
CLOSE_S = 5.0
ATTEMPTS = 2
"""At an answer whose program ends."""
MOST_PROGRAMS = 4
"""Each has the package in its memory, usually 100 to 150 MB."""
WORKER_SHARE = 3
"""A worker may take this part of the sandbox's memory beyond what the package takes."""
MOST_BYTES = 1 << 16
SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})


class CheckReply(Record):
    ready: bool = False
    score: float | None = None
    error: str = ""
    late: bool = False


class CheckProgram:
    """A program in its own sandbox. It scores one answer at a time."""

    def __init__(self, check: PackageCheck, config: SandboxConfig) -> None:
        """Waits until it is ready.

        Raises:
            UserError: the sandbox does not work, or the program cannot import the package.
        """
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        config = config.model_copy(update={"network": "none"})
        found = importlib.util.find_spec(check.package)
        own = [str(Path(found.origin).parent.parent)] if found is not None and found.origin else []
        installed = [path for path in (*sys.path, *own) if path in own or Path(path).name in SITE_FOLDERS]
        packages = dict.fromkeys(os.path.realpath(path) for path in installed if Path(path).is_dir())
        folders = {"programs": str(PROGRAM.parent)}
        folders |= {f"packages{number}": path for number, path in enumerate(packages)}
        self._sandbox: LocalSandbox | None = None
        self._stream: socket.socket | None = None
        try:
            self._sandbox = open_local_sandbox(config, folders)
            seen = folders if config.backend == "none" else {name: f"/mnt/{name}" for name in folders}
            arguments = {
                "check": check.package,
                "params": dict(check.params),
                "path": [path for name, path in seen.items() if name != "programs"],
                "memory_bytes": int(config.memory_mb * MEGABYTE) // WORKER_SHARE,
            }
            argv = [os.path.realpath(sys.executable), f"{seen['programs']}/{PROGRAM.name}", json.dumps(arguments)]
            single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork safely
            env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", **single}
            program = self._sandbox.start(argv, env=env)
            self._stream = program.stream
            _wait_until_ready(program, check.package)
        except SandboxError as error:
            self._end()
            raise UserError(str(error), where="sandbox.backend", hint="see `tidemill doctor`") from error
        except BaseException:
            self._end()
            raise

    async def score(self, request: bytes, *, timeout_s: float) -> CheckReply:
        """Raises OSError, EOFError, TimeoutError, ValueError: the program has ended, or does not answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._stream)
        assert self._reader is not None
        async with asyncio.timeout(timeout_s + GRACE_S):
            self._writer.write(request)
            await self._writer.drain()
            return msgspec.msgpack.decode(await ipc.read(self._reader, MOST_BYTES), type=CheckReply)

    def close(self) -> None:
        """End it."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._end()

    def _end(self) -> None:
        if self._stream is not None and self._writer is None:
            self._stream.close()
        if self._sandbox is not None:
            self._sandbox.close()


class PackageReward:
    """Implements `rewards.QueuedReward`: the package's score of a completion.

    Args:
        timeout_s: of an answer, from the moment that its program begins with it.
        most: maximum number of programs; they are started as they are needed.
    """

    def __init__(self, check: PackageCheck, sandbox: SandboxConfig, *, timeout_s: float, most: int) -> None:
        self._check, self._sandbox, self._timeout_s = check, sandbox, timeout_s
        self._turns = asyncio.Semaphore(max(1, min(most, MOST_PROGRAMS, len(os.sched_getaffinity(0)))))
        self._idle: list[CheckProgram] = []
        self._busy: set[CheckProgram] = set()

    async def __call__(self, sample: RewardInput) -> float:
        """
        Raises:
            CallError: no score within the deadline, or the package or its process failed.
            ScorerLost: the program cannot be started.
        """
        entry, answer = self._check.entry(sample.prompt), self._check.answer(sample.completion)
        answer = answer.encode(errors="replace").decode()
        data = msgspec.msgpack.encode({"entry": entry, "answer": answer, "timeout_s": self._timeout_s})
        async with self._turns:
            for _ in range(ATTEMPTS):
                reply = await self._asked(ipc.framed(data))
                if reply is not None:
                    break
            else:
                raise CallError(f"the sandbox of {self._check.package} ended {ATTEMPTS} times")
        if reply.late:
            raise CallError(f"no result within {self._timeout_s:g} s")
        if reply.score is None:
            raise CallError(reply.error)
        if not 0 <= reply.score <= 1:  # the package gives no other; an answer that forged it gains no more than this
            raise CallError(f"ValueError: the score {reply.score:g} is not between 0 and 1")
        return reply.score

    async def close(self) -> None:
        for program in (*self._idle, *self._busy):
            program.close()
        self._idle.clear()
        await asyncio.sleep(0)  # their streams close in the next iteration of the loop

    async def _asked(self, request: bytes) -> CheckReply | None:
        """The reply of a program; None if the program ended, whatever the reason."""
        program = self._idle.pop() if self._idle else await self._started()
        self._busy.add(program)
        try:
            reply = await program.score(request, timeout_s=self._timeout_s)
        except (OSError, EOFError, ValueError):
            program.close()
            return None
        except BaseException:
            program.close()
            raise
        finally:
            self._busy.discard(program)
        self._idle.append(program)
        return reply

    async def _started(self) -> CheckProgram:
        def close_late(started: asyncio.Future[CheckProgram]) -> None:
            if not started.cancelled() and started.exception() is None:
                started.result().close()

        starting = asyncio.ensure_future(asyncio.to_thread(CheckProgram, self._check, self._sandbox))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(close_late)
            raise
        except UserError as error:
            raise ScorerLost(str(error)) from error


def check_program(check: PackageCheck, sandbox: SandboxConfig) -> None:
    """Start the program once. Raises UserError: it does not work on this machine."""
    CheckProgram(check, sandbox).close()


def _wait_until_ready(program: SandboxedProgram, package: str) -> None:
    """Raises UserError: it does not become ready."""
    program.stream.settimeout(START_S)
    try:
        what = msgspec.msgpack.decode(ipc.receive(program.stream, MOST_BYTES), type=CheckReply).error
    except (OSError, EOFError, ValueError) as error:
        with suppress(OSError):
            program.stream.shutdown(socket.SHUT_RDWR)
        what = program.last_words(CLOSE_S) or str(error) or type(error).__name__
    if what:
        raise UserError(
            f"{package} does not start in the sandbox: {what}",
            where="sandbox",
            hint=f"it needs {package} in a folder of this Python's packages, and enough sandbox.memory_mb",
        )
    program.stream.setblocking(False)
