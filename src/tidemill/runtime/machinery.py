"""What a runtime brings to a run: everything that computes, wherever it does so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tidemill.config.schema import RunSpec
from tidemill.config.scoring import ScoringConfig
from tidemill.core.clock import Clock
from tidemill.core.protocols import Checkpoints, Compute, Provider, Publisher, Trainer, Worker, WorkerHost
from tidemill.envs.text.scorer import MOST_HANGING, RewardScorer, build_scorer, evaluation_scoring
from tidemill.envs.text.task import Task
from tidemill.envs.text.user_calls import UserCalls
from tidemill.models.codec import TextCodec
from tidemill.pool.build import build_provider, remarks
from tidemill.runtime.readers import Readers
from tidemill.runtime.rewards import model_rewards
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """The parts that a training loop drives; its maker stops them."""

    trainer: Trainer
    checkpoints: Checkpoints
    local: Worker  # the trainer's own engine
    task: Task
    codec: TextCodec
    threads: int  # inside one operation of the trainer
    about: dict[str, Any] = field(default_factory=dict)  # what computes, for the event log
    provider: Provider | None = None
    host: WorkerHost | None = None
    publisher: Publisher | None = None
    silence_s: float | None = None  # instead of the configured one
    compute: Compute | None = None  # of this process, where what scores may run, too; None without one
    readers: Readers = field(default_factory=Readers)


OpenMachinery: TypeAlias = Callable[[RunSpec, RunDirectory, Recorder, Clock], AbstractAsyncContextManager[Machinery]]
"""Starts what a runtime needs, and stops all of it in the end, whatever happens."""


def scorers(
    spec: RunSpec, task: Task, compute: Compute | None = None, readers: Readers | None = None
) -> tuple[RewardScorer, RewardScorer]:
    """What training is rewarded by, and what held-out samples are judged by.

    Args:
        compute: where reward models run; None gives them a thread.
        readers: of the reward models that read sample by sample.

    Raises:
        UserError: a reward cannot work.
    """
    stops = spec.sampling.stop or task.default_stop_strings
    open_model = model_rewards(spec, compute, readers or Readers())

    calls = UserCalls(most_hanging=max(MOST_HANGING, spec.scoring.concurrency))  # a module's clients belong to one loop

    def build(scoring: ScoringConfig) -> RewardScorer:
        return build_scorer(
            scoring, task=task, seed=spec.run.seed, stop_strings=stops, open_model=open_model, calls=calls
        )

    return build(spec.scoring), build(evaluation_scoring(spec.scoring, task=task))


def is_elastic(spec: RunSpec) -> bool:
    """Whether preemptible workers may come at all."""
    return spec.pool.kind != "static" or spec.pool.workers > 0


def scheduled_provider(
    spec: RunSpec, run: RunDirectory, clock: Clock, *, tell: Callable[[str], None]
) -> Provider | None:
    """Where simulated machines come from; None when none will, or when the machines are real ones.

    `tell` gets the span and mean of a trace, what is odd about it, and a warning when the run outlives it.

    Raises:
        UserError: the trace cannot be read.
    """
    if spec.pool.kind == "ray" or not is_elastic(spec):
        return None
    for remark in remarks(spec.pool):
        tell(remark)
    price, session = spec.fleet.preemptible_usd_per_hour, run.past.count + 1
    return build_provider(spec.pool, price_usd_per_hour=price, clock=clock, session=session, warn=tell)
