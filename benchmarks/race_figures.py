"""Figures of the learning race from the turns of both sides: checks, curves, and CPU seconds to an accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from benchmarks.race_common import PROMPTS
from benchmarks.turns import SideResult, Turn
from tidemill.core.records import Record

GRADIENT_TOLERANCE = 1e-3  # relative, against plain torch
REWARD_TOLERANCE = 0.15  # between the sides at step 1: four standard errors of 64 samples
LENGTH_TOLERANCE = 0.05


class Evaluated(Record):
    """A side's held-out accuracy after a step."""

    step: int
    cpu_s: float  # since the start, without evaluations
    accuracy: float
    greedy_reward: float
    reward: float | None  # None before step 1; mean over the samples of the steps since the last evaluation


class Run(Record):
    """One seed of one side."""

    seed: int
    cpu_s: float  # of all steps
    step_cpu_s: float  # median; of an even number of steps the upper middle one
    completion_tokens: float  # mean of a step
    evaluations: list[Evaluated]


def check_same_work(results: Mapping[str, SideResult], *, same_loss: bool = True) -> None:
    """Both sides answered the same prompts in the same order from the same weights, with the gradient that plain torch
    finds if they have its loss, and groups had signal.

    Raises:
        RuntimeError: they did not.
    """
    first = {name: result.turns[0].notes for name, result in results.items()}
    for step, turns in enumerate(zip(*(result.turns for result in results.values()), strict=True), 1):
        if len({turn.notes["prompts"] for turn in turns}) != 1:
            raise RuntimeError(f"step {step}: the sides answered different prompts")
    for name, notes in first.items() if same_loss else ():
        norm, plain = notes["grad_norm"], notes["plain_grad_norm"]
        if not math.isclose(norm, plain, rel_tol=GRADIENT_TOLERANCE):
            raise RuntimeError(f"{name}: the gradient norm of step 1 is {norm:.6g}, in plain torch {plain:.6g}")
    for name, result in results.items():
        if all(turn.notes["groups_without_signal"] == PROMPTS for turn in result.turns):
            raise RuntimeError(f"{name}: no group of any step had signal")
    rewards, lengths = ([notes[key] for notes in first.values()] for key in ("reward", "completion_tokens"))
    if max(rewards) - min(rewards) > REWARD_TOLERANCE:
        raise RuntimeError(f"the mean rewards of step 1 differ: {rewards}")
    if max(lengths) > (1 + LENGTH_TOLERANCE) * min(lengths):
        raise RuntimeError(f"the sides' completions differ in length at step 1: {lengths} tokens")


def run_of(seed: int, turns: Sequence[Turn], start: Mapping[str, float]) -> Run:
    """Curve of one side, from the accuracy of the start."""
    spent = list(accumulate(turn.cpu_s for turn in turns))
    found = [Evaluated(step=0, cpu_s=0.0, accuracy=start["accuracy"], greedy_reward=start["greedy"], reward=None)]
    for step, turn in enumerate(turns, 1):
        if "accuracy" in turn.notes:
            since = turns[found[-1].step : step]
            one = Evaluated(
                step=step,
                cpu_s=spent[step - 1],
                accuracy=turn.notes["accuracy"],
                greedy_reward=turn.notes["greedy"],
                reward=sum(each.notes["reward"] for each in since) / len(since),
            )
            found.append(one)
    return Run(
        seed=seed,
        cpu_s=spent[-1],
        step_cpu_s=sorted(turn.cpu_s for turn in turns)[len(turns) // 2],
        completion_tokens=sum(turn.notes["completion_tokens"] for turn in turns) / len(turns),
        evaluations=found,
    )


def cpu_seconds_to(accuracy: float, evaluations: Sequence[Evaluated]) -> float | None:
    """CPU seconds until the accuracy, on straight lines between evaluations; None if it was not reached."""
    for before, after in pairwise(evaluations):
        if after.accuracy >= accuracy:
            rise = after.accuracy - before.accuracy
            share = (accuracy - before.accuracy) / rise if rise > 0 else 0.0
            return before.cpu_s + max(0.0, share) * (after.cpu_s - before.cpu_s)
    return None


def accuracy_at(cpu_s: float, evaluations: Sequence[Evaluated]) -> float:
    """Accuracy after these CPU seconds, on straight lines between evaluations."""
    for before, after in pairwise(evaluations):
        if after.cpu_s >= cpu_s:
            share = (cpu_s - before.cpu_s) / (after.cpu_s - before.cpu_s)
            return before.accuracy + share * (after.accuracy - before.accuracy)
    return evaluations[-1].accuracy
