"""The configuration of a run: one section per concern, defaults that work, units in names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, model_validator

from tidemill.config.algorithm import AlgorithmConfig, CriticConfig
from tidemill.config.base import Config, FolderName, OutputFolder, Seed, refuse
from tidemill.config.learning import BatchConfig, OptimizerConfig, ScheduleConfig, TrainerConfig
from tidemill.config.model import ModelConfig, PlacementConfig, ReadingConfig
from tidemill.config.pool import FleetConfig, PoolConfig, RayConfig, SimulationConfig, StaticPool
from tidemill.config.supervised import (
    DataConfig,
    DataGenerationConfig,
    ExportConfig,
    PreferenceConfig,
    RewardModelConfig,
    SupervisedConfig,
)
from tidemill.config.task import ArithmeticTask, ScoringConfig, TaskConfig


class RunConfig(Config):
    name: FolderName = "run"
    """Names the run in logs, reports and optional sinks, and its folder below runs/."""
    dir: OutputFolder = None
    """The run directory; an existing one is resumed. Default: runs/<name>."""
    seed: Seed = 0
    """Seeds data order and sampling."""


class SamplingConfig(Config):
    max_new_tokens: int = Field(64, ge=1)
    """Completion limit, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy (evaluation only)."""
    top_k: int = Field(0, ge=0)
    """0 keeps all tokens; training needs 0."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1 keeps all tokens; training needs 1."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion; they stay part of it."""


class EngineConfig(Config):
    slots: int = Field(64, ge=1)
    """Samples decoded at once."""
    context_tokens: int = Field(0, ge=0)
    """Longest prompt plus completion; 0 takes what the task needs, up to the model's own limit."""
    prefill_chunk_tokens: int = Field(512, ge=1)
    """Prompt tokens computed in one step beside the decoding samples."""
    batch_invariant: bool = False
    """Fixed shapes: bit-identical tokens whatever the neighbours, cuts and restarts; slower. Reward models then score
    each sample alone."""
    tick_s: float = Field(0.1, gt=0)
    """How often new tokens are flushed to the controller."""


class EvalConfig(Config):
    every_steps: int = Field(5, ge=0)
    """Evaluate on held-out prompts every so many steps, besides before and after; 0 only before and after."""
    prompts: int = Field(64, ge=1)
    """Held-out prompts, at most; fewer when the task has fewer."""
    max_new_tokens: int = Field(0, ge=0)
    """Completion limit in evaluation; 0 takes sampling.max_new_tokens."""
    samples_per_prompt: int = Field(0, ge=0)
    """`tidemill eval` and stages of kind eval draw so many samples of each prompt as `sampling` says, for pass@k,
    besides the greedy one; 0 draws none. A run in progress never draws any: it is evaluated greedily, whatever this and
    sampling.temperature say. `tidemill eval` measures its checkpoints, too."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of pass@k, at most samples_per_prompt; by default its powers of 2."""
    compare_with: str | None = None
    """Stages of kind eval: another model, as model.source, that is asked the same; its figures are told beside this
    one's, with what chance would make of the difference."""

    @property
    def ks(self) -> tuple[int, ...]:
        """What k pass@k is told for, ascending."""
        powers = (2**power for power in range(self.samples_per_prompt.bit_length()))
        return tuple(sorted(set(self.pass_at or powers)))

    @model_validator(mode="after")
    def _enough_samples(self) -> EvalConfig:
        faults = []
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            faults.append(
                f"pass_at holds {max(self.pass_at)}, and samples_per_prompt = {self.samples_per_prompt} draws fewer; "
                f"raise samples_per_prompt to at least {max(self.pass_at)}"
            )
        return refuse(faults, self)


class CheckpointConfig(Config):
    every_steps: int = Field(10, ge=0)
    """Write a checkpoint every so many steps, besides at the end; 0 only at the end."""
    keep_last: int = Field(2, ge=1)
    """Older ones are deleted once a newer is durable."""
    keep_best: bool = True
    """Also keep the one with the highest mean reward on held-out prompts (`eval/reward_mean`)."""


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
    data: DataConfig = DataConfig()
    scoring: ScoringConfig = ScoringConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = StaticPool()
    fleet: FleetConfig = FleetConfig()
    ray: RayConfig = RayConfig()
    placement: PlacementConfig = PlacementConfig()
    reading: ReadingConfig = ReadingConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    preference: PreferenceConfig = PreferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    data_generation: DataGenerationConfig = DataGenerationConfig()
    export: ExportConfig = ExportConfig()
    simulation: SimulationConfig = SimulationConfig()

    @property
    def directory(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy over the run: those in which its critic learns alone are none of them."""
        batch = self.batch
        return max(0, self.trainer.steps * batch.minibatches * batch.epochs - self.algorithm.critic_warmup_steps)

    @property
    def corrects_each_publish(self) -> bool:
        """Whether a token's weight depends on what every version published since it was made says of it."""
        algorithm = self.algorithm
        acts = algorithm.correction.kind == "mu_step" and algorithm.proximal != "rollout"
        return acts and self.schedule.max_policy_lag > 0

    def _faults_of_learning(self) -> list[str]:
        faults = []
        if self.batch.prompts % self.batch.minibatches:
            faults.append(
                f"batch.minibatches = {self.batch.minibatches} does not divide batch.prompts = {self.batch.prompts}; "
                "make prompts a multiple of minibatches"
            )
        ahead = self.schedule.max_policy_lag * self.batch.prompts
        if isinstance(self.schedule.overcommit, int) and self.schedule.overcommit > ahead:
            faults.append(
                f"schedule.overcommit = {self.schedule.overcommit} lets groups grow older than "
                f"schedule.max_policy_lag = {self.schedule.max_policy_lag}; at most {ahead} "
                "(max_policy_lag times batch.prompts), or a larger lag"
            )
        if self.algorithm.dynamic_sampling and self.batch.group_size == 1:
            faults.append(
                "algorithm.dynamic_sampling replaces groups whose rewards are all equal, and with batch.group_size = 1 "
                "all are; draw more samples per prompt, or turn it off"
            )
        if self.batch.group_size < 2 and self.algorithm.compares_siblings:
            faults.append(
                f'batch.group_size = 1 and algorithm.advantage = "{self.algorithm.advantage}" compares the samples of '
                'a group; set group_size to 2 or more, or advantage = "gae" or "reinforce_pp"'
            )
        if self.algorithm.overlong_buffer_tokens > self.sampling.max_new_tokens:
            faults.append(
                f"algorithm.overlong_buffer_tokens = {self.algorithm.overlong_buffer_tokens} is more than "
                f"sampling.max_new_tokens = {self.sampling.max_new_tokens}, so that every completion would be "
                "penalised; lower it, to about a fifth of max_new_tokens"
            )
        return faults

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> RunSpec:
        faults = self._faults_of_learning()
        if not self.fleet.seeding and self.pool.kind == "static" and not self.pool.workers:
            faults.append(
                "fleet.seeding = false and pool.workers = 0 leave nobody to generate; allow seeding or add workers"
            )
        if self.runtime == "ray" and self.fleet.heartbeat_timeout_s < 2 * self.engine.tick_s:
            faults.append(
                f"fleet.heartbeat_timeout_s = {self.fleet.heartbeat_timeout_s:g} is less than two ticks of "
                f"engine.tick_s = {self.engine.tick_s:g}, and a worker reports once a tick; raise it or lower tick_s"
            )
        if self.pool.kind == "ray" and self.runtime != "ray":
            faults.append(f'pool.kind = "ray" needs runtime = "ray", and runtime is "{self.runtime}"; set one of them')
        faults += self.placement.faults(self.runtime, critic=self.critic.kind)
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
