"""Which groups may be started, which make a batch, and the controller's metrics of a batch.

Versions rise by one per batch of B groups. The lag of a group is the trainer's version when it is trained on, minus the
oldest version that generated one of its tokens. Two rules enforce the limit: how many groups may be started
(`may_start`), and by which step a group must be trained on (`latest_step`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from statistics import fmean, pstdev
from typing import Literal, TypeAlias

import msgspec

from tidemill.config.learning import ScheduleConfig
from tidemill.controller.in_flight import StepCounters
from tidemill.controller.samples import Sample
from tidemill.core.records import LogprobBuffer, PolicyVersion, Reward, SampleId, Trajectory
from tidemill.telemetry.metrics import EPISODE_ENDS

Order: TypeAlias = Literal["canonical", "arrival"]
Membership: TypeAlias = Literal["planned", "first_finished", "ranked"]


def scored(
    trajectory: Trajectory,
    reward: Reward,
    *,
    ref_logprobs: LogprobBuffer = b"",
    truncated: Literal["trained", "masked"],
) -> Trajectory:
    """The trajectory with its reward and weight. Weight 0 excludes it from the loss and its group's statistics.

    The weight is 0 for an invalid reward, an empty completion, and, with `truncated="masked"`, a completion cut by the
    token limit or the context length.
    """
    excluded = not reward.valid or trajectory.trained_length == 0 or (truncated == "masked" and trajectory.truncated)
    weight = 0.0 if excluded else 1.0
    return msgspec.structs.replace(trajectory, reward=reward, weight=weight, ref_logprobs=ref_logprobs)


def has_signal(trajectories: Iterable[Trajectory]) -> bool:
    """Whether a group's valid rewards differ. DAPO's dynamic sampling replaces other groups (arXiv 2503.14476)."""
    values = {t.reward.value for t in trajectories if t.weight > 0 and t.reward is not None}
    return len(values) > 1


class GroupAssembly:
    """Collects scored trajectories into complete groups, by position, in the order of completion."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._members: dict[int, list[Trajectory]] = {}
        self._sizes: dict[int, int] = {}  # of incomplete groups that need fewer samples
        self.complete: dict[int, list[Trajectory]] = {}

    def add(self, position: int, trajectory: Trajectory) -> bool:
        """Add a trajectory, each exactly once; returns whether its group is complete."""
        members = self._members.setdefault(position, [])
        members.append(trajectory)
        return self._complete_if_all(position)

    def _complete_if_all(self, position: int) -> bool:
        if len(self._members[position]) < self._sizes.get(position, self._group_size):
            return False
        self._sizes.pop(position, None)
        self.complete[position] = sorted(self._members.pop(position), key=lambda member: member.sample_id.index)
        return True

    def keep(self, position: int, sample_ids: Collection[SampleId]) -> None:
        """From now on a group needs only these samples."""
        members = [*self._members.pop(position, ()), *self.complete.pop(position, ())]
        self._members[position] = [member for member in members if member.sample_id in sample_ids]
        self._sizes[position] = len(sample_ids)
        self._complete_if_all(position)

    def forget(self, position: int, sample_ids: Collection[SampleId] | None = None) -> None:
        """Remove restarted samples of a group; by default all of a dropped group."""
        members = [*self._members.pop(position, ()), *self.complete.pop(position, ())]
        if sample_ids is None:
            self._sizes.pop(position, None)
        kept = [] if sample_ids is None else [member for member in members if member.sample_id not in sample_ids]
        if kept:
            self._members[position] = kept


class BatchBuilder:
    """Selects the groups of one step's batch as they complete.

    Args:
        size: groups of this batch and of every later one.
        membership: `planned`: the first `size` groups in flight, by position. `first_finished`: the first complete
            groups, as long as every remaining group can still be trained on in time. `ranked`: those in `ranked`.
        order: `canonical`: by position, so that equal batches are trained on in equal order. `arrival`: as soon as it
            is certain that a group is a member.
        recorded: positions of a batch that was trained on before a resume, in order.
        ranked: positions in training order; grows.
    """

    def __init__(
        self,
        step: int,
        size: int,
        *,
        membership: Membership,
        order: Order,
        recorded: Sequence[int] | None = None,
        ranked: Sequence[int] = (),
    ) -> None:
        self.step, self.size = step, len(recorded) if recorded is not None else size
        self._membership, self._order = membership, order
        self.recorded, self._ranked = recorded, ranked
        self.taken: list[int] = []
        self.blocked_by: int | None = None  # an incomplete group that the batch must take, found by the last `take`

    @property
    def full(self) -> bool:
        return len(self.taken) == self.size

    def may_take(self, complete: int) -> bool:
        """Whether `take` could return any of `complete` groups. With `first_finished` in canonical order it returns all
        remaining groups at once."""
        if self._membership == "ranked" and self.recorded is None:
            return len(self._ranked) > len(self.taken)
        together = self.recorded is None and self._membership == "first_finished" and self._order == "canonical"
        return complete >= (self.size - len(self.taken) if together else 1)

    def take(self, complete: Collection[int], in_flight: Mapping[int, int | None]) -> list[int]:
        """Take complete groups; returns their positions in training order.

        Args:
            complete: complete groups that are not taken, in order of completion.
            in_flight: all groups that are not taken, ascending, with the last step that may train on each (None: any).
        """
        left = self.size - len(self.taken)
        if self.recorded is not None:
            chosen = list(takewhile(complete.__contains__, self.recorded[len(self.taken) :]))
        elif self._membership == "ranked":
            chosen = [position for position in self._ranked if position not in self.taken][:left]
        elif self._membership == "planned":
            members = list(islice(in_flight, left))
            if self._order == "canonical":
                chosen = list(takewhile(complete.__contains__, members))
            else:
                chosen = [position for position in complete if position in members]
        else:
            chosen = self._first_finished(left, complete, in_flight)
        self.taken += chosen
        return chosen

    def give_back(self, positions: Sequence[int]) -> None:
        """Undo taking the last groups, which were not trained on."""
        del self.taken[len(self.taken) - len(positions) :]

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
        required = (position for position, latest in in_flight.items() if self.must_take(latest))
        self.blocked_by = next((position for position in required if position not in complete), None)
        return []

    def must_take(self, latest: int | None) -> bool:
        """Whether a group with this latest step must be in this batch."""
        return latest is not None and latest <= self.step

    def _fits(self, due: Mapping[int | None, int], left: int) -> bool:
        """Whether groups with these latest steps can all be trained on in time, `left` of them in this step and `size`
        in each later one."""
        waiting = 0
        for latest in sorted(latest for latest in due if latest is not None):
            waiting += due[latest]
            if waiting > left + (latest - self.step) * self.size:
                return False
        return True


TREND_STEPS = 4
"""Batches in each of the two windows whose mean rewards are compared."""


def may_start(*, version: int, learned: int, in_flight: int, batch_groups: int, overcommit: int) -> int:
    """Number of groups that may be started now.

    With `overcommit` = lag * B this is AReaL's rule (arXiv 2505.24298), counted in groups:
    accepted + running < (version + lag + 1) B. Dropped groups do not count.

    Args:
        version: the newest, which is also the number of batches trained on.
        learned: groups trained on, including the current batch's.
        in_flight: groups started and not trained on.
    """
    return max(0, (version + 1) * batch_groups + overcommit - learned - in_flight)


def latest_step(oldest_version: int | None, newest_version: int, max_lag: int) -> int:
    """The last step that may train on a sample or group.

    Step s trains version s - 1, which may be at most `max_lag` newer than the oldest token's version. Without tokens
    (`oldest_version` None), the newest version counts.
    """
    return (newest_version if oldest_version is None else oldest_version) + max_lag + 1


def overcommitted(schedule: ScheduleConfig, batch_groups: int, rewards: Sequence[float]) -> int:
    """Number of groups to have in flight beyond the current batch.

    `adaptive` starts at 0. Each step it rises by an eighth of the limit if the mean reward of the last `TREND_STEPS`
    batches is above that of those before, and falls by an eighth otherwise (OPPO, arXiv 2509.25762, adapts its Δ to the
    reward's trend).

    Args:
        rewards: mean reward of each batch so far.
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
    """Metrics of rewards (over valid samples; standard deviation with ddof 0), lengths in tokens, and weights."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward and trajectory.reward.valid]
    lengths = [trajectory.trained_length for trajectory in trajectories]
    figures = {
        "completion_tokens_mean": fmean(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_fraction": fmean(trajectory.truncated for trajectory in trajectories),
        "samples": float(len(trajectories)),
        "samples_invalid": float(len(trajectories) - len(rewards) - sum(bool(each.fault) for each in trajectories)),
        "samples_left_out": float(sum(trajectory.weight == 0 for trajectory in trajectories)),
    }
    if turns := [len(trajectory.turns) for trajectory in trajectories if trajectory.turns]:
        calls = [sum(len(turn.calls) for turn in trajectory.turns) for trajectory in trajectories]
        figures |= {"turns_mean": fmean(turns), "calls_mean": fmean(calls)}
        ended = Counter(trajectory.episode_end for trajectory in trajectories)
        figures |= {name: ended[end] / len(trajectories) for end, name in EPISODE_ENDS.items()}
    if rewards:
        values = [reward.value for reward in rewards]
        figures |= {"reward_mean": fmean(values), "reward_std": pstdev(values)}
        names = dict.fromkeys(name for reward in rewards for name in reward.components)
        if len(names) > 1:  # a single component is the reward
            for name in names:
                components = [reward.components[name] for reward in rewards if name in reward.components]
                figures[f"reward/{name}"] = fmean(components)
    return figures


def batch_figures(samples: Sequence[Sample], counters: StepCounters, version: PolicyVersion) -> dict[str, float]:
    """Token and group counts; `version` is the one that the batch was trained from.

    `tokens_recovered` are those read from the journal. `tokens_other_weights` were generated by weights with the
    version's number but another digest, which happens when a resumed run recomputes a version inexactly.
    """
    runs = [run for sample in samples for run in sample.versions]
    other = (r.end - r.start for r in runs if r.version.number == version.number and r.version != version)
    answered = counters.turns_answered
    return {
        **({"time_env_answer_s": counters.answer_s / answered} if answered else {}),
        "tokens_generated": float(sum(sample.generated for sample in samples)),
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
        "groups_returned": float(counters.groups_returned),
    }
