"""Reward functions for `test_function_pool`, which processes import."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import time
from pathlib import Path

PR_SET_NAME = 15
FACTS: dict[str, int] = {}


def act(text: str) -> float:
    """Do what a text says; returns the process id."""
    if text == "backtrack":  # holds the interpreter's lock
        re.match(r"^(\d+)+$", "1" * 64 + "x")
    elif text == "exit":
        os._exit(7)
    elif text == "crash":
        ctypes.string_at(0)
    elif text.startswith("leave "):  # a process that outlives the call
        if not os.fork():
            time.sleep(1000)
        Path(text.removeprefix("leave ")).write_text("left")
    elif text == "kill the group":
        os.killpg(0, signal.SIGKILL)
    elif text == "bad name":
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"\xff", 0, 0, 0)
    elif text.startswith("sleep "):
        time.sleep(float(text.removeprefix("sleep ")))
    elif text == "interrupt a program":
        return float(subprocess.run(["sh", "-c", "kill -INT $$; sleep 0.1"], check=False).returncode)
    elif text == "count":
        FACTS["calls"] = FACTS.get("calls", 0) + 1
        return float(FACTS["calls"])
    return float(os.getpid())


async def act_later(text: str) -> float:
    """As `act`, beside other calls."""
    if text == "never":
        await asyncio.sleep(1000)
    if text == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0.02)
    return act(text)


def act_on_all(text: list[str]) -> list[float]:
    return [10**400 if each == "large" else act(each) for each in text]
