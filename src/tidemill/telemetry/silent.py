"""Telemetry of what is not a run: nothing is written, only progress is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.records import FleetRow, Prompt, StepMetrics, Trajectory


class SilentTelemetry:
    """Implements core.protocols.Telemetry."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._told = ""

    def resume(self, step: int) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tenths, each told once."""
        text = f"{phase}: {10 * (10 * done // max(total, 1))} % of {total}"
        if text != self._told:
            self._told = text
            self._tell(text)

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass
