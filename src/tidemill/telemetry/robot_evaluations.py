"""Evaluations of a robot's policy before and after training, from the event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tidemill.telemetry.events import ROBOT_EVALUATION
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.statistics import wilson_interval


class RobotEvaluation(NamedTuple):
    """Episodes without exploration and randomisation."""

    episodes: int
    success: float  # share of episodes
    falls: float  # share of episodes
    return_mean: float
    figures: Mapping[str, float]
    terms: Mapping[str, float]

    @property
    def interval(self) -> tuple[float, float]:
        """Of success, 95 %."""
        return wilson_interval(self.success, self.episodes)


def robot_evaluations(events: Iterable[Mapping[str, Any]]) -> dict[str, RobotEvaluation]:
    """The newest evaluation "before" and "after" training, as far as they are logged."""
    logged = {str(event.get("when")): event for event in events if event.get("event") == ROBOT_EVALUATION}
    return {when: _evaluation(logged[when]) for when in ("before", "after") if when in logged}


def _evaluation(event: Mapping[str, Any]) -> RobotEvaluation:
    def number(name: str) -> float:
        return finite_number(event.get(name)) or 0.0

    return RobotEvaluation(
        episodes=int(number("episodes")),
        success=number("success"),
        falls=number("falls"),
        return_mean=number("return_mean"),
        figures=_numbers(event.get("figures")),
        terms=_numbers(event.get("terms")),
    )


def _numbers(table: Any) -> dict[str, float]:
    pairs = table.items() if isinstance(table, dict) else ()
    return {name: number for name, value in pairs if (number := finite_number(value)) is not None}
