"""How samples become new weights: batch, optimizer, trainer, and how far generation may run ahead."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.config.base import Config, Probability, refuse

Decay = Annotated[float, Field(ge=0, lt=1)]


class BatchConfig(Config):
    prompts: int = Field(8, ge=1)
    """Groups learned from per published version."""
    group_size: int = Field(8, ge=1)
    """Samples per prompt; 1 only for advantages that do not compare the samples of a group."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch over the batch; must divide `prompts`."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    microbatch_tokens: int = Field(2048, ge=1)
    """Packed tokens (shared prefixes once) per forward and backward; a larger group is split by samples."""
    order: Literal["canonical", "arrival"] = "canonical"
    """canonical: fixed microbatches, bit-identical weights for a seed. arrival: starts earliest."""


class OptimizerConfig(Config):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW moment decay."""
    eps: float = Field(1e-8, gt=0)
    """AdamW denominator floor."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, on matrices only."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, down to min_learning_rate_ratio at the last step; steps of the critic alone do not count."""
    min_learning_rate_ratio: Probability = 0.1
    """Final learning rate as a share of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm is clipped to this."""


class TrainerConfig(Config):
    steps: int = Field(20, ge=1)
    """Batches to learn from (published versions)."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 autocasts the forward and backward; weights and optimizer stay fp32. auto: bf16 on a GPU, fp32 else."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU when there is one."""
    threads: int = Field(0, ge=0)
    """CPU threads of one operation; 0 measures one against all when a run begins and keeps the faster. Give a number
    where two runs must agree bit for bit: another number may round sums differently."""
    logits_budget_mb: int = Field(256, ge=1)
    """Largest [tokens, vocabulary] block held at once; beyond it the vocabulary logprobs are computed in chunks."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass to save memory."""


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
