"""How far generation may run ahead of training, and what becomes of what is under way when new weights come."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse


class ScheduleConfig(Config):
    max_policy_lag: int = Field(0, ge=0)
    """Newest policy version minus the oldest one a trained token came from: 0 generates strictly on policy, 1 generates
    the next batch while this one is learned from, more lets generation run further ahead."""
    overcommit: Annotated[int, Field(ge=0)] | Literal["adaptive"] | None = None
    """Groups under way beyond those of the batch that is due; at most max_policy_lag times batch.prompts, which is also
    what is taken when nothing is set. adaptive: more while the reward improves, fewer when it does not."""
    fresh_fraction: float = Field(0.0, ge=0, le=1)
    """At least this share of each batch's groups is begun under the very weights it is learned with; what is left over
    for a later batch is bounded accordingly. 0.5 renews half of every batch."""
    membership: Literal["planned", "first_finished"] = "planned"
    """planned: each batch has the prompts of its step. first_finished: a batch is the groups that are finished first,
    and stragglers go into a later one."""
    unfinished: Literal["continue", "finish", "restart", "wait"] = "continue"
    """What a sample under way does when new weights are published: goes on under them, is finished under those it began
    with (its worker takes no new samples until then; an evaluation calls it back all the same), or begins again. wait:
    the publish waits until every sample under way is finished and scored. With membership = "planned" the version that
    makes a sample then does not depend on timing, so evictions and kills do not change what is learned at any lag."""
    on_lag_limit: Literal["wait", "restart", "drop"] = "wait"
    """A group that would grow older than max_policy_lag: the batch waits for it, it begins again, or it is given up
    (which favours short completions, and is counted)."""
    max_redraws: int = Field(3, ge=0)
    """With algorithm.dynamic_sampling: batches' worth of groups without signal replaced in one step, at most; beyond
    that they are taken as they are."""

    def most_left_over(self, batch_groups: int) -> int:
        """Groups of B that may be under way beyond the due batch: when new weights come they are what later batches
        have of older ones."""
        if not isinstance(self.overcommit, int):
            renewed = math.ceil(self.fresh_fraction * batch_groups)
            most = self.max_policy_lag * batch_groups
            return min(most, batch_groups - renewed) if renewed else most
        return self.overcommit

    @property
    def one_version(self) -> bool:
        """Whether the newest version alone makes every sample: nothing is under way when it is published."""
        return self.max_policy_lag == 0 or self.unfinished == "wait"

    @model_validator(mode="after")
    def _possible(self) -> ScheduleConfig:
        faults = []
        if self.max_policy_lag == 0 and self.overcommit:
            faults.append(
                f"overcommit = {self.overcommit!r} leaves groups for a later batch, and max_policy_lag = 0 allows none "
                "to be older than its batch; raise max_policy_lag, or leave overcommit out"
            )
        if self.fresh_fraction > 0 and isinstance(self.overcommit, int):
            faults.append(
                f"overcommit = {self.overcommit} and fresh_fraction = {self.fresh_fraction:g} both say how many groups "
                'are left over for a later batch; leave one of them out, or set overcommit = "adaptive"'
            )
        return refuse(faults, self)
