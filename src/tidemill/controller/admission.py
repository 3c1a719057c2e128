"""How many groups may be begun, and which must not be left out of a batch: the arithmetic of the policy lag.

Versions rise by one per batch of B groups. A group is begun under some version and learned from when version V is the
trainer's; its lag is V minus the oldest version that made one of its tokens. The limit is kept from both ends: what is
begun (`may_begin`), and by when it must be learned from (`latest_step`).
"""

from __future__ import annotations


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
