"""Held-out mean reward and accuracy by step, put together from both logs of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tidemill.telemetry.events import EVALUATION, RESUME
from tidemill.telemetry.jsonl import measured
from tidemill.telemetry.metrics import HELD_OUT, MetricLine
from tidemill.telemetry.statistics import normal_interval, wilson_interval


class Evaluation(NamedTuple):
    """One evaluation of the surviving history."""

    step: int
    reward_mean: float  # the best one has the highest
    reward_stderr: float | None  # None with one reward
    greedy_accuracy: float | None  # where answers are right or wrong
    n: int


class Figure(NamedTuple):
    """One evaluation's figure to be shown."""

    name: Literal["accuracy", "mean reward"]
    value: float
    interval: tuple[float, float] | None  # of 95 %


def comparable(found: Sequence[Evaluation]) -> list[Figure]:
    """The same figure of each: accuracy where all of them have it, else the mean reward."""
    shares = [(one.greedy_accuracy, one.n) for one in found if one.greedy_accuracy is not None]
    if len(shares) == len(found):
        return [_accuracy(share, n) for share, n in shares]
    return [Figure("mean reward", one.reward_mean, _around(one.reward_mean, one.reward_stderr)) for one in found]


def _accuracy(share: float, n: int) -> Figure:
    return Figure("accuracy", share, wilson_interval(share, n) if n and 0 <= share <= 1 else None)


def _around(mean: float, stderr: float | None) -> tuple[float, float] | None:
    return None if stderr is None else normal_interval(mean, stderr)


def evaluations(events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine]) -> list[Evaluation]:
    """By step. An event is followed as soon as it is written; what a resume rewound is forgotten."""
    found = {line.step: one for line in metrics if (one := read_evaluation(line.step, line.values, prefix=HELD_OUT))}
    told: dict[int, Evaluation] = {}
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        if event["event"] == RESUME:
            told = {at: evaluation for at, evaluation in told.items() if at <= step}
        elif event["event"] == EVALUATION and (one := read_evaluation(step, event)):
            told[step] = one
    both = found | told
    return [both[step] for step in sorted(both)]


def read_evaluation(step: int, values: Mapping[str, Any], *, prefix: str = "") -> Evaluation | None:
    """From an event or a step's metrics; None where they have no mean reward."""

    def value(name: str) -> float | None:
        return measured(values.get(f"{prefix}{name}"))

    reward = value("reward_mean")
    if reward is None:
        return None
    return Evaluation(step, reward, value("reward_stderr"), value("greedy_accuracy"), int(value("n") or 0))
