"""What ends a run that goes on to no purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.errors import GuardStop
from tidemill.core.records import StepMetrics, Trajectory

UNSCORED_STEPS = 3
"""So many in a row: a reward server that is restarted may be away for one."""
SKIPPED_STEPS = 3
"""So many in a row: one batch may have a gradient that overflows."""
RESUME_CURE = "correct the reward and run the same command again: the run resumes from its checkpoint"
RESTART_CURE = "all steps are done: correct the reward and start the run again in another --run.dir"
SKIPPED = "optimizer_steps_skipped"


@dataclass(slots=True)
class ScoreGuard:
    """Ends a run in which no sample gets a valid reward: all of them are left out, and nothing is learned."""

    unscored: int = 0  # steps in a row
    first_reason: str = ""  # why the first sample of those steps got none

    def look(self, trajectories: Sequence[Trajectory], *, steps_left: int) -> None:
        """Take note of one step's samples.

        Raises:
            GuardStop: no sample of the last `UNSCORED_STEPS` steps got a valid reward.
        """
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward]
        if any(reward.valid for reward in rewards):
            self.unscored, self.first_reason = 0, ""
            return
        self.unscored += 1
        self.first_reason = self.first_reason or next((reward.reason for reward in rewards), "")
        if self.unscored == UNSCORED_STEPS:
            raise GuardStop(
                f"no sample of the last {UNSCORED_STEPS} steps got a valid reward, so nothing was learned"
                f"{self._because}\n  {RESUME_CURE if steps_left else RESTART_CURE}"
            )

    def finish(self, rewards: Sequence[float | None]) -> None:
        """Look at a whole run that has done its steps.

        Args:
            rewards: the mean reward of each batch; None without a valid one.

        Raises:
            GuardStop: no sample of the run got a valid reward.
        """
        if rewards and all(reward is None for reward in rewards):
            raise GuardStop(
                f"no sample of this run got a valid reward, so nothing was learned{self._because}\n  {RESTART_CURE}"
            )

    @property
    def _because(self) -> str:
        return f"; the first: {self.first_reason}" if self.first_reason else ""


@dataclass(slots=True)
class UpdateGuard:
    """Ends a run whose weights no longer move, as no gradient is finite.

    Args:
        steps: of the whole run; a shorter one than `SKIPPED_STEPS` must have moved them, too.
    """

    steps: int
    skipped: int = 0  # steps in a row

    def look(self, metrics: StepMetrics) -> None:
        """Take note of one step.

        Raises:
            GuardStop: that was the last one for which the run goes on.
        """
        if metrics.optimizer_steps or not metrics.values.get(SKIPPED):
            self.skipped = 0
            return
        self.skipped += 1
        if self.skipped >= min(SKIPPED_STEPS, self.steps):
            raise GuardStop(
                f"in no step was a gradient finite ({self.skipped} in a row), so nothing was learned\n"
                "  look for NaN and infinity in the model's weights, for huge rewards, and for too high a learning "
                "rate; then run the same command again: the run goes on from its checkpoint"
            )
