"""How many groups may be begun, and which must not be left out of a batch: the arithmetic of the policy lag.

Versions rise by one per batch of B groups. A group is begun under some version and learned from when version V is the
trainer's; its lag is V minus the oldest version that made one of its tokens. The limit is kept from both ends: what is
begun (`may_begin`), and by when it must be learned from (`latest_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tidemill.config.schedule import ScheduleConfig

TREND_STEPS = 4
"""Batches on either side of the comparison that says whether the reward improves."""


def may_begin(*, version: int, learned: int, in_flight: int, batch_groups: int, overcommit: int) -> int:
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
