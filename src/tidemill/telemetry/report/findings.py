"""The outcome of a run in words, and what in it deserves a look. Pure functions of a Story."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from tidemill.core.formatting import compact, counted, decimal, percent
from tidemill.telemetry.fleet_view import FLEET_EVENTS
from tidemill.telemetry.metrics import HELD_OUT_LOSS
from tidemill.telemetry.report.run_data import RunData
from tidemill.telemetry.summary import Evaluation, Figure, comparable

RECENT = 5
TRUNCATED_HIGH, MISMATCH_HIGH, ENTROPY_LEFT, NO_SIGNAL_HIGH = 0.2, 1e-3, 0.1, 0.5

ENDINGS = {
    "finished": "The run is finished.",
    "interrupted": "The run was interrupted; the same command resumes it.",
    "failed": "The run ended with an error; the same command resumes it.",
    "running": "The run is in progress.",
    "killed": "The run was killed; the same command resumes it.",
    "unknown": "No end was recorded: the run is in progress elsewhere, or was killed.",
}
MEASURED = "An evaluation: nothing was trained."


class Finding(NamedTuple):
    """Something to look at: a heading of a few words, and what it means or what to do."""

    title: str
    text: str


def clearly_differs(one: Figure, other: Figure) -> bool:
    """Whether two figures differ by more than chance would (95 %): Newcombe's interval for a difference, 1998, from the
    interval of each."""
    low, high = sorted((one, other), key=lambda figure: figure.value)
    if low.interval is None or high.interval is None:
        return low.value != high.value
    return high.value - low.value > math.hypot(high.value - high.interval[0], low.interval[1] - low.value)


def before_and_after(story: RunData) -> tuple[Evaluation | None, Evaluation | None]:
    """The evaluation before the first step and the newest one after it."""
    before = next((evaluation for evaluation in story.evaluations if evaluation.step == 0), None)
    after = story.evaluations[-1] if story.evaluations and story.evaluations[-1].step > 0 else None
    return before, after


def headline(story: RunData) -> str:
    """One sentence: what the run achieved."""
    steps = story.metrics[-1].step if story.metrics else 0
    before, after = before_and_after(story)
    over = f"{steps} step" + ("s" if steps != 1 else "")
    if before and after:
        first, last = comparable((before, after))
        change = f"from {decimal(first.value)} to {decimal(last.value)}"
        if not clearly_differs(first, last):
            return f"Held-out {first.name} went {change} in {over}: no more than chance may do."
        verb = "rose" if last.value > first.value else "fell"
        return f"Held-out {first.name} {verb} {change} in {over}."
    if rewards := [line.values["reward_mean"] for line in story.metrics if "reward_mean" in line.values]:
        return f"Mean reward went from {decimal(rewards[0])} to {decimal(rewards[-1])} in {over}."
    for name, words in ((HELD_OUT_LOSS, "Held-out loss"), ("loss", "Loss")):
        losses = [line.values[name] for line in story.metrics if name in line.values]
        if len(losses) > 1:
            return f"{words} went from {decimal(losses[0])} to {decimal(losses[-1])} in {over}."
    if before:
        when = "" if story.outcome == "finished" else " before the first step"
        (only,) = comparable((before,))
        return f"Held-out {only.name} is {decimal(only.value)}{when}."
    if story.measured is not None:
        return "No held-out completion has a valid reward."
    if steps:
        without = ", none with a valid reward" if "samples_invalid" in story.metrics[-1].values else ""
        return f"{over} {'have' if steps > 1 else 'has'} been completed{without}."
    return "No step has been completed yet."


def findings(story: RunData) -> list[Finding]:
    """What a careful reader would notice, most urgent first; often nothing."""
    checks = (
        _left_out,
        _invalid,
        _no_signal,
        _truncated,
        _entropy,
        _mismatch,
        _past_its_best,
        _quarantined,
        _errors,
        _resumed,
    )
    return [found for check in checks if (found := check(story))]


def _values(story: RunData, name: str) -> list[float]:
    return [line.values[name] for line in story.metrics if name in line.values]


def _recent(story: RunData, name: str) -> float:
    values: Sequence[float] = _values(story, name)[-RECENT:]
    return fmean(values) if values else 0.0


def _left_out(story: RunData) -> Finding | None:
    if not story.left_out:
        return None
    return Finding("The logs are damaged", f"What is wrong with them is left out: {', '.join(story.left_out)}.")


def _invalid(story: RunData) -> Finding | None:
    count = sum(_values(story, "samples_invalid"))
    if not count:
        return None
    samples = (*story.first.samples, *story.last.samples)
    reason = next((sample.reason for sample in reversed(samples) if not sample.valid and sample.reason), "")
    example = f" For example: {reason}" if reason else ""
    return Finding(f"{compact(count)} samples without a valid reward", f"They were left out of training.{example}")


def _no_signal(story: RunData) -> Finding | None:
    groups = story.groups
    recent = _recent(story, "groups_without_signal")
    if not groups or recent / groups <= NO_SIGNAL_HIGH:
        return None
    text = "All samples of such a group got the same reward: the prompts are too easy or too hard by now."
    return Finding(f"{percent(recent / groups)} of recent groups gave no signal", text)


def _truncated(story: RunData) -> Finding | None:
    share = _recent(story, "truncated_fraction")
    if share <= TRUNCATED_HIGH:
        return None
    return Finding(f"{percent(share)} of recent completions were cut", "Consider a larger sampling.max_new_tokens.")


def _entropy(story: RunData) -> Finding | None:
    values = _values(story, "entropy")
    if len(values) <= RECENT or values[0] <= 0 or _recent(story, "entropy") > ENTROPY_LEFT * values[0]:
        return None
    text = f"From {decimal(values[0])} to {decimal(values[-1])} nats: samples of a group hardly differ any more."
    return Finding("Entropy is nearly used up", text)


def _mismatch(story: RunData) -> Finding | None:
    value = _recent(story, "mismatch_kl")
    if value <= MISMATCH_HIGH:
        return None
    text = f"KL {decimal(value)} nats per token between their logprobs of the same tokens; gradients are biased by it."
    return Finding("Engine and trainer disagree", text)


def _past_its_best(story: RunData) -> Finding | None:
    _, after = before_and_after(story)
    best = max(story.evaluations, key=lambda evaluation: evaluation.reward_mean, default=None)
    if not after or not best or best.step == after.step:
        return None
    highest, last = comparable((best, after))
    if not clearly_differs(highest, last):
        return None
    text = f"{decimal(highest.value)} after step {best.step}, {decimal(last.value)} after the last."
    return Finding(f"Held-out {last.name} is past its best", text)


def _errors(story: RunData) -> Finding | None:
    # Workers that fail are not the run's fault; the fleet's section has them.
    failed = [event for event in story.events if event.get("error") and event["event"] not in FLEET_EVENTS]
    if not failed:
        return None
    last = failed[-1]
    return Finding(f"{len(failed)} errors in the event log", f"The last: {last['event']}, {last['error']}")


def _quarantined(story: RunData) -> Finding | None:
    count = story.summary["quarantined"]
    if not count:
        return None
    text = "Their probe logprobs differed from the trainer's too much; they were released."
    return Finding(f"{counted(count, 'worker')} quarantined", text)


def _resumed(story: RunData) -> Finding | None:
    sessions = story.summary["sessions"]
    if sessions <= 1:
        return None
    times = "once" if sessions == 2 else f"{sessions - 1} times"
    return Finding(
        f"Resumed {times}", "Dashed lines in the curves. Figures count every step once; wall time counts all."
    )
