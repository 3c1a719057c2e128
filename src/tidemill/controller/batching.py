"""Which groups make a batch, how many may be started, and the controller's metrics of a batch.

Versions rise by one per batch of B groups. A group is begun under some version and learned from when version V is the
trainer's; its lag is V minus the oldest version that made one of its tokens. The limit is kept from both ends: what is
begun (`may_begin`), and by when it must be learned from (`latest_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from statistics import fmean, pstdev
from typing import Literal, TypeAlias

import msgspec

from tidemill.config.learning import ScheduleConfig
from tidemill.controller.in_flight import StepCounters
from tidemill.controller.samples import Sample
from tidemill.core.records import LogprobBuffer, PolicyVersion, Reward, SampleId, Trajectory

Order: TypeAlias = Literal["canonical", "arrival"]
Membership: TypeAlias = Literal["planned", "first_finished"]


def scored(
    trajectory: Trajectory,
    reward: Reward,
    *,
    ref_logprobs: LogprobBuffer = b"",
    truncated: Literal["trained", "masked"],
) -> Trajectory:
    """The trajectory with its reward and weight; weight 0 leaves it out of the loss and of its group's statistics.

    That is so for an invalid reward, an empty completion, and one cut by the token limit where those are masked.
    """
    left_out = not reward.valid or trajectory.completion_length == 0 or (truncated == "masked" and trajectory.truncated)
    weight = 0.0 if left_out else 1.0
    return msgspec.structs.replace(trajectory, reward=reward, weight=weight, ref_logprobs=ref_logprobs)


def has_signal(trajectories: Iterable[Trajectory]) -> bool:
    """Whether a group's valid rewards differ at all: DAPO's dynamic sampling replaces groups without (2503.14476)."""
    values = {t.reward.value for t in trajectories if t.weight > 0 and t.reward is not None}
    return len(values) > 1


class GroupAssembly:
    """Collects the scored trajectories of whole groups, by position, in the order they were completed."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._members: dict[int, list[Trajectory]] = {}
        self.complete: dict[int, list[Trajectory]] = {}

    def add(self, position: int, trajectory: Trajectory) -> bool:
        """Take one trajectory (each exactly once); says whether its group is complete with it."""
        members = self._members.setdefault(position, [])
        members.append(trajectory)
        if len(members) < self._group_size:
            return False
        self.complete[position] = sorted(self._members.pop(position), key=lambda member: member.sample_id.index)
        return True

    def forget(self, position: int, sample_ids: Collection[SampleId] | None = None) -> None:
        """Some of a group's samples begin again, or (by default) the group was given up."""
        members = [*self._members.pop(position, ()), *self.complete.pop(position, ())]
        kept = [] if sample_ids is None else [member for member in members if member.sample_id not in sample_ids]
        if kept:
            self._members[position] = kept


class BatchBuilder:
    """The batch of one step while it is put together: which complete groups it takes, and when.

    Args:
        size: groups it will have, and every later batch too.
        membership: `planned`: the first `size` of those in flight, by position. `first_finished`: whichever are
            complete first, as long as every group that is left can still be learned from in time.
        order: `canonical`: by position, so that the same members always are learned from in the same order. `arrival`:
            as soon as it is certain that a group is a member.
        recorded: of a batch learned from before a restart: its positions, in their order.
    """

    def __init__(
        self, step: int, size: int, *, membership: Membership, order: Order, recorded: Sequence[int] | None = None
    ) -> None:
        self.step, self.size = step, len(recorded) if recorded is not None else size
        self._membership, self._order = membership, order
        self._recorded = recorded
        self.taken: list[int] = []
        self.held_up_by: int | None = None  # a group that must be a member and was not complete when last looked for

    @property
    def full(self) -> bool:
        return len(self.taken) == self.size

    def may_take(self, complete: int) -> bool:
        """Whether anything could be taken of so many complete groups: of those finished first, in canonical order, only
        all that are missing together."""
        together = self._recorded is None and self._membership == "first_finished" and self._order == "canonical"
        return complete >= (self.size - len(self.taken) if together else 1)

    def take(self, complete: Collection[int], in_flight: Mapping[int, int | None]) -> list[int]:
        """Positions that go to the trainer now, in order.

        Args:
            complete: groups all of whose samples are scored, not yet taken, in the order they were completed.
            in_flight: groups begun and not yet taken, the complete ones among them, by position; each with the last
                step that may learn from it, None for any.
        """
        left = self.size - len(self.taken)
        if self._recorded is not None:
            chosen = self._in_turn(self._recorded[len(self.taken) :], complete)
        elif self._membership == "planned":
            members = list(islice(in_flight, left))
            if self._order == "canonical":
                chosen = self._in_turn(members, complete)
            else:
                chosen = [position for position in complete if position in members]
        else:
            chosen = self._first_finished(left, complete, in_flight)
        self.taken += chosen
        return chosen

    def _first_finished(self, left: int, complete: Collection[int], in_flight: Mapping[int, int | None]) -> list[int]:
        due: Counter[int | None] = Counter(latest for latest in in_flight.values() if latest is not None)
        chosen: list[int] = []
        for position in complete:
            if len(chosen) == left:
                break
            latest = in_flight[position]
            due[latest] -= latest is not None
            if self._fits(due, left - len(chosen) - 1):
                chosen.append(position)
            else:
                due[latest] += latest is not None
        if self._order == "arrival":
            return chosen
        if len(chosen) == left:
            return sorted(chosen)
        under_way = (position for position, latest in in_flight.items() if self.is_last_for(latest))
        self.held_up_by = next((position for position in under_way if position not in complete), None)
        return []

    def is_last_for(self, latest: int | None) -> bool:
        """Whether a group with this latest step must be a member."""
        return latest is not None and latest <= self.step

    def _fits(self, due: Mapping[int | None, int], left: int) -> bool:
        """Whether groups with these latest steps can all be learned from in time: `left` in this step, and `size` in
        each later one."""
        waiting = 0
        for latest in sorted(latest for latest in due if latest is not None):
            waiting += due[latest]
            if waiting > left + (latest - self.step) * self.size:
                return False
        return True

    @staticmethod
    def _in_turn(members: Sequence[int], complete: Collection[int]) -> list[int]:
        """The longest beginning that is complete."""
        ready = []
        for position in members:
            if position not in complete:
                break
            ready.append(position)
        return ready


TREND_STEPS = 4
"""Batches on either side of the comparison that says whether the reward improves."""


def may_start(*, version: int, learned: int, in_flight: int, batch_groups: int, overcommit: int) -> int:
    """Groups that may be begun now.

    With `overcommit` = lag * B this is the rule of AReaL (arXiv 2505.24298), counted in groups:
    accepted + running < (version + lag + 1) B. Groups that were given up do not count: their places are free again.

    Args:
        version: the newest, which is also the number of batches learned from.
        learned: groups learned from, or being learned from.
        in_flight: groups begun and not learned from.
    """
    return max(0, (version + 1) * batch_groups + overcommit - learned - in_flight)


def latest_step(oldest_version: int | None, newest_version: int, max_lag: int) -> int:
    """The last step that may learn from a sample (or a group, by its oldest one).

    Step s is learned from version s - 1, which may be `max_lag` beyond the version that made the oldest token. What has
    no tokens yet is as new as the weights that will make them.
    """
    return (newest_version if oldest_version is None else oldest_version) + max_lag + 1


def overcommitted(schedule: ScheduleConfig, batch_groups: int, rewards: Sequence[float]) -> int:
    """Groups to have under way beyond the batch that is due.

    `adaptive` begins at none, and from step to step takes an eighth of the limit more while the mean reward of the last
    batches is above that of those before, and an eighth less otherwise: carrying work over pays while the policy still
    moves slowly against what it gains (OPPO, arXiv 2509.25762, adapts its Δ by the reward's trend).

    Args:
        rewards: the mean reward of each batch so far.
    """
    limit = schedule.most_left_over(batch_groups)
    if schedule.overcommit != "adaptive":
        return limit
    groups, by = 0, max(1, limit // 8)
    for end in range(2 * TREND_STEPS, len(rewards) + 1):
        before, last = rewards[end - 2 * TREND_STEPS : end - TREND_STEPS], rewards[end - TREND_STEPS : end]
        groups = min(limit, groups + by) if fmean(last) > fmean(before) else max(0, groups - by)
    return groups


def sample_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards (over valid samples; standard deviation with ddof 0), lengths in tokens, and what was left out."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward and trajectory.reward.valid]
    lengths = [trajectory.completion_length for trajectory in trajectories]
    figures = {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_fraction": fmean(trajectory.truncated for trajectory in trajectories),
        "samples": float(len(trajectories)),
        "samples_invalid": float(len(trajectories) - len(rewards)),
        "samples_left_out": float(sum(trajectory.weight == 0 for trajectory in trajectories)),
    }
    if rewards:
        values = [reward.value for reward in rewards]
        figures |= {"reward_mean": fmean(values), "reward_std": pstdev(values), **_components(rewards)}
    return figures


def _components(rewards: Sequence[Reward]) -> dict[str, float]:
    """Mean of each component over the samples that have it; a single one would only repeat the reward."""
    names = dict.fromkeys(name for reward in rewards for name in reward.components)
    if len(names) < 2:
        return {}
    return {
        f"reward/{name}": fmean(reward.components[name] for reward in rewards if name in reward.components)
        for name in names
    }


def batch_figures(samples: Sequence[Sample], counters: StepCounters, version: PolicyVersion) -> dict[str, float]:
    """Token counts; `version` is the one the batch was learned from.

    `tokens_generated` counts every completion token of the batch, `tokens_recovered` those of them that came from the
    journal, `tokens_other_weights` those made by weights that bear the version's number but not its digest: after a
    restart a version may have been made again, a little different.
    """
    runs = [run for sample in samples for run in sample.versions]
    other = (r.end - r.start for r in runs if r.version.number == version.number and r.version != version)
    return {
        "tokens_generated": float(sum(sample.length for sample in samples)),
        "tokens_recovered": float(sum(sample.recovered for sample in samples)),
        "tokens_other_weights": float(sum(other)),
        "prompt_tokens_computed": float(counters.prompt_tokens_computed),
        "prompt_tokens_reused": float(counters.prompt_tokens_reused),
        "deltas_ignored": float(counters.ignored.total()),
        "tokens_recomputed": float(counters.tokens_recomputed),
        "tokens_discarded": float(counters.tokens_discarded),
        "samples_restarted": float(counters.samples_restarted),
        "groups_dropped": float(counters.groups_dropped),
        "groups_redrawn": float(counters.groups_redrawn),
    }
