"""Cost of a user's advantage function: one GRPO step with the built-in advantage and with an equal function in a file.

    python -m benchmarks.user_advantage [--rounds N] [--quick]

Both sides are `benchmarks.grpo_step`'s Tidemill; every step of both must have groups with signal, and the same gradient
norm. The steps themselves vary by more than the cost, so the CPU time of the advantage estimator is measured inside
them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.additions import NEW_TOKENS, addition_prompts
from benchmarks.grpo_tidemill import tidemill_side
from benchmarks.measuring import write_result
from benchmarks.models import char_model, quiet, smollm2
from benchmarks.origin import parsed
from benchmarks.subjects import check_equal, check_signal
from benchmarks.turns import SideResult, Turns, Work, take_turns
from tidemill.core.records import Group
from tidemill.trainer.advantage_estimator import AdvantageEstimator, GroupAdvantages

DEADLINE_S = 600.0
PROMPTS, GROUP_SIZE = 8, 8
FUNCTIONS = Path(__file__).with_name("user_functions.py")
ROUNDS = {"SmolLM2-135M fp32": 12, "character model 0.8M fp32": 100}
TARGET = 0.01
"""The largest share of a step that the function may add."""


class TimedTurns(Turns):
    """Turns that also report the CPU time of the advantage estimator."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.estimator_s = 0.0
        self.user_function = False  # whether the estimator calls one

    def begin(self) -> None:
        self.estimator_s = 0.0
        self._turns.begin()

    def end(self, work: Work, **notes: float) -> None:
        self._turns.end(work, estimator_s=self.estimator_s, user_function=self.user_function, **notes)


def timed_side(turns: Turns, settings: Mapping[str, Any]) -> None:
    timed, estimate = TimedTurns(turns), AdvantageEstimator.estimate

    def measured(self: AdvantageEstimator, groups: Sequence[Group], *more: Any, **named: Any) -> list[GroupAdvantages]:
        start_s = time.thread_time()
        try:
            return estimate(self, groups, *more, **named)
        finally:
            timed.estimator_s += time.thread_time() - start_s
            timed.user_function = self._user is not None

    AdvantageEstimator.estimate = measured  # type: ignore[method-assign]
    tidemill_side(timed, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description="The cost of a user's advantage function.")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds of each case")
    parser.add_argument("--quick", action="store_true", help="two rounds on the character model: checks the benchmark")
    options = parsed(parser)
    quiet()
    chosen = [name for name in ROUNDS if name.startswith("character") or not options.quick]
    rounds = 2 if options.quick else options.rounds
    cases = [_measure(name, rounds or ROUNDS[name]) for name in chosen]
    table = Table(title="user_advantage: medians of CPU time, one thread, interleaved on one core", box=box.SIMPLE)
    for column in ("case", "step, s", "estimator, ms", "with the function, ms", "added", "target"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        verdict = f"below {TARGET:.0%} {'reached' if case['added'] < TARGET else 'MISSED'}"
        numbers = (f"{case['step_s']:.2f}", f"{case['built_in_ms']:.2f}", f"{case['user_ms']:.2f}")
        table.add_row(case["case"], *numbers, f"{case['added']:.2%}", verdict)
    Console(width=120).print(table)
    write_result(f"user_advantage{'-quick' if options.quick else ''}", {"target": TARGET, "cases": cases})
    return 0 if all(case["added"] < TARGET for case in cases) else 1


def _measure(name: str, rounds: int) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    settings: dict[str, Any] = {
        "model": str(char_model() if name.startswith("character") else smollm2()),
        "prompts": addition_prompts(PROMPTS),
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "bf16": False,
        "reward": f"{FUNCTIONS}:hashed",
    }
    users = settings | {"algorithm": {"advantage": f"{FUNCTIONS}:like_grpo"}}
    results = take_turns(
        {"user's function": (timed_side, users), "built-in": (timed_side, settings)},
        rounds=rounds,
        deadline_s=DEADLINE_S,
    )
    ours, theirs = results["user's function"], results["built-in"]
    check_sides(ours, theirs)
    user_s, built_in_s = (statistics.median(_notes(side, "estimator_s")) for side in (ours, theirs))
    step_s = statistics.median(turn.cpu_s for turn in theirs.turns)
    return {
        "case": name,
        "rounds": rounds,
        "step_s": step_s,
        "built_in_ms": built_in_s * 1e3,
        "user_ms": user_s * 1e3,
        "added": (user_s - built_in_s) / step_s,
    }


def check_sides(users: SideResult, built_in: SideResult) -> None:
    """Only the first side calls the user's function; both have signal in every step, and the same gradients.

    Raises:
        RuntimeError: otherwise.
    """
    if not all(_notes(users, "user_function")) or any(_notes(built_in, "user_function")):
        raise RuntimeError("the user's function was not called by the side that has it, or by the other")
    for name, side in (("user's function", users), ("built-in", built_in)):
        check_signal(name, side, most=PROMPTS - 1)
    check_equal(
        "gradient norms", {"user's function": _notes(users, "grad_norm"), "built-in": _notes(built_in, "grad_norm")}
    )


def _notes(side: SideResult, name: str) -> list[float]:
    return [turn.notes[name] for turn in side.turns]


if __name__ == "__main__":
    sys.exit(main())
