"""Optimization: batches, schedule, optimizer and trainer, and the objectives of supervised and preference stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from tidemill.config.base import (
    NEUTRAL,
    RESUMABLE,
    RUNS_AHEAD,
    TRAINING_ONLY,
    ActiveIf,
    Config,
    NameOrFunction,
    Probability,
)

Decay = Annotated[float, Field(ge=0, lt=1)]
Checkpointing: TypeAlias = bool | Literal["selective", "auto"]
LEAST_MICROBATCH = 2048
WAITS = ActiveIf(lambda spec: spec.schedule.tail == "wait", 'schedule.tail = "batching" trains groups by rank')
TAIL_BATCHING = ActiveIf(lambda spec: spec.schedule.tail == "batching", 'schedule.tail is not "batching"')
FALLS = ActiveIf(lambda spec: spec.optimizer.schedule != "constant", 'optimizer.schedule is "constant"')
REACHES_LAG_LIMIT = ActiveIf(
    lambda spec: spec.schedule.max_policy_lag > 0 and spec.schedule.membership == "first_finished",
    'only with schedule.max_policy_lag above 0 and membership = "first_finished"',
)
CONTINUES_SAMPLES = ActiveIf(
    lambda spec: spec.schedule.max_policy_lag > 0 and spec.schedule.unfinished == "continue",
    'only with schedule.max_policy_lag above 0 and unfinished = "continue"',
)


class BatchConfig(Config):
    prompts: int = Field(8, ge=1)
    """Groups per batch. The policy is published once per batch."""
    group_size: int = Field(8, ge=1)
    """Samples per prompt. 1 only with advantages that do not compare the samples of a group."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch over the batch; must divide `prompts`."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    sampler: Annotated[str, NameOrFunction("prompt_sampler", ("",))] = ""
    """Function that selects the prompts of each step (a curriculum): `path/file.py:function`. It takes any of step,
    seed, count, rows and results, and returns `prompts` indices of rows. Default: a new shuffle in every epoch."""
    microbatch_tokens: int = Field(0, ge=0)
    """Tokens of one forward and backward pass, shared prefixes counted once. A larger group is split by samples. 0:
    2048 on a CPU; on a GPU 16384, 8192, 4096 or 2048, by its memory and the memory plan."""
    order: Annotated[Literal["canonical", "arrival"], WAITS] = "canonical"
    """canonical: fixed microbatches, so that a seed gives bit-identical weights. arrival: samples are packed in the
    order in which they finish, so that training starts earlier."""

    @property
    def microbatch_budget(self) -> int:
        """`microbatch_tokens`, or the least that 0 stands for."""
        return self.microbatch_tokens or LEAST_MICROBATCH


class OptimizerConfig(Config):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW betas."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay, applied to matrices only."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, down to min_learning_rate_ratio at the last step of the schedule. Optimizer
    steps that train only the critic do not count; those that batches without signal leave out do."""
    schedule_steps: Annotated[int, RESUMABLE, FALLS] = Field(0, ge=0)
    """Optimizer steps of a falling schedule; later ones stay at the minimum. 0: those of the run as it was first
    started, so that more trainer.steps do not change the learning rate of steps already planned."""
    min_learning_rate_ratio: Annotated[Probability, FALLS] = 0.1
    """Final learning rate as a fraction of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Maximum global gradient norm; larger gradients are clipped."""

    def schedule_remark(self, steps: int) -> str | None:
        """A sentence if a falling schedule ends before or after a run of `steps` optimizer steps."""
        length = self.schedule_steps or steps
        if self.schedule == "constant" or length == steps:
            return None
        if length > steps:
            return (
                f"the run ends after {steps} of the {length} optimizer steps of its learning-rate schedule "
                "(optimizer.schedule_steps), above the minimum"
            )
        minimum = self.learning_rate * self.min_learning_rate_ratio
        return (
            f"the learning-rate schedule has {length} optimizer steps (optimizer.schedule_steps): steps {length + 1} "
            f"to {steps} of the run stay at the minimum, {minimum:g}"
        )


class TrainerConfig(Config):
    steps: Annotated[int, RESUMABLE, TRAINING_ONLY] = Field(20, ge=1)
    """Number of batches to train on; each publishes one policy version."""
    hours: Annotated[float, NEUTRAL] = Field(0.0, ge=0)
    """Wall time of the command after which it ends with a checkpoint and exit code 0, in hours; 0: no limit. The same
    command resumes the run. The stages of a recipe count together."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: forward and backward under autocast; weights and optimizer stay fp32. auto: bf16 on a GPU, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: Annotated[int, NEUTRAL] = Field(0, ge=0)
    """CPU threads of one operation. 0: measure one thread against all at the start and use the faster. Set a number
    when two runs must agree bit for bit, because the number of threads affects rounding."""
    logits_budget_mb: Annotated[int, TRAINING_ONLY] = Field(0, ge=0)
    """Maximum size of a [tokens, vocabulary] block in MB; larger ones are computed in chunks. 0: 256 on a CPU, 2048 on
    a GPU."""
    activation_checkpointing: Annotated[Checkpointing, TRAINING_ONLY] = "auto"
    """Recompute activations in the backward pass to save memory: true, all of a layer; selective, those between the
    matrix products of an MLP. auto: false on a CPU; on a GPU the first of false, selective and true that fits its
    memory."""
    shards: Annotated[int, RESUMABLE, TRAINING_ONLY] = Field(1, ge=1)
    """Number of processes that share weights, gradients, optimizer state and microbatches (FSDP2); each needs
    ray.trainer_cpus and ray.trainer_gpus. More than 1 needs runtime = "ray"."""
    offload: Annotated[Literal["none", "optimizer"], TRAINING_ONLY] = "none"
    """optimizer: keep weights, gradients and optimizer state of a shard in host memory, and update them there."""

    def recomputes(self, *, on_gpu: bool) -> bool | Literal["selective"]:
        """`activation_checkpointing`, or what "auto" stands for where memory is short."""
        return on_gpu if self.activation_checkpointing == "auto" else self.activation_checkpointing

    def logits_bytes(self, *, on_gpu: bool) -> int:
        """`logits_budget_mb` in bytes."""
        return (self.logits_budget_mb or (2048 if on_gpu else 256)) << 20


class ScheduleConfig(Config):
    max_policy_lag: int = Field(0, ge=0)
    """Maximum age of a trained token, in policy versions. 0: strictly on policy. 1: the next batch is generated while
    this one is trained on. Larger values allow generation to run further ahead."""
    overcommit: Annotated[int, Field(ge=0)] | Literal["adaptive"] | None = None
    """Groups in flight beyond those of the next batch, at most max_policy_lag × batch.prompts, which is the default.
    adaptive: more while the reward improves, fewer while it does not."""
    fresh_fraction: Annotated[float, RUNS_AHEAD] = Field(0.0, ge=0, le=1)
    """Minimum fraction of each batch that is started under the policy version the batch is trained with (partial
    refresh); limits overcommit accordingly."""
    membership: Annotated[Literal["planned", "first_finished"], RUNS_AHEAD] = "planned"
    """planned: a batch contains the prompts planned for its step. first_finished: a batch contains the groups that
    finish first, and slower groups go into a later batch."""
    unfinished: Annotated[Literal["continue", "finish", "restart", "wait"], RUNS_AHEAD] = "continue"
    """What happens to samples in flight when new weights are published. continue: they continue under the new weights.
    finish: they finish under the old ones; their worker takes no new samples until then. restart: they start again.
    wait: publishing waits until all samples in flight are finished and scored. With wait and membership = "planned",
    timing does not affect which version generates a sample, so evictions do not change the result at any lag."""
    on_lag_limit: Annotated[Literal["wait", "restart", "drop"], REACHES_LAG_LIMIT] = "wait"
    """What happens to a group that would exceed max_policy_lag. wait: the batch waits for it. restart: it is generated
    again. drop: it is discarded and counted, which biases training towards short completions."""
    tail: Literal["wait", "batching"] = "wait"
    """The end of an on-policy batch. wait: for its longest sample. batching: rounds start more prompts than the batch
    has; the groups that end first are trained on, and the others later in rounds of their own. Every prompt is trained
    on as often. What ends first is decided by lengths, not by time, so evictions do not change the result."""
    oversample: Annotated[float, TAIL_BATCHING] = Field(1.25, ge=1)
    """Prompts of a short round, as a multiple of batch.prompts."""
    oversample_group: Annotated[int, TAIL_BATCHING] = Field(0, ge=0)
    """Additional samples per prompt; the batch.group_size that end first are kept, which favours short completions."""
    nominal_slots: Annotated[int | None, TAIL_BATCHING] = Field(None, ge=0)
    """Samples that are generated at once in the schedule by which groups are ranked; best about as many as in the run.
    0: unlimited, so that groups are ranked by their longest sample. Default: engine.slots of each worker that the pool
    may have."""

    @property
    def extra_samples(self) -> int:
        return self.oversample_group if self.tail == "batching" else 0

    keep_cache: Annotated[bool, CONTINUES_SAMPLES] = False
    """A sample that continues under new weights keeps its keys and values (KV cache) instead of computing them again.
    Its next tokens are sampled by the new weights from keys and values of older ones. Their recorded logprobs are of
    that distribution, so algorithm.correction corrects for it; mismatch_kl_kept_cache measures it."""

    def most_left_over(self, batch_groups: int) -> int:
        """Maximum number of groups in flight beyond the next batch, where a batch has `batch_groups` groups."""
        if isinstance(self.overcommit, int):
            return self.overcommit
        fresh, most = math.ceil(self.fresh_fraction * batch_groups), self.max_policy_lag * batch_groups
        return min(most, batch_groups - fresh) if fresh else most

    @property
    def one_version(self) -> bool:
        """Whether every sample is generated by a single version: no sample is in flight at a publish."""
        return self.max_policy_lag == 0 or self.unfinished == "wait"

    @property
    def keeps_cache(self) -> bool:
        """Whether engines keep the caches of running samples when they load a version."""
        return self.keep_cache and self.max_policy_lag > 0 and self.unfinished == "continue"

    def issues(self) -> Iterator[str]:
        if self.max_policy_lag == 0 and self.overcommit:
            yield (
                f"overcommit = {self.overcommit!r} needs max_policy_lag above 0: groups beyond the next batch would be "
                "trained on by a later version; raise max_policy_lag, or leave overcommit out"
            )
        if self.tail == "batching" and self.max_policy_lag:
            yield (
                f'tail = "batching" and max_policy_lag = {self.max_policy_lag}: rounds end on policy; set the lag to '
                '0, or tail = "wait"'
            )
        elif self.tail == "batching" and self.unfinished != "continue":
            yield f'tail = "batching" and unfinished = "{self.unfinished}": no sample outlives its round; leave one out'
        if self.fresh_fraction > 0 and isinstance(self.overcommit, int):
            yield (
                f"overcommit = {self.overcommit} and fresh_fraction = {self.fresh_fraction:g} both limit the groups "
                'in flight; leave one of them out, or set overcommit = "adaptive"'
            )


class SupervisedConfig(Config):
    epochs: Annotated[int, RESUMABLE] = Field(1, ge=0)
    """Passes over the training examples; 0: train for trainer.steps optimizer steps."""
    minibatch_tokens: int = Field(8192, ge=1)
    """Tokens per optimizer step, shared prefixes counted once."""
    microbatch_tokens: int = Field(2048, ge=1)
    """Tokens per forward and backward pass, shared prefixes counted once; a larger example runs alone."""
    evaluate_every_steps: int = Field(10, ge=0)
    """Optimizer steps between evaluations on the held-out examples; 0: evaluate only before and after training."""
    patience: int = Field(0, ge=0)
    """Stop after this many evaluations in a row without a lower held-out loss, and write a checkpoint at each new
    minimum; 0: no early stopping."""

    def issues(self) -> Iterator[str]:
        if self.microbatch_tokens > self.minibatch_tokens:
            yield (
                f"microbatch_tokens = {self.microbatch_tokens} is more than minibatch_tokens = "
                f"{self.minibatch_tokens}; lower the first or raise the second"
            )
        if self.patience and not self.evaluate_every_steps:
            yield f"patience = {self.patience} needs evaluations; set evaluate_every_steps above 0"


class RewardModelConfig(Config):
    centring: float = Field(0.01, ge=0)
    """Weight of (chosen + rejected)² in the loss, which keeps the mean score near 0."""


class PreferenceConfig(Config):
    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: logistic loss on summed logprobs. ipo: squared loss on logprobs averaged over a completion's tokens."""
    beta: float = Field(0.1, gt=0)
    """Strength of the constraint to the initial model."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: assumed fraction of pairs with swapped labels."""

    def issues(self) -> Iterator[str]:
        if self.loss == "ipo" and self.label_smoothing:
            yield 'label_smoothing is only for loss = "dpo"; leave it out'
