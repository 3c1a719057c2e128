"""Telemetry of a process that another process polls and repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tidemill.core.protocols import Telemetry
from tidemill.core.records import Record, StepMetrics
from tidemill.telemetry.recorder import NullTelemetry, Recorder


class Line(Record):
    """A call of one of a telemetry's methods, or of the recorder's."""

    method: str
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = {}
    metrics: StepMetrics | None = None  # of `step`, which has no other argument


class LineQueue(NullTelemetry):
    """A telemetry whose calls are taken as lines by another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque()

    def add(self, method: str, /, *arguments: Any, **fields: Any) -> None:
        self._lines.append(Line(method=method, arguments=arguments, fields=fields))

    def take(self) -> list[Line]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def resume(self, step: int) -> None:
        self.add("resume", step)

    def event(self, name: str, **fields: Any) -> None:
        self.add("event", name, **fields)

    def step(self, metrics: StepMetrics) -> None:
        self._lines.append(Line(method="step", metrics=metrics))

    def progress(self, phase: str, done: int, total: int) -> None:
        self.add("progress", phase, done, total)


def relay(lines: Sequence[Line], telemetry: Telemetry, recorder: Recorder) -> None:
    """Repeat the calls of a `LineQueue`."""
    for line in lines:
        if line.metrics is not None:
            telemetry.step(line.metrics)
            continue
        target = recorder if line.method in ("note", "expect") else telemetry
        getattr(target, line.method)(*line.arguments, **line.fields)
