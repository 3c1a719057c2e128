"""`make bench` measures every published result again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import COMMANDS, run
from benchmarks.measuring import RESULTS
from benchmarks.origin import PACKAGES, origin_of
from benchmarks.simulator.__main__ import PARTS
from benchmarks.stopping import sigterm_as_ctrl_c

ELSEWHERE = {"benchmarks.engine_parity", "benchmarks.vllm_ranks"}
"""Needs vLLM."""


def test_every_published_result_has_a_command() -> None:
    modules = {f"benchmarks.{command.split()[0]}" for command in COMMANDS} | {
        f"benchmarks.simulator.{name}" for name in PARTS
    }
    for path in sorted(RESULTS.glob("*.json")):
        if not path.stem.endswith(("-quick", "-partial")):
            module = origin_of(path, json.loads(path.read_bytes()))["module"]
            assert module in modules | ELSEWHERE, f"{path.name} is of {module}"


def test_every_command_exists() -> None:
    for command in COMMANDS:
        place = PACKAGES["benchmarks"].joinpath(*command.split()[0].split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), command


@pytest.mark.parametrize(
    ("handler", "number"),
    [(signal.default_int_handler, signal.SIGINT), (signal.SIG_IGN, signal.SIGTERM)],  # Ctrl-C; `kill`, in a script's &
)
def test_an_interrupt_is_passed_on_once_and_waited_for(tmp_path: Path, handler: Any, number: signal.Signals) -> None:
    """The child ends its own processes before it ends."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    program = f"""
import pathlib, time
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path({str(ended)!r}).touch()
"""

    def interrupt() -> None:
        until = time.monotonic() + 30
        while not begun.exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
            run(["-c", program])
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.exists()
