"""How far generation may run ahead of training, and what becomes of what is under way when new weights come."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, refuse


class ScheduleConfig(Config):
    max_policy_lag: int = Field(0, ge=0)
    """Newest policy version minus the oldest one a trained token came from: 0 generates strictly on policy, 1 generates
    the next batch while this one is learned from, more lets generation run further ahead."""
    overcommit: int | None = Field(None, ge=0)
    """Groups under way beyond those of the batch that is due; at most max_policy_lag times batch.prompts, which is also
    what is taken when nothing is set."""
    membership: Literal["planned", "first_finished"] = "planned"
    """planned: each batch has the prompts of its step. first_finished: a batch is the groups that are finished first,
    and stragglers go into a later one."""
    unfinished: Literal["continue", "finish", "restart"] = "continue"
    """What a sample under way does when new weights are published: goes on under them, is finished under those it began
    with (its worker takes no new samples until then), or begins again."""
    on_lag_limit: Literal["wait", "restart", "drop"] = "wait"
    """A group that would grow older than max_policy_lag: the batch waits for it, it begins again, or it is given up
    (which favours short completions, and is counted)."""
    max_redraws: int = Field(3, ge=0)
    """With algorithm.dynamic_sampling: batches' worth of groups without signal replaced in one step, at most; beyond
    that they are taken as they are."""

    @model_validator(mode="after")
    def _possible(self) -> ScheduleConfig:
        faults = []
        if self.max_policy_lag == 0 and self.overcommit:
            faults.append(
                f"overcommit = {self.overcommit} leaves groups for a later batch, and max_policy_lag = 0 allows none "
                "to be older than its batch; raise max_policy_lag, or leave overcommit out"
            )
        return refuse(faults, self)
