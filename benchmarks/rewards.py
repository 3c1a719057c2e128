"""Time of reward functions in processes, as by default, and on threads of the run's process.

    python -m benchmarks.rewards [--against SRC] [--rounds N] [--quick]

Two programs score the same samples in turns, as a batch that finishes at once; their start is not measured. Every score
must be right. The aim is 0.3 s for 1,000 trivial rewards, and 1.2 times the time of the other side. `--against` takes
the `src` folder of another version instead of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import write_result
from benchmarks.origin import parsed
from benchmarks.rewards_side import CASES
from benchmarks.subjects import check_equal
from benchmarks.turns import ONE_THREAD

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = Path(__file__).with_name("reward_functions.py")
ON_THREADS = Path(__file__).with_name("reward_functions_threads.py")
TRIVIAL = "trivial"
TARGET_S, TARGET_RATIO = 0.3, 1.2
WITHOUT_THREADS = frozenset({"math_verify"})
"""Cases that cannot run on threads: only `--against` compares them."""
DEADLINE_S = 120.0


class Side:
    """A program that scores a case when it is its turn."""

    def __init__(self, case: str, functions: Path, source: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.rewards_side", case, str(functions)]
        path = os.pathsep.join((str(source), str(ROOT)))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": path},
        )
        self._read()

    def turn(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a side ended with exit code {self._process.wait(DEADLINE_S)}")
        return line


def main() -> int:
    parser = argparse.ArgumentParser(description="Reward functions in processes and on threads.")
    parser.add_argument("--against", type=Path, help="src folder of another version, instead of threads")
    parser.add_argument("--rounds", type=int, default=20, help="measured turns of each side")
    parser.add_argument("--quick", action="store_true", help="two turns: checks the benchmark")
    options = parsed(parser)
    rounds = 2 if options.quick else options.rounds
    cases = [measure(case, rounds, options.against) for case in CASES if options.against or case not in WITHOUT_THREADS]
    other = "the other version" if options.against else "threads"
    table = Table(title=f"rewards: processes against {other}, medians of wall time, in turns", box=box.SIMPLE)
    for column in ("case", "samples", "processes, s", f"{other}, s", "ratio", "CPU of the run, ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        numbers = (f"{case['seconds']:.3f}", f"{case['other_s']:.3f}", f"{case['ratio']:.2f}")
        table.add_row(case["case"], str(case["samples"]), *numbers, f"{case['cpu_ratio']:.2f}")
    Console(width=120).print(table)
    reached = aims(cases)
    print(", ".join(f"{name}: {'reached' if met else 'MISSED'}" for name, met in reached.items()))
    if not options.against:
        write_result(f"rewards{'-quick' if options.quick else ''}", {"aims": reached, "cases": cases})
    return 0 if all(reached.values()) else 1


def aims(cases: Sequence[dict[str, Any]]) -> dict[str, bool]:
    trivial = next(case for case in cases if case["case"] == TRIVIAL)
    return {
        f"at most {TARGET_S} s for {trivial['samples']} trivial rewards": trivial["seconds"] <= TARGET_S,
        f"at most {TARGET_RATIO} times the other side": trivial["ratio"] <= TARGET_RATIO,
    }


def measure(case: str, rounds: int, against: Path | None) -> dict[str, Any]:
    """Medians over turns that alternate, after one turn of each side that is not measured."""
    own = ROOT / "src"
    with ExitStack() as stack:
        sides = [Side(case, FUNCTIONS, own), Side(case, FUNCTIONS if against else ON_THREADS, against or own)]
        for side in sides:
            stack.callback(side.close)
        turns: list[list[dict[str, Any]]] = [[], []]
        for number in range(rounds + 1):
            for index in (0, 1) if number % 2 else (1, 0):
                turns[index].append(sides[index].turn())
    check_equal("scores", {f"side {index}": all(turn["right"] for turn in turns[index]) for index in (0, 1)})
    if not turns[0][0]["right"]:
        raise RuntimeError(f"{case}: a score is wrong")
    (seconds, cpu_s), (other_s, other_cpu_s) = (
        [statistics.median(turn[key] for turn in side[1:]) for key in ("seconds", "cpu_s")] for side in turns
    )
    return {
        "case": case,
        "samples": CASES[case][0],
        "rounds": rounds,
        "seconds": seconds,
        "other_s": other_s,
        "ratio": seconds / other_s,
        "cpu_ratio": cpu_s / other_cpu_s,
    }


if __name__ == "__main__":
    sys.exit(main())
