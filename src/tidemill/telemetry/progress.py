"""What the views show: the run so far, and how much of it is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from tidemill.core.records import FleetRow
from tidemill.telemetry.evaluations import Evaluation, read_evaluation
from tidemill.telemetry.metrics import HELD_OUT, STEP_TIME, MetricLine

HISTORY = 400
RECENT = 8


@dataclass
class Progress:
    """Kept current by the recorder; the views only read it. Times are seconds since this session began."""

    run: str
    total_steps: int
    groups: int = 0  # per batch
    earlier_wall_s: float = 0.0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)  # of the newest step
    history: dict[str, deque[float]] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by step
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) since the newest step, in order
    fleet: tuple[FleetRow, ...] = ()  # the workers there are, as last told
    preemptible: bool = False  # whether any worker of this session was
    elapsed_s: float = 0.0  # when the newest step ended
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add_step(self, step: int, values: dict[str, float], elapsed_s: float) -> None:
        if step > 0:
            # Wall time from step to step, so that evaluations and checkpoints count towards the time left.
            self.step_times.append(elapsed_s - self.elapsed_s if self.step_times else values.get(STEP_TIME, 0.0))
        self.elapsed_s, self.phases = elapsed_s, {}
        self._take(step, values)

    def _take(self, step: int, values: dict[str, float]) -> None:
        self.step, self.values = step, values
        for name, value in values.items():
            self.history.setdefault(name, deque(maxlen=HISTORY)).append(value)
        self.add_evaluation(read_evaluation(step, values, prefix=HELD_OUT))

    def add_evaluation(self, evaluation: Evaluation | None) -> None:
        if evaluation is not None:
            self.evaluations[evaluation.step] = evaluation

    def set_fleet(self, rows: Iterable[FleetRow]) -> None:
        self.fleet = tuple(rows)
        self.preemptible |= any(row.kind == "preemptible" for row in self.fleet)

    def restart(self, lines: Iterable[MetricLine], evaluations: Iterable[Evaluation]) -> None:
        """Take over the surviving history of earlier sessions."""
        self.step, self.values, self.history = 0, {}, {}
        self.evaluations = {one.step: one for one in evaluations}
        for line in lines:
            self._take(line.step, line.values)

    def current_phases(self) -> list[tuple[str, int, int]]:
        """(name, done, total) of what is under way: training may begin before the rollout is done."""
        return [(name, done, total) for name, (done, total) in self.phases.copy().items() if done < total]

    def left_s(self) -> float | None:
        """Seconds until the last step, from the median of recent steps; None before the first."""
        if not self.step_times:
            return None
        return max(0, self.total_steps - self.step) * median(self.step_times)
