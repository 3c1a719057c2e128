"""What a recorder would write, kept in memory: the lines of a run's logs, on the virtual clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tidemill.core.clock import Clock
from tidemill.core.records import FleetRow, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.events import NOT_PART_OF_A_STEP, event_line
from tidemill.telemetry.metrics import STEP_TIME, MetricLine

SESSION = 1


class Recording:
    """Implements `core.protocols.Telemetry`. Whatever reads the logs of a run reads these, too.

    Args:
        tell: called at the end of each step with its number and the virtual seconds so far.
    """

    def __init__(self, clock: Clock, tell: Callable[[int, float], None] = lambda step, seconds: None) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[MetricLine] = []
        self._clock, self._tell = clock, tell
        self._step_began_s: float | None = None

    @property
    def digest(self) -> str:
        """Of everything that was told: equal runs, equal digests."""
        lines = [self.events, [list(line) for line in self.metrics]]
        return hashlib.blake2b(msgspec.json.encode(lines), digest_size=16).hexdigest()

    def resume(self, step: int) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        self.events.append(event_line(name, fields, unix_s=0.0, session=SESSION, elapsed_s=self._clock.now()))
        if name in NOT_PART_OF_A_STEP and self._step_began_s is not None:
            self._step_began_s += fields["duration_s"]

    def step(self, metrics: StepMetrics) -> None:
        now_s = self._clock.now()
        line = MetricLine(
            step=metrics.step,
            policy_version=metrics.version.number,
            weights_digest=metrics.version.digest,
            optimizer_steps=metrics.optimizer_steps,
            session=SESSION,
            elapsed_s=now_s,
            values={**metrics.values, STEP_TIME: now_s - (self._step_began_s or 0.0)},
        )
        self.metrics.append(line)
        self._step_began_s = now_s
        self._tell(metrics.step, now_s)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        if self._step_began_s is None:
            self._step_began_s = self._clock.now()

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass
