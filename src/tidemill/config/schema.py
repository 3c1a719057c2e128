"""The configuration of a run: one section per concern, defaults that work, units in names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from tidemill.config.base import Config, refuse

Probability = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PYTHON_FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")


BUILT_IN_MODELS = ("smollm2-135m", "char")


class RunConfig(Config):
    name: str = "run"
    """Names the run in logs, reports and optional sinks."""
    dir: Path | None = None
    """The run directory; an existing one is resumed. Default: runs/<name>."""
    seed: int = Field(0, ge=0)
    """Seeds data order and sampling."""


class CharModelConfig(Config):
    """A character-level Llama built from a seed, for tests and benchmarks."""

    alphabet: str = "0123456789+-*=abcdefghijklmnopqrstuvwxyz .,?\n"
    """One token per character, after the special tokens (padding, end)."""
    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(4, ge=1)
    """Decoder layers."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide hidden_size."""
    context: int = Field(256, ge=8)
    """Longest sequence, in tokens."""
    seed: int = Field(0, ge=0)
    """Seeds the initial weights."""

    @model_validator(mode="after")
    def _buildable(self) -> CharModelConfig:
        faults = []
        if self.hidden_size % self.heads:
            faults.append(
                f"heads = {self.heads} does not divide hidden_size = {self.hidden_size}; make it a multiple of heads"
            )
        elif self.hidden_size // self.heads % 2:
            faults.append(
                f"hidden_size / heads = {self.hidden_size // self.heads} is odd and rotary positions need pairs; "
                "make it even"
            )
        if twice := "".join(sorted({char for char in self.alphabet if self.alphabet.count(char) > 1})):
            faults.append(f"alphabet repeats {twice!r}; name every character once")
        if not self.alphabet:
            faults.append("alphabet is empty; name the characters the task writes with")
        return refuse(faults, self)


class ModelConfig(Config):
    source: str = "smollm2-135m"
    """`smollm2-135m`, `char` (see model.char), a local Hugging Face folder, or a hub id."""
    revision: str | None = None
    """Hub revision; only for hub ids."""
    chat_template: bool = False
    """Wrap each prompt as a user message in the model's chat template."""
    char: CharModelConfig = CharModelConfig()

    @model_validator(mode="after")
    def _known_source(self) -> ModelConfig:
        faults = []
        if not self.source.strip():
            faults.append("source is empty; name a model (`tidemill model list` shows the built-in ones)")
        if self.source in BUILT_IN_MODELS and self.revision is not None:
            faults.append(f'revision is only for hub ids, and source is "{self.source}"; leave revision out')
        if self.source == "char" and self.chat_template:
            faults.append('the "char" model has no chat template; set chat_template = false')
        return refuse(faults, self)


class ArithmeticTask(Config):
    kind: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Any of + - * ; one is drawn per prompt."""
    digits: int = Field(1, ge=1, le=6)
    """Largest number of digits of an operand."""
    shots: int = Field(2, ge=0, le=16)
    """Worked examples before the question, the same for every prompt."""
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    """Share of the problems kept for evaluation; a + b and b + a always fall on the same side."""

    @model_validator(mode="after")
    def _known_operators(self) -> ArithmeticTask:
        faults = []
        if not self.operators:
            faults.append('operators is empty; name at least one of + - *, for example "+"')
        if unknown := "".join(sorted(set(self.operators) - set("+-*"))):
            faults.append(
                f"operators = {self.operators!r} holds {unknown!r}; only + - * are known, written without spaces"
            )
        return refuse(faults, self)


class ReasoningGymTask(Config):
    kind: Literal["reasoning_gym"]
    name: str
    """A reasoning-gym generator, for example `simple_equations`."""
    params: dict[str, bool | int | float | str] = {}
    """Passed to the generator."""
    train_size: int = Field(1000, ge=1)
    """Training prompts per epoch."""
    held_out_size: int = Field(100, ge=1)
    """Evaluation prompts, none of which is a training prompt."""
    system_prompt: str = ""
    """Put before every question."""


class JsonlTask(Config):
    kind: Literal["jsonl"]
    path: Path
    """One JSON object per line: `prompt` or `messages` (role and content each), and `answer`; the rest is metadata."""
    held_out_path: Path | None = None
    """Evaluation prompts; by default a share of `path`, chosen by content hash."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Share kept for evaluation when there is no held_out_path."""


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | JsonlTask, Field(discriminator="kind")]


class RewardConfig(Config):
    kind: Literal["exact", "numeric", "math_verify", "regex", "length", "task", "random", "python"]
    """`task` is the task's own checker (reasoning-gym); `random` is a control; `python` is `function` below."""
    weight: float = 1.0
    """The sample's reward is the weighted sum of all rewards."""
    pattern: str = ""
    """regex: the expression searched for in the completion."""
    target_tokens: int = Field(0, ge=0)
    """length: completion length that scores 1, falling off linearly to 0 at twice that or at none."""
    function: str = ""
    """python: `package.module:function` or `path/file.py:function`, taking (prompt, completion, answer, metadata)."""

    @model_validator(mode="after")
    def _complete(self) -> RewardConfig:
        faults = []
        if self.kind == "regex" and not self.pattern:
            faults.append('kind = "regex" needs a pattern; set pattern to the expression to search for')
        if self.kind == "length" and not self.target_tokens:
            faults.append('kind = "length" needs target_tokens; set it to the completion length that scores 1')
        if self.kind == "python" and not self.function:
            faults.append(
                'kind = "python" needs a function; set function = "package.module:function" or "file.py:function"'
            )
        for name, kind in (("pattern", "regex"), ("target_tokens", "length"), ("function", "python")):
            if getattr(self, name) and self.kind != kind:
                faults.append(
                    f'{name} is only for kind = "{kind}", and kind is "{self.kind}"; change kind or leave {name} out'
                )
        if self.function and not PYTHON_FUNCTION.fullmatch(self.function):
            faults.append(
                f'function = "{self.function}" names no function; write "package.module:function" or "file.py:function"'
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            faults.append(f"pattern {self.pattern!r} is not a regular expression ({error}); correct it")
        return refuse(faults, self)


class ScoringConfig(Config):
    rewards: tuple[RewardConfig, ...] = Field((RewardConfig(kind="exact"),), min_length=1)
    """Summed, each with its weight."""
    timeout_s: float = Field(10.0, gt=0)
    """A reward that takes longer is invalid for that sample."""
    concurrency: int = Field(8, ge=1)
    """Samples scored at once."""
    truncated: Literal["trained", "masked"] = "trained"
    """What a completion cut by max_new_tokens counts: like any other, or left out of loss and statistics."""


class SamplingConfig(Config):
    max_new_tokens: int = Field(64, ge=1)
    """Completion limit, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy (evaluation only)."""
    top_k: int = Field(0, ge=0)
    """0 keeps all tokens; training needs 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps all tokens; training needs 1."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay part of it."""


class EngineConfig(Config):
    slots: int = Field(64, ge=1)
    """Samples decoded at once."""
    context_tokens: int = Field(0, ge=0)
    """Longest prompt plus completion; 0 takes what the task needs, up to the model's own limit."""
    prefill_chunk_tokens: int = Field(512, ge=1)
    """Prompt tokens computed in one step beside the decoding samples."""
    batch_invariant: bool = False
    """Fixed shapes: bit-identical tokens whatever the neighbours, cuts and restarts; slower."""
    tick_s: float = Field(0.1, gt=0)
    """How often new tokens are flushed to the controller."""


class StaticPool(Config):
    kind: Literal["static"] = "static"
    workers: int = Field(0, ge=0)
    """Preemptible workers, there from the start; 0 generates everything on the reserved side."""


class TracePool(Config):
    kind: Literal["trace"]
    path: Path
    """A capacity trace: CSV lines `seconds,count`, or JSON `{"metadata": {"gap_seconds": …}, "data": [count, …]}`."""
    start_s: float = Field(0.0, ge=0)
    """Where in the trace the run begins, in seconds of the trace."""
    speed: float = Field(1.0, gt=0)
    """Seconds of the trace per second of the run."""
    max_workers: int = Field(8, ge=1)
    """Machines taken at most, whatever the trace offers."""
    notice_s: float = Field(0.0, ge=0)
    """Warning before each eviction, in seconds of the run; 0 evicts without a word."""
    seed: int = Field(0, ge=0)
    """Chooses which machine goes when the count falls."""


class SyntheticPool(Config):
    kind: Literal["synthetic"]
    workers: int = Field(2, ge=1)
    """Machines there are when none is away."""
    mean_time_to_eviction_s: float = Field(20.0, gt=0)
    """Of one machine; the times are exponential."""
    mean_time_to_return_s: float = Field(5.0, gt=0)
    """Until an evicted machine's place is filled again."""
    burst: float = Field(0.3, ge=0, lt=1)
    """Probability that an eviction takes the next machine along, and that one the next."""
    notice_s: float = Field(0.0, ge=0)
    """Warning before an eviction that gives one."""
    noticed: Probability = 0.0
    """Share of evictions that give notice."""
    seed: int = Field(0, ge=0)
    """Seeds the times and the victims."""


class RayPool(Config):
    kind: Literal["ray"]
    max_workers: int = Field(64, ge=1)
    """Workers held at most."""
    selector: dict[str, str] = {"ray.io/market-type": "spot"}
    """Labels of the nodes that preemptible workers may run on."""


PoolConfig = Annotated[StaticPool | TracePool | SyntheticPool | RayPool, Field(discriminator="kind")]


class FleetConfig(Config):
    """How preemptible workers are used. Where they come from is `pool`."""

    size: Literal["pool", "adaptive"] = "pool"
    """pool: every worker the pool offers. adaptive: as many as the balance of generation and training asks for."""
    seeding: bool = True
    """The reserved side generates too, at the start of a step and whenever no preemptible worker is there."""
    seed_window_s: float = Field(10.0, ge=0)
    """How long it does so in the first step; later windows adapt to who waited for whom."""
    window_gain: float = Field(3.0, gt=0)
    """Divides the imbalance (seconds the trainer waited minus seconds workers idled) by which the window moves."""
    queue_limit: int = Field(8, ge=1)
    """Samples queued at one worker beyond those it decodes; more wait with the controller."""
    max_moves: int = Field(2, ge=0)
    """Times one sample may be moved to even out the load; evictions do not count."""
    silence_s: float = Field(15.0, gt=0)
    """A worker that has not been heard of for so long loses its lease."""
    join_s: float = Field(300.0, gt=0)
    """A worker that is not generating so long after its lease began is given up."""
    hand_back_s: float = Field(1.0, ge=0)
    """Before the end of a notice period, when a worker that was warned hands its samples back."""
    probe_limit: float = Field(0.1, gt=0)
    """Largest mean difference between a worker's logprobs of the probe and the publisher's; beyond it the worker is
    quarantined."""
    reserved_usd_per_hour: float = Field(0.0, ge=0)
    """Price of the reserved side."""
    preemptible_usd_per_hour: float = Field(0.0, ge=0)
    """Price of one preemptible worker."""


class RayConfig(Config):
    """Only with `runtime = "ray"`."""

    address: str = ""
    """A running cluster's address; empty starts one on this machine, and stops it at the end."""
    reserved_selector: dict[str, str] = {}
    """Labels of the node that trains; empty takes any node that preemptible workers may not use."""
    trainer_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for the trainer."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for the trainer."""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each worker; also its threads inside one operation."""
    worker_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for each worker."""


class BatchConfig(Config):
    prompts: int = Field(8, ge=1)
    """Groups learned from per published version."""
    group_size: int = Field(8, ge=2)
    """Samples per prompt."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch over the batch; must divide `prompts`."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    microbatch_tokens: int = Field(2048, ge=1)
    """Packed tokens (shared prefixes once) per forward and backward; a larger group is split by samples."""
    order: Literal["canonical", "arrival"] = "canonical"
    """canonical: fixed microbatches, bit-identical weights for a seed. arrival: starts earliest."""


class AlgorithmConfig(Config):
    advantage: Literal["grpo"] = "grpo"
    """How rewards become advantages."""
    loss: Literal["ppo_clip"] = "ppo_clip"
    """The policy objective."""
    normalize: Literal["sample", "token"] = "sample"
    """sample: mean over a sample's tokens, then over samples (GRPO). token: mean over the batch's tokens (DAPO)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Importance ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.2, gt=0)
    """Importance ratios above 1 + clip_high are clipped."""
    dual_clip: float | None = Field(None, gt=1)
    """Floor c·A on the objective where the advantage is negative; none by default."""
    kl_beta: float = Field(0.0, ge=0)
    """Weight of the k3 KL estimate to the reference (the initial model); 0 keeps no reference copy."""
    kl_stop: float | None = Field(None, gt=0)
    """Stop the update's remaining epochs and minibatches when approximate KL passes this."""


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
    """After warm-up, down to min_learning_rate_ratio at the last step."""
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


class EvalConfig(Config):
    every_steps: int = Field(5, ge=0)
    """Evaluate on held-out prompts every so many steps, besides before and after; 0 only before and after."""
    prompts: int = Field(64, ge=1)
    """Held-out prompts, at most; fewer when the task has fewer."""
    max_new_tokens: int = Field(0, ge=0)
    """Completion limit in evaluation; 0 takes sampling.max_new_tokens."""


class CheckpointConfig(Config):
    every_steps: int = Field(10, ge=0)
    """Write a checkpoint every so many steps, besides at the end; 0 only at the end."""
    keep_last: int = Field(2, ge=1)
    """Older ones are deleted once a newer is durable."""
    keep_best: bool = True
    """Also keep the one with the best held-out accuracy."""


class TelemetryConfig(Config):
    live: bool = True
    """A live view when standard error is a terminal, plain lines otherwise."""
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Besides metrics.jsonl; each needs its extra installed."""
    samples_per_step: int = Field(0, ge=0)
    """Samples written per step; 0 writes all."""


class RunSpec(Config):
    """A whole run."""

    runtime: Literal["inprocess", "ray"] = "inprocess"
    """inprocess: one process, preemptible workers simulated in it. ray: workers and trainer are Ray actors, here or on
    a cluster."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = ArithmeticTask()
    scoring: ScoringConfig = ScoringConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = StaticPool()
    fleet: FleetConfig = FleetConfig()
    ray: RayConfig = RayConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def directory(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> RunSpec:
        faults = []
        if self.batch.prompts % self.batch.minibatches:
            faults.append(
                f"batch.minibatches = {self.batch.minibatches} does not divide batch.prompts = {self.batch.prompts}; "
                "make prompts a multiple of minibatches"
            )
        if not self.fleet.seeding and self.pool.kind == "static" and not self.pool.workers:
            faults.append(
                "fleet.seeding = false and pool.workers = 0 leave nobody to generate; allow seeding or add workers"
            )
        if self.pool.kind == "ray" and self.runtime != "ray":
            faults.append(f'pool.kind = "ray" needs runtime = "ray", and runtime is "{self.runtime}"; set one of them')
        if self.task.kind != "reasoning_gym" and any(reward.kind == "task" for reward in self.scoring.rewards):
            faults.append(
                f'scoring.rewards has kind = "task", and task.kind = "{self.task.kind}" brings no checker of its own; '
                'use "exact" or "numeric" (only reasoning_gym brings one)'
            )
        context = self.engine.context_tokens
        for name, limit in (
            ("sampling.max_new_tokens", self.sampling.max_new_tokens),
            ("eval.max_new_tokens", self.eval.max_new_tokens),
        ):
            if context and limit >= context:
                faults.append(
                    f"{name} = {limit} leaves no room for a prompt in engine.context_tokens = {context}; "
                    "raise context_tokens, or set it to 0 to take what the task needs"
                )
        if info.context is not None:
            # The loader collects these, to show them together with what it finds itself.
            info.context["inconsistent"].extend(faults)
            return self
        return refuse(faults, self)
