"""A program that runs in a sandbox for as long as the sandbox is open."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from typing import Any

import pytest

from tests.sandboxes import kill_launcher, need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import local
from tidemill.sandbox.local import LocalSandbox, launcher
from tidemill.sandbox.open_sandbox import limits_of
from tidemill.sandbox.records import SandboxLostError

ECHO = "import sys\nfor line in sys.stdin: print(line.strip().upper(), flush=True)\nsys.exit('bye')"

GREEDY = """
import os, time
for _ in range(4):
    os.fork()
block = bytearray(16 << 20)
block[::4096] = b"x" * len(block[::4096])
time.sleep(30)
"""


def opened(**settings: Any) -> LocalSandbox:
    need_bubblewrap()
    config = SandboxConfig(**settings)
    return LocalSandbox(launcher("bwrap").address, limits_of(config), ())


def test_a_command_can_be_interrupted() -> None:
    with closing(opened()) as sandbox:
        finished = sandbox.run(["sh", "-c", "sh -c 'kill -INT $$; sleep 1'; echo $?"])

    assert finished.stdout == b"130\n"


def test_a_program_answers_until_its_input_ends() -> None:
    with closing(opened(wall_s=0.2, cpu_s=0.1)) as sandbox:
        program = sandbox.start(["python3", "-c", ECHO])
        with program.stream as stream:
            for text in (b"one\n", b"two\n"):
                stream.sendall(text)
                assert stream.recv(100) == text.upper()
                time.sleep(0.2)
            stream.shutdown(socket.SHUT_WR)
            finished = program.finish(10)

    assert finished.stderr == b"bye\n"
    assert finished.code == 1


def test_a_program_may_be_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ANSWER_S", 2.0)
    with closing(opened()) as sandbox:
        program = sandbox.start(["sh", "-c", "sleep 2.5; echo late"])
        with program.stream as stream:
            assert stream.recv(10) == b"late\n"


def test_a_program_ends_with_its_sandbox() -> None:
    sandbox = opened()
    program = sandbox.start(["python3", "-c", ECHO])
    program.stream.sendall(b"x\n")
    assert program.stream.recv(10) == b"X\n"

    sandbox.close()

    program.stream.settimeout(5)
    with program.stream as stream:
        assert stream.recv(1) == b""


def test_the_memory_of_a_program_is_limited() -> None:
    with closing(opened(memory_mb=64)) as sandbox:
        program = sandbox.start(["python3", "-c", GREEDY])
        with program.stream:
            assert program.finish(10).ended == "memory"


def test_a_program_of_a_killed_launcher_is_lost() -> None:
    with closing(opened()) as sandbox:
        program = sandbox.start(["sleep", "100"])
        kill_launcher()
        with program.stream, pytest.raises(SandboxLostError):
            program.finish(10)


def test_a_program_that_does_not_exist_says_so() -> None:
    with closing(opened()) as sandbox:
        program = sandbox.start(["no-such-program"])
        with program.stream:
            finished = program.finish(10)

    assert finished.code == 127
    assert b"no-such-program" in finished.stderr
