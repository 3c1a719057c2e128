from __future__ import annotations

from typing import Any

import pytest

from tests.fabricated_run import FakeClock
from tidemill.telemetry.events import MonotonicClock, span


class Heard:
    """A Telemetry that remembers events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def resume(self, step: int) -> None: ...

    def step(self, metrics: Any) -> None: ...

    def samples(self, step: int, trajectories: Any, prompts: Any) -> None: ...

    def progress(self, phase: str, done: int, total: int) -> None: ...

    def fleet(self, rows: Any) -> None: ...


def test_a_span_is_one_event_with_its_duration_and_fields() -> None:
    heard, clock = Heard(), FakeClock(100.0)
    with span(heard, clock, "evaluation", step=5) as fields:
        clock.pass_s(1.5)
        fields["n"] = 64
    assert heard.events == [("evaluation", {"step": 5, "n": 64, "duration_s": 1.5})]


def test_a_span_records_and_propagates_an_exception() -> None:
    heard, clock = Heard(), FakeClock()

    def fail() -> None:
        with span(heard, clock, "checkpoint", step=5):
            clock.pass_s(0.25)
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        fail()
    assert heard.events == [("checkpoint", {"step": 5, "error": "KeyError", "duration_s": 0.25})]


def test_the_monotonic_clock_goes_forward() -> None:
    clock = MonotonicClock()
    assert clock.now() <= clock.now()
