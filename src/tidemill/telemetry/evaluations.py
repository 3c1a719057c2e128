"""Held-out accuracy by step, put together from both logs of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tidemill.telemetry.events import EVALUATION, RESUME
from tidemill.telemetry.jsonl import measured
from tidemill.telemetry.metrics import GREEDY_ACCURACY, MetricLine


class Evaluation(NamedTuple):
    """One evaluation of the surviving history."""

    step: int
    greedy_accuracy: float
    n: int


def evaluations(events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine]) -> list[Evaluation]:
    """By step. An event is followed as soon as it is written; what a resume rewound is forgotten."""
    found = {
        line.step: Evaluation(line.step, line.values[GREEDY_ACCURACY], int(line.values.get("eval/n", 0)))
        for line in metrics
        if GREEDY_ACCURACY in line.values
    }
    told: dict[int, Evaluation] = {}
    for event in events:
        step, accuracy = event.get("step"), measured(event.get("greedy_accuracy"))
        if event["event"] == RESUME and isinstance(step, int):
            told = {at: evaluation for at, evaluation in told.items() if at <= step}
        elif event["event"] == EVALUATION and isinstance(step, int) and accuracy is not None:
            told[step] = Evaluation(step, accuracy, int(measured(event.get("n")) or 0))
    both = found | told
    return [both[step] for step in sorted(both)]
