"""Telemetry of a process that another process polls and repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.protocols import Telemetry
from tidemill.core.records import Record, StepMetrics
from tidemill.telemetry.recorder import NullTelemetry


class Line(Record):
    """One call of a telemetry's method, or of a function of the context."""

    call: str
    name: str = ""
    step: int = 0
    total: int = 0
    fields: dict[str, Any] = {}
    metrics: StepMetrics | None = None


class LineQueue(NullTelemetry):
    """A telemetry whose calls are taken as lines by another thread."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self._lines: deque[Line] = deque()

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def take(self) -> list[Line]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def resume(self, step: int) -> None:
        self.add(Line(call="resume", step=step))

    def event(self, name: str, **fields: Any) -> None:
        self.add(Line(call="event", name=name, fields=fields))

    def step(self, metrics: StepMetrics) -> None:
        self.add(Line(call="step", metrics=metrics))

    def progress(self, phase: str, done: int, total: int) -> None:
        self.add(Line(call="progress", name=phase, step=done, total=total))


def relay(
    lines: Sequence[Line], telemetry: Telemetry, *, note: Callable[[str], None], expect: Callable[[int], None]
) -> None:
    """Repeat the calls of a `LineQueue`."""
    for line in lines:
        match line.call:
            case "resume":
                telemetry.resume(line.step)
            case "event":
                telemetry.event(line.name, **line.fields)
            case "step":
                assert line.metrics is not None
                telemetry.step(line.metrics)
            case "progress":
                telemetry.progress(line.name, line.step, line.total)
            case "note":
                note(line.name)
            case "expect":
                expect(line.total)
