"""When a group is ready to be learned from, and in which order groups go to the trainer: pure bookkeeping."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from tidemill.controller.batch import BatchPlan
from tidemill.core.records import Group, Reward, Trajectory

Order: TypeAlias = Literal["canonical", "arrival"]


def scored(trajectory: Trajectory, reward: Reward, *, truncated: Literal["trained", "masked"]) -> Trajectory:
    """The trajectory with its reward and weight; weight 0 leaves it out of the loss and of its group's statistics.

    That is so for an invalid reward, an empty completion, and one cut by the token limit where those are masked.
    """
    left_out = not reward.valid or trajectory.completion_length == 0 or (truncated == "masked" and trajectory.truncated)
    return msgspec.structs.replace(trajectory, reward=reward, weight=0.0 if left_out else 1.0)


class GroupAssembly:
    """Collects scored trajectories and releases whole groups: strictly by position, or as they complete."""

    def __init__(self, plan: BatchPlan, order: Order) -> None:
        self._positions = {
            (plan.purpose, group.prompt_id, group.epoch): position for position, group in enumerate(plan.groups)
        }
        self._group_size = plan.group_size
        self._order: Order = order
        self._members: dict[int, list[Trajectory]] = {position: [] for position in self._positions.values()}
        self._complete: dict[int, Group] = {}
        self._next = 0

    def add(self, trajectory: Trajectory) -> list[Group]:
        """Take one trajectory (each exactly once); returns the groups that may be learned from now, in order."""
        position = self._positions[trajectory.sample_id.group]
        members = self._members[position]
        members.append(trajectory)
        if len(members) < self._group_size:
            return []
        group = Group(
            position=position,
            prompt_id=trajectory.sample_id.prompt_id,
            trajectories=tuple(sorted(members, key=lambda member: member.sample_id.index)),
        )
        del self._members[position]
        if self._order == "arrival":
            return [group]
        self._complete[position] = group
        return self._released()

    def _released(self) -> list[Group]:
        ready = []
        while self._next in self._complete:
            ready.append(self._complete.pop(self._next))
            self._next += 1
        return ready
