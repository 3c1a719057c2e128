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
SKIPPED = "optimizer_steps_skipped"


@dataclass(slots=True)
class ScoreGuard:
    """Ends a run whose samples get no valid reward: all of them are left out, and nothing is learned.

    Args:
        steps: of the whole run; one shorter than `UNSCORED_STEPS` ends this way if no sample of it was valid.
    """

    steps: int
    unscored: int = 0  # steps in a row

    def look(self, trajectories: Sequence[Trajectory]) -> None:
        """Take note of one step's samples.

        Raises:
            GuardStop: that was the last one for which the run goes on.
        """
        rewards = [trajectory.reward for trajectory in trajectories]
        if any(reward is not None and reward.valid for reward in rewards):
            self.unscored = 0
            return
        self.unscored += 1
        if self.unscored >= min(UNSCORED_STEPS, self.steps):
            reason = next((reward.reason for reward in reversed(rewards) if reward is not None), "")
            raise GuardStop(
                f"no sample got a valid reward ({self.unscored} steps in a row), so nothing was learned: {reason}\n"
                "  correct the reward and run the same command again: it resumes from the checkpoint"
            )


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
