"""CPU time of the reward guard, as a share of a training step.

    python -m benchmarks.guard_cost [--steps 40] [--rounds 3]

Runs of a character model of 0.8M parameters with the guard off and on alternate; both have one gold reward, a rule.
A step of so small a model takes a tenth of a second, the least flattering size: with larger models the
guard costs the same. Three figures:

- *the guard itself*: choosing samples, their gold scores, witnesses, tests and journal entries, timed within the run;
- *canaries*: generating and scoring them, every 10 steps;
- *the whole step*: median CPU time of a step with the guard over that without.

With `engine.batch_invariant` both runs must end with the same weights. (Otherwise canaries change the shapes of later
computations.)
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from benchmarks.sft_start import learning_spec, sft_start
from tidemill.controller.reward_watch import RewardWatch
from tidemill.guard.reward_guard import RewardGuard
from tidemill.jobs.train import train
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.metrics import STEP_CPU

TARGET = 0.02
REWARDS = [
    {"kind": "exact"},
    {"kind": "numeric", "role": "gold", "weight": 0.0, "name": "gold"},
]
OWN = ("begin", "collect")
"""Calls of `RewardWatch` that are the guard itself. Gold scores of a rule take their time in `RewardGuard._score`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    spent = {"guard": 0.0, "canaries": 0.0}
    steps_s: dict[str, list[float]] = {"off": [], "warn": []}
    with timed_guard(spent):
        for seed in range(options.rounds):
            for action, seconds in steps_s.items():
                seconds += run(action, seed=seed, steps=options.steps)[1]
    same = len({run(action, seed=0, steps=10, invariant=True)[0] for action in steps_s}) == 1
    step_s = median(steps_s["off"])
    steps = options.rounds * options.steps
    share = spent["guard"] / steps / step_s
    content = {
        "steps": steps,
        "step_cpu_s": step_s,
        "guard_share": share,
        "canary_share": spent["canaries"] / steps / step_s,
        "step_ratio": median(steps_s["warn"]) / step_s,
        "guard_s": spent["guard"] / steps,
        "same_weights": same,
        "target": TARGET,
        "reached": share <= TARGET and same,
    }
    print(
        f"guard {share:.2%}, canaries {content['canary_share']:.2%} of a step of {1000 * step_s:.0f} ms CPU; ", end=""
    )
    print(f"whole step {content['step_ratio']:.3f}; same weights: {content['same_weights']}")
    print(f"written: {write_result('guard_cost', content)}")
    return exit_code(content)


def run(action: str, *, seed: int, steps: int, invariant: bool = False) -> tuple[str, list[float]]:
    """Digest of the last weights, and CPU seconds of each step after the first."""
    changes: dict[str, Any] = {
        "scoring": {"rewards": REWARDS},
        "guard": {"action": action, "probes": False},
        "engine": {"batch_invariant": invariant},
    }
    with tempfile.TemporaryDirectory(prefix="tidemill-guard-") as folder:
        spec = learning_spec(sft_start(), Path(folder) / "run", seed=seed, steps=steps, changes=changes)
        summary = train(spec, telemetry_stream=io.StringIO())
        lines = [line for _, line in read_lines(spec.directory / "metrics.jsonl")]
    return summary["weights_digest"], [line[STEP_CPU] for line in lines if line["step"] > 1]


@contextmanager
def timed_guard(spent: dict[str, float]) -> Iterator[None]:
    """Add CPU time of the event loop during the calls of the guard to `spent`; an upper bound, because others run while
    a call waits."""
    originals = [(RewardWatch, name) for name in (*OWN, "measure_canaries")] + [(RewardGuard, "_score")]
    saved = [(owner, name, getattr(owner, name)) for owner, name in originals]
    for owner, name, function in saved:
        setattr(owner, name, _timed(function, spent, "canaries" if name == "measure_canaries" else "guard"))
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def _timed(function: Callable[..., Any], spent: dict[str, float], key: str) -> Callable[..., Any]:
    clock = time.process_time if key == "canaries" else time.thread_time  # training is paused while canaries run

    def plain(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent[key] += clock() - began

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        try:
            return await function(*args, **kwargs)
        finally:
            spent[key] += clock() - began

    return plain if function.__name__ == "begin" else awaited


if __name__ == "__main__":
    sys.exit(main())
