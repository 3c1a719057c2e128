"""A package's environments, as an adapter serves them: they count, and fail when they are told to."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from adapter_program import AgentMistakeError, EnvironmentAdapter, EnvironmentFaultError, ServiceLostError, serve

# A program of a model: it answers in the place of the environment, or changes its memory.
CHEAT = """
import os, sys
import socket
try:
    open(f"/proc/{sys.argv[1]}/mem", "r+b", buffering=0)
    sys.stderr.write("memory")
except OSError: pass
try:
    socket.socket(fileno=0).send(bytes(4))
    sys.stderr.write("socket")
except OSError: pass
"""


class Silent(Exception):
    def __str__(self) -> str:
        raise OSError


RESULTS: dict[str, Callable[[], Any]] = {
    "unclean": lambda: ("a\0b\ud800", np.float32(0.5), np.bool_(True)),
    "long": lambda: ("x" * 300_000_000, 0.0, False),
    "object": lambda: (object(), 0.0, False),
}
ERRORS = {
    "mistake": AgentMistakeError("not like this"),
    "raise": ValueError("bad"),
    "fault": EnvironmentFaultError("the game is broken"),
    "server ends": ServiceLostError("the server has ended"),
    "unclean mistake": AgentMistakeError("a\ud800"),
    "silent": Silent(),
}


class Fake(EnvironmentAdapter):
    def __init__(self, start: str = "") -> None:
        print("what the package prints")
        if start == "fails":
            raise ValueError("no such game")
        if start == "ends":
            sys.exit("it ended early")
        self.counts: dict[int, int] = {}

    def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        self.counts[episode] = 0
        return f"{task['prompt']} {random.random()}"

    def step(self, episode: int, action: str) -> Any:
        print("more that it prints")
        if action == "cheat":
            cheat = [sys.executable, "-c", CHEAT, str(os.getpid())]
            found = subprocess.run(cheat, check=False, stderr=subprocess.PIPE, text=True)
            return found.stderr, 0.0, False
        if action in RESULTS:
            return RESULTS[action]()
        if action in ERRORS:
            raise ERRORS[action]
        if action == "die":
            os._exit(3)
        if action == "hang":
            time.sleep(1000)
        self.counts[episode] += 1
        return f"{self.counts[episode]} {random.random()}", 0.5, self.counts[episode] == 3

    async def call(self, episode: int, tool: str, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(arguments["s"])
        return f"{tool} {arguments['s']}"

    def close(self, episode: int) -> None:
        del self.counts[episode]


if __name__ == "__main__":
    serve(Fake)
