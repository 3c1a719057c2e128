"""Compute: preemptible workers, the fleet, the Ray cluster, and the machines of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from tidemill.config.base import ELASTIC, ActiveIf, Config, Probability

NOTICED = ActiveIf(lambda spec: spec.pool.notice_s > 0, "pool.notice_s is 0")
REMEMBERED = ActiveIf(lambda spec: spec.fleet.remember_windows, "fleet.remember_windows is false")
ELASTIC_AT_LAG_0 = ActiveIf(
    lambda spec: not spec.is_elastic or spec.schedule.max_policy_lag == 0, "only with schedule.max_policy_lag = 0"
)
WORKER_PROCESSES = ActiveIf(
    lambda spec: spec.runtime == "ray" and spec.is_elastic, "no preemptible worker is a separate process"
)


class StaticPool(Config):
    kind: Literal["static"] = "static"
    workers: int = Field(0, ge=0)
    """Preemptible workers, all available from the start. 0: the reserved side generates everything."""


class TracePool(Config):
    kind: Literal["trace"]
    path: Path
    """Capacity trace: CSV lines `seconds,count`, or JSON `{"metadata": {"gap_seconds": …}, "data": [count, …]}`."""
    start_s: float = Field(0.0, ge=0)
    """Position in the trace at which the run starts, in seconds."""
    speed: float = Field(1.0, gt=0)
    """Seconds of the trace that pass in one second of the run; notices are not scaled."""
    max_workers: int = Field(8, ge=1)
    """Maximum number of workers, even where the trace offers more."""
    notice_s: float = Field(0.0, ge=0)
    """Notice before each eviction, in seconds; 0: no notice."""
    seed: int = Field(0, ge=0)
    """Seed that selects which machine is evicted when the count drops."""


class SyntheticPool(Config):
    kind: Literal["synthetic"]
    workers: int = Field(2, ge=1)
    """Number of workers when none is evicted."""
    mean_time_to_eviction_s: float = Field(20.0, gt=0)
    """Mean time until a worker is evicted, in seconds (exponential distribution)."""
    mean_time_to_return_s: float = Field(5.0, gt=0)
    """Mean time until an evicted worker is replaced, in seconds (exponential distribution)."""
    burst: float = Field(0.3, ge=0, lt=1)
    """Probability that an eviction also evicts the next worker, and so on."""
    notice_s: float = Field(0.0, ge=0)
    """Notice before an eviction that is announced, in seconds."""
    noticed: Annotated[Probability, NOTICED] = 0.0
    """Fraction of evictions that are announced."""
    seed: int = Field(0, ge=0)
    """Seed of eviction times and victims."""


class RayPool(Config):
    kind: Literal["ray"]
    max_workers: int = Field(64, ge=1)
    """Maximum number of workers."""
    selector: dict[str, str] = {"ray.io/market-type": "spot"}
    """Ray labels of the nodes on which preemptible workers run."""


PoolConfig = Annotated[StaticPool | TracePool | SyntheticPool | RayPool, Field(discriminator="kind")]


class FleetConfig(Config):
    """How preemptible workers are used. `pool` defines where they come from."""

    size: Annotated[Literal["pool", "adaptive"], ELASTIC] = "pool"
    """pool: use every worker of the pool. adaptive: use as many as balance generation and training."""
    seeding: bool = True
    """The reserved side also generates at the start of a step, whenever there is no preemptible worker, and samples
    that were moved three times without a new token because machines live shorter than it takes to compute their tokens
    again. false: such a sample ends the run."""
    hand_over: Annotated[Literal["window", "balance"], ELASTIC, ELASTIC_AT_LAG_0] = "window"
    """When the reserved side stops generating in a step. window: after a time that adapts from step to step. balance:
    also wait until workers are projected to finish before the trainer does. Only with schedule.max_policy_lag = 0, and
    only after the first step has measured both sides."""
    seed_window_s: Annotated[float, ELASTIC] = Field(10.0, ge=0)
    """Length of the seeding window in the first step, in seconds; later windows adapt."""
    window_gain: Annotated[float, ELASTIC] = Field(3.0, gt=0)
    """The window changes by (trainer wait − worker idle time) / window_gain per step."""
    window_floor_s: Annotated[float, ELASTIC] = Field(0.0, ge=0)
    """Minimum length to which the window adapts, in seconds."""
    remember_windows: Annotated[bool, ELASTIC] = True
    """Keep one window for each number of preemptible workers. false: keep only the last window."""
    known_windows: Annotated[tuple[Annotated[float, Field(ge=0)], ...], ELASTIC, REMEMBERED] = ()
    """Initial windows in seconds for 1, 2, … workers, for example from an earlier run."""
    queue_limit: Annotated[int, ELASTIC] = Field(8, ge=1)
    """Maximum number of samples queued at a worker beyond those it decodes."""
    inexact_migration: Annotated[bool, ELASTIC] = False
    """Accept workers whose engine draws other noise than the reserved one. A sample that moves between them continues
    with other tokens than it would have had, from the same distribution; runs do not repeat bit by bit."""
    max_moves: Annotated[int, ELASTIC] = Field(2, ge=0)
    """How often one sample may be moved to balance the load. Evictions do not count."""
    tail_fraction: Annotated[float, ELASTIC] = Field(0.0, ge=0, lt=1)
    """Tail consolidation: when at most this fraction of the samples in flight is unfinished, move them to as few
    workers as can decode them at once. 0: disabled; RLHFuse uses 0.2."""
    heartbeat_timeout_s: Annotated[float, WORKER_PROCESSES] = Field(15.0, gt=0)
    """A worker process that sends nothing for this long loses its lease, in seconds. Idle workers send a heartbeat
    four times as often, and at least every second."""
    join_timeout_s: Annotated[float, ELASTIC] = Field(300.0, gt=0)
    """A worker that does not generate this long after its lease started is abandoned, in seconds."""
    drain_margin_s: Annotated[float, ELASTIC] = Field(1.0, ge=0)
    """A worker under notice hands its samples back this long before the end of the grace period, in seconds."""
    probe_tolerance: Annotated[float, ELASTIC] = Field(0.1, gt=0)
    """Maximum mean difference between a worker's and the publisher's logprobs of the probe, in nats; a worker beyond it
    is quarantined."""
    reserved_usd_per_hour: float = Field(0.0, ge=0)
    """Price of the reserved side, in USD per hour."""
    preemptible_usd_per_hour: Annotated[float, ELASTIC] = Field(0.0, ge=0)
    """Price of one preemptible worker, in USD per hour."""

    @property
    def heartbeat_s(self) -> float:
        """Interval between the heartbeats of an idle worker, in seconds."""
        return min(1.0, self.heartbeat_timeout_s / 4)

    def issues(self) -> Iterator[str]:
        if self.heartbeat_timeout_s < 1:
            yield (
                f"heartbeat_timeout_s = {self.heartbeat_timeout_s:g} is too short: workers send nothing while they "
                "load weights; set it to 1 or more"
            )


class RayConfig(Config):
    """Only with runtime = "ray"."""

    address: str = ""
    """Address of a running cluster; empty: start a local cluster and stop it at the end."""
    reserved_selector: dict[str, str] = {}
    """Ray labels of the trainer's node; empty: any node on which preemptible workers may not run."""
    trainer_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for the trainer."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for the trainer. A local cluster needs them on this machine."""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs reserved for each worker; also the number of threads of one operation."""
    worker_gpus: float = Field(0.0, ge=0)
    """GPUs reserved for each worker."""


ScheduleName: TypeAlias = Literal[
    "colocated",
    "disaggregated",
    "one_step_off",
    "bounded_staleness",
    "streamed",
    "rlboost",
    "tidemill",
    "tail_batching",
]


class SimulationConfig(Config):
    """What `tidemill simulate` simulates. Batch, limits, pool, prices, steps and seed come from the other sections."""

    schedules: tuple[ScheduleName, ...] = Field(get_args(ScheduleName), min_length=1)
    """Schedules compared on the same samples and machines. tidemill uses [schedule] and [pool];
    rlboost and tail_batching use [pool]; the others use the reserved machines only."""
    staleness: int = Field(4, ge=1)
    """Maximum policy lag of bounded_staleness."""
    parameters: float | None = Field(None, ge=1)
    """Number of parameters of the model, whose shape is then estimated; alternative to `model`."""
    model: Path | None = None
    """Hugging Face folder or config.json that gives the model's shape."""
    catalog: Path | None = None
    """TOML file with more GPUs and machines than `tidemill plan catalog` lists, or SkyPilot's vms.csv, for its
    prices."""
    measured: tuple[Path, ...] = ()
    """Results of benchmarks.gpu.train_step and benchmarks.gpu.engine: measured instead of assumed efficiencies of their
    GPU, for engines from the rows of engine.kind."""
    machine: str = "rlboost-8xh100"
    """Machine type of the reserved side."""
    machines: int = Field(1, ge=1)
    """Number of reserved machines. With fleet.reserved_usd_per_hour = 0 the catalog's price is used."""
    worker_machine: str = "rlboost-2xh100"
    """Machine type of a preemptible worker. With fleet.preemptible_usd_per_hour = 0 the catalog's price is used."""
    engine_gpus: int = Field(1, ge=1)
    """GPUs per engine, all in one machine. A machine runs as many engines as fit."""
    engine_dtype: Literal["bf16", "fp8"] = "bf16"
    """Data type of an engine's weights and arithmetic."""
    boot_s: float = Field(60.0, ge=0)
    """Time from the grant of a machine until its engine can load weights, in seconds."""
    prompt_tokens: int = Field(512, ge=1)
    """Length of each prompt, in tokens."""
    completion_tokens: float = Field(2000.0, ge=1)
    """Mean completion length, in tokens; lengths are log-normal, up to sampling.max_new_tokens."""
    completion_sigma: float = Field(0.8, ge=0, le=4)
    """Standard deviation of the logarithm of a completion's length; 0.8 puts the 95th percentile at 3.7 times the
    median, 0 makes all lengths equal."""
    lengths_from: Path | None = None
    """Run directory whose samples give the completion lengths, instead of completion_tokens and completion_sigma."""
    prompt_correlation: Probability = 0.0
    """Correlation of completion lengths within a prompt: 0 independent, 1 equal."""
    solved: Probability = 0.5
    """Fraction of samples with reward 1; the others have reward 0."""
    hours: float = Field(0.0, ge=0)
    """Simulated time, in hours; 0: until trainer.steps are complete. Unfinished steps do not count."""
