"""Guards that end a run which learns nothing: no valid rewards, or no finite gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.errors import GuardStop
from tidemill.core.records import StepMetrics, Trajectory

UNSCORED_STEPS = 3
"""Consecutive steps without a valid reward; more than one, because a reward server may restart."""
SKIPPED_STEPS = 3
"""Consecutive steps without a finite gradient; more than one, because one batch may overflow."""
RESUME_HINT = "correct the reward and run it again"
RESTART_HINT = "all steps are done: correct the reward and run it in another run directory"
SKIPPED = "optimizer_steps_skipped"


@dataclass(slots=True)
class ScoreGuard:
    """Ends a run in which no sample gets a valid reward, so that nothing is learned."""

    unscored: int = 0  # consecutive steps
    first_reason: str = ""  # of the first invalid reward in these steps

    def check(self, trajectories: Sequence[Trajectory], *, steps_left: int) -> None:
        """Raises GuardStop: no sample of the last `UNSCORED_STEPS` steps got a valid reward."""
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward]
        if any(reward.valid for reward in rewards):
            self.unscored, self.first_reason = 0, ""
            return
        self.unscored += 1
        self.first_reason = self.first_reason or next((reward.reason for reward in rewards), "")
        if self.unscored == UNSCORED_STEPS:
            raise GuardStop(
                f"no sample of the last {UNSCORED_STEPS} steps got a valid reward, so nothing was learned"
                f"{self._because}\n  {RESUME_HINT if steps_left else RESTART_HINT}"
            )

    def finish(self, rewards: Sequence[float | None]) -> None:
        """Raises GuardStop: no batch of a run that has done all its steps has a mean reward."""
        if rewards and all(reward is None for reward in rewards):
            raise GuardStop(
                f"no sample of this run got a valid reward, so nothing was learned{self._because}\n  {RESUME_HINT}"
            )

    @property
    def _because(self) -> str:
        return f"; first reason: {self.first_reason}" if self.first_reason else ""


@dataclass(slots=True)
class UpdateGuard:
    """Ends a run in which no gradient is finite, so that the weights do not change.

    Args:
        steps: of the whole run; the guard acts earlier in a run shorter than `SKIPPED_STEPS`.
    """

    steps: int
    skipped: int = 0  # consecutive steps

    def check(self, metrics: StepMetrics) -> None:
        """Raises GuardStop: the limit of consecutive skipped steps is reached."""
        if metrics.optimizer_steps or not metrics.values.get(SKIPPED):
            self.skipped = 0
            return
        self.skipped += 1
        if self.skipped >= min(SKIPPED_STEPS, self.steps):
            raise GuardStop(
                f"no gradient was finite in {self.skipped} consecutive steps, so nothing was learned\n"
                "  check for NaN and infinity in the model's weights, for huge rewards, and for too high a learning "
                "rate; then run the same command again: the run resumes from its checkpoint"
            )
