"""What ends a run that goes on to no purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.core.errors import GuardStop
from tidemill.core.records import Trajectory

UNSCORED_STEPS = 3
"""So many in a row: a reward server that is restarted may be away for one."""


@dataclass(slots=True)
class ScoreGuard:
    """Ends a run whose samples get no valid reward any more: all of them are left out, and nothing is learned."""

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
        if self.unscored == UNSCORED_STEPS:
            reason = next((reward.reason for reward in reversed(rewards) if reward is not None), "")
            raise GuardStop(
                f"no sample of the last {UNSCORED_STEPS} steps got a valid reward, so nothing was learned: {reason}\n"
                "  mend the reward and run the same command again: the run goes on from its checkpoint"
            )
