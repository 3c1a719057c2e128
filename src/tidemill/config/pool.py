"""Where preemptible workers come from, how they are used, and which machines a simulation has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from tidemill.config.base import Config, Probability, refuse

SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0


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
    hand_over: Literal["window", "balance"] = "window"
    """When the reserved side stops generating in a step. window: after a time that adapts from step to step. balance:
    then, too, but not before preemptible workers can be expected to finish the rest by the time the trainer has learned
    from all; only at lag 0, and not before the first step has shown how fast both sides are."""
    seed_window_s: float = Field(10.0, ge=0)
    """How long it does so in the first step; later windows adapt to who waited for whom."""
    window_gain: float = Field(3.0, gt=0)
    """Divides the imbalance (seconds the trainer waited minus seconds workers idled) by which the window moves."""
    window_floor_s: float = Field(0.0, ge=0)
    """It never gets shorter than this by adapting."""
    remember_windows: bool = True
    """A window is remembered by the number of preemptible workers; else only the last one counts."""
    known_windows: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """What earlier runs found: seconds with one worker, with two, and so on; the memory begins with them."""
    queue_limit: int = Field(8, ge=1)
    """Samples queued at one worker beyond those it decodes; more wait with the controller."""
    max_moves: int = Field(2, ge=0)
    """Times one sample may be moved to even out the load; evictions do not count."""
    tail_fraction: float = Field(0.0, ge=0, lt=1)
    """When no more than this share of the samples under way is unfinished, they go on together on as few workers as can
    decode them at once, the reserved engine last, and the others are free; 0 for never, 0.2 as RLHFuse does."""
    heartbeat_timeout_s: float = Field(15.0, gt=0)
    """A worker that has not been heard of for so long loses its lease; only where workers are processes. An idle one
    speaks four times as often, and at least once a second."""
    join_timeout_s: float = Field(300.0, gt=0)
    """A worker that is not generating so long after its lease began is given up."""
    drain_margin_s: float = Field(1.0, ge=0)
    """Before the end of a notice period, when a worker that was warned hands its samples back."""
    probe_tolerance: float = Field(0.1, gt=0)
    """Largest mean difference between a worker's logprobs of the probe and the publisher's; beyond it the worker is
    quarantined."""
    reserved_usd_per_hour: float = Field(0.0, ge=0)
    """Price of the reserved side."""
    preemptible_usd_per_hour: float = Field(0.0, ge=0)
    """Price of one preemptible worker."""

    @property
    def heartbeat_s(self) -> float:
        """An idle worker says so often that it is there."""
        return min(1.0, self.heartbeat_timeout_s / 4)

    @model_validator(mode="after")
    def _possible(self) -> FleetConfig:
        faults = []
        if self.heartbeat_timeout_s < SHORTEST_HEARTBEAT_TIMEOUT_S:
            faults.append(
                f"heartbeat_timeout_s = {self.heartbeat_timeout_s:g} ends leases of healthy workers, which send "
                f"nothing while they load weights; set it to {SHORTEST_HEARTBEAT_TIMEOUT_S:g} or more"
            )
        return refuse(faults, self)


class RayConfig(Config):
    """Only with `runtime = "ray"`."""

    address: str = ""
    """A running cluster's address; empty starts one on this machine, and stops it at the end."""
    reserved_selector: dict[str, str] = {}
    """Labels of the node that trains; empty takes any node that preemptible workers may not use."""
    trainer_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for the trainer."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for the trainer. Where the cluster is started here, this machine must have them."""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each worker; also its threads inside one operation."""
    worker_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for each worker."""


ScheduleName: TypeAlias = Literal[
    "colocated", "disaggregated", "one_step_off", "bounded_staleness", "streamed", "rlboost", "tidemill"
]


class SimulationConfig(Config):
    """Batch, limits, pool, prices, steps and seed are the run's own."""

    schedules: tuple[ScheduleName, ...] = Field(
        ("colocated", "disaggregated", "one_step_off", "bounded_staleness", "streamed", "rlboost", "tidemill"),
        min_length=1,
    )
    """Compared side by side on the same samples and machines. tidemill: the recipe's own [schedule] and [pool];
    rlboost: the same [pool]; the others have the reserved machines only, and are what their names say."""
    staleness: int = Field(4, ge=1)
    """Lag of bounded_staleness."""
    parameters: float | None = Field(None, ge=1)
    """Of the model, whose shape is then assumed; or give a model."""
    model: Path | None = None
    """A Hugging Face folder or its config.json: the model's shape."""
    catalog: Path | None = None
    """GPUs and machines of one's own, beside those of `tidemill plan catalog`."""
    machine: str = "rlboost-8xh100"
    """Each reserved machine."""
    machines: int = Field(1, ge=1)
    """Reserved machines. Where fleet.reserved_usd_per_hour is 0, they cost what the catalogue says."""
    worker_machine: str = "rlboost-2xh100"
    """Each preemptible worker's machine; priced in the same way."""
    engine_gpus: int = Field(1, ge=1)
    """GPUs that one engine is spread over, all of one machine, which has as many engines as fit."""
    engine_dtype: Literal["bf16", "fp8"] = "bf16"
    """Of an engine's weights and arithmetic."""
    boot_s: float = Field(60.0, ge=0)
    """From a machine to an engine that waits for weights."""
    changed_weights: Probability = 0.03
    """Share of the weights that a step changes, as bf16 has them; with the difference tidemill's workers catch up."""
    prompt_tokens: int = Field(512, ge=1)
    """Of each prompt."""
    different_prompts: int = Field(100_000, ge=1)
    """After so many they come again."""
    lengths: Literal["log_normal", "fixed", "run"] = "log_normal"
    """Of completions, up to sampling.max_new_tokens. run: those of the samples in lengths_from."""
    completion_tokens: float = Field(2000.0, ge=1)
    """Their mean, or the length of all."""
    completion_sigma: float = Field(0.8, ge=0, le=4)
    """log_normal: the spread of the logarithm; 0.8 makes the 95th percentile 3.7 times the median."""
    lengths_from: Path | None = None
    """A run directory."""
    prompt_correlation: Probability = 0.0
    """How far a prompt decides its completions' lengths: 0 not at all, 1 wholly."""
    solved: Probability = 0.5
    """Share of samples with reward 1; the others have 0."""
    score_s: float = Field(0.0, ge=0)
    """To judge a sample."""
    hours: float = Field(0.0, ge=0)
    """Simulated time; 0 for as long as trainer.steps take. Steps that are not finished then do not count."""

    @model_validator(mode="after")
    def _possible(self) -> SimulationConfig:
        faults = []
        if (self.lengths == "run") != (self.lengths_from is not None):
            faults.append('lengths = "run" and lengths_from go together; give both or none')
        if len(set(self.schedules)) < len(self.schedules):
            faults.append("schedules names one twice; leave it out")
        return refuse(faults, self)
