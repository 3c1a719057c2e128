"""Why one placement is better than another, in a line."""

from __future__ import annotations

from tidemill.planner.placement.estimate import Estimate
from tidemill.planner.placement.question import PlacementQuestion
from tidemill.telemetry.numerals import percent

NOTABLE = 0.02
"""Differences below this share are not worth a word."""


def comparison(question: PlacementQuestion, best: Estimate, other: Estimate) -> str:
    """What the other loses by, and the largest difference behind it."""
    dearer, slower = other.usd_per_million / best.usd_per_million - 1, other.step_s / best.step_s - 1
    first = _than(dearer, "dearer", "as dear", "cheaper")
    second = _than(slower, "slower", "as fast", "faster")
    said = f"{first}, {second}" if question.objective == "cost" else f"{second}, {first}"
    return f"{other.placement.words}: {said}" + (f"; {reason}" if (reason := _reason(best, other)) else "")


def _than(change: float, more: str, equal: str, less: str) -> str:
    return equal if abs(change) < NOTABLE else f"{percent(abs(change))} {more if change > 0 else less}"


def _reason(best: Estimate, other: Estimate) -> str:
    """Where the other's time or money goes that the best's does not."""
    reasons = {
        "its trainer waits {} of the time": other.trainer_idle - best.trainer_idle,
        "its generating machines wait {} of the time": other.dedicated_idle - best.dedicated_idle,
        "new weights hold up {} of the step": other.exposed_pull_s / other.step_s - best.exposed_pull_s / best.step_s,
    }
    shares = {
        "its trainer waits {} of the time": other.trainer_idle,
        "its generating machines wait {} of the time": other.dedicated_idle,
        "new weights hold up {} of the step": other.exposed_pull_s / other.step_s,
    }
    words, difference = max(reasons.items(), key=lambda item: item[1])
    if difference > NOTABLE:
        return words.format(percent(shares[words]))
    if other.training_s > best.training_s * (1 + NOTABLE):
        return f"learning takes {other.training_s / best.training_s:.1f} times as long"
    return "its machines cost more for what they do" if other.usd_per_million > best.usd_per_million else ""
