"""Checks for tests of GPU sessions, of which most end badly; `benchmarks.gpu.one_check` imports them by name."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from unittest.mock import patch

from benchmarks.gpu.check_rows import CheckRows, Limit

SLEEPER = "import time; time.sleep(300)"


def fine(rows: CheckRows) -> None:
    rows.measure("one", lambda: {"figure": 1.0}, [Limit("figure", 1.0)])


def draws_with_other_noise(rows: CheckRows) -> None:
    """The check of draws, and again with the noise of other seeds."""
    from benchmarks.gpu.checks import kernels
    from tidemill.rollout.sampling import seed_state

    kernels.draws(rows)
    with patch("benchmarks.gpu.checks.kernels.seed_state", lambda seed: seed_state(seed) ^ 1):
        kernels.draws(rows)


def too_low(rows: CheckRows) -> None:
    rows.measure("too low", lambda: {"figure": 2.0}, [Limit("figure", 3.0, least=True)])


def wrong(rows: CheckRows) -> None:
    rows.measure("too large", lambda: {"figure": 2.0}, [Limit("figure", 1.0)])
    rows.measure("no number", lambda: {"figure": float("nan")}, [Limit("figure", 1.0)])
    fine(rows)


def raises_in_a_row(rows: CheckRows) -> None:
    rows.measure("out of memory", fails)
    fine(rows)


def fails() -> dict[str, float]:
    raise RuntimeError("out of memory\nmore")


def raises_with_brackets(rows: CheckRows) -> None:
    def fails_there() -> dict[str, float]:
        raise RuntimeError("shape [/a] of [b]")

    rows.measure("shape", fails_there)


def raises(rows: CheckRows) -> None:
    fine(rows)
    fails()


def exits(rows: CheckRows) -> None:
    os._exit(7)


def crashes(rows: CheckRows) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(rows: CheckRows) -> None:
    time.sleep(300)


def hangs(rows: CheckRows) -> None:
    """With a process in a session of its own, which no signal to the group reaches, and deaf to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fine(rows)
    subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    time.sleep(300)


def leaves_a_process(rows: CheckRows) -> None:
    fine(rows)
    subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)


def writes_half_a_row(rows: CheckRows) -> None:
    fine(rows)
    with rows._file.open("a") as file:
        file.write('{"row": "ha')
    os._exit(1)


def has_no_row(rows: CheckRows) -> None:
    pass


def skips(rows: CheckRows) -> None:
    def missing() -> dict[str, float]:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    rows.measure("vllm", missing)


def lacks_a_module(rows: CheckRows) -> None:
    rows.measure("imports", lambda: {"figure": __import__("tidemill.no_such_module")})


def has_no_json(rows: CheckRows) -> None:
    rows.measure("object", lambda: {"figure": object()})
    fine(rows)


def leaves_processes_that_end(rows: CheckRows) -> None:
    """As torch's workers for compilation do."""
    fine(rows)
    for _ in range(4):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])


def prints_without_end(rows: CheckRows) -> None:
    fine(rows)
    for _ in itertools.repeat(None, 64):
        sys.stdout.buffer.write(b"\xff\n" * (1 << 16))
