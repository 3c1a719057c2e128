"""What a runtime provides to a run, and the parts that both runtimes share: scorers, checkpoints, published weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.config.schema import RunSpec
from tidemill.config.task import ScoringConfig
from tidemill.controller.fleet import Fleet
from tidemill.core.protocols import (
    Checkpoints,
    Clock,
    Compute,
    Provider,
    Publisher,
    Scorer,
    Trainer,
    Worker,
    WorkerHost,
)
from tidemill.data.prompts import Task
from tidemill.guard.machines import MachineWatch
from tidemill.models.codec import TextCodec
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.pool.build_provider import build_provider, trace_remarks
from tidemill.runtime.frozen_scorers import FrozenScorers, model_rewards
from tidemill.scoring.row_report import report_rows
from tidemill.scoring.scorer import RewardCalls, RewardScorer, build_scorer, check_rewards, evaluation_scoring
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore, recover_together, write_together
from tidemill.trainer.policy import PolicyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeBackend:
    """The parts that a training loop drives; the runtime that opened them closes them."""

    trainer: Trainer
    checkpoints: Checkpoints
    local: Worker  # the reserved engine
    task: Task
    codec: TextCodec
    scorer: Scorer  # rewards of training samples
    eval_scorer: Scorer  # scores of held-out samples
    threads: int  # inside one operation of the trainer
    context_tokens: int  # limit of prompt and completion in an engine
    device_info: dict[str, Any] = field(default_factory=dict)  # for the event log
    provider: Provider | None = None
    host: WorkerHost | None = None
    publisher: Publisher | None = None
    heartbeat_timeout_s: float | None = None  # replaces the configured one
    local_engines: int = 1  # that `local` consists of
    frozen: FrozenScorers = field(default_factory=FrozenScorers)
    gold_scorer: Scorer | None = None  # gold rewards of some samples; None: `scorer` computes them for all


OpenBackend: TypeAlias = Callable[[RunSpec, RunDirectory, Recorder, Clock], AbstractAsyncContextManager[RuntimeBackend]]
"""Starts everything a runtime needs, and stops all of it when the block ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where a run computes: in this process, or on a Ray cluster."""

    check_machine: Callable[[RunSpec], object]
    """Refuses a machine that lacks a GPU or an environment variable."""
    check_models: Callable[[RunSpec], None]
    """Refuses models with another tokenizer than the policy."""
    open: OpenBackend

    def check(self, spec: RunSpec) -> None:
        """Both checks, before a run directory exists."""
        self.check_machine(spec)
        self.check_models(spec)


def fleet_of(
    spec: RunSpec, backend: RuntimeBackend, recorder: Recorder, clock: Clock, *, needs_logprobs: Sequence[str] = ()
) -> Fleet:
    """The engines of a backend, and what watches them; see `Fleet`."""
    action = spec.guard.machines.action
    machines = None
    if action != "off" and (spec.is_elastic or spec.trainer.shards > 1):
        own_threads = backend.heartbeat_timeout_s != math.inf
        machines = MachineWatch(acts=action == "quarantine", compares_speed=own_threads)
    return Fleet(
        backend.local,
        slots=spec.engine.slots,
        local_slots=spec.engine.slots * backend.local_engines,
        clock=clock,
        telemetry=recorder,
        config=spec.fleet,
        provider=backend.provider,
        host=backend.host,
        publisher=backend.publisher,
        needs_logprobs=needs_logprobs,
        heartbeat_timeout_s=backend.heartbeat_timeout_s,
        machines=machines,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScorers:
    training: RewardScorer
    held_out: RewardScorer
    gold: RewardScorer | None  # None: `training` includes gold rewards

    async def close(self) -> None:
        for scorer in (self.training, self.held_out, self.gold):
            if scorer is not None:
                await scorer.close()


def scorers(
    spec: RunSpec,
    task: Task,
    compute: Compute | None = None,
    frozen: FrozenScorers | None = None,
    *,
    run: RunDirectory | None = None,
    warn: Callable[[str], None] = lambda _: None,
    guarded: bool = False,
) -> RunScorers:
    """The scorers of a run.

    Args:
        compute: where reward models run; None starts a thread for them.
        frozen: reward models that score sample by sample.
        run: keeps the verdicts of judges; None: the user's cache.
        warn: gets a message for every function that cannot run in another process.
        guarded: a guard asks for gold scores.

    Raises:
        UserError: a reward cannot be built.
    """
    stops = spec.sampling.stop or task.default_stop_strings
    open_model = model_rewards(spec, compute, frozen or FrozenScorers())
    calls = RewardCalls(spec.scoring.concurrency)  # shared, so that a user's module is imported once
    warn_once = cache(warn)

    def build(scoring: ScoringConfig) -> RewardScorer:
        return build_scorer(
            scoring,
            task=task,
            seed=spec.run.seed,
            stop_strings=stops,
            open_model=open_model,
            calls=calls,
            sandbox=spec.sandbox,
            judge_folder=run.judges if run else None,
            warn=warn_once,
        )

    evaluated = evaluation_scoring(spec.scoring, task=task, rewards=spec.eval.rewards)
    check_rewards(evaluated.rewards, task)
    report_rows(spec, task)
    gold: RewardScorer | None = None
    training = spec.scoring
    if guarded and spec.has_gold and spec.guard.action != "off":
        asked = [reward for reward in spec.scoring.rewards if reward.role == "gold" and reward.kind != "people"]
        if asked:
            share = {"role": "reward", "weight": 1 / len(asked)}
            opinions = tuple(reward.model_copy(update=share) for reward in asked)
            gold = build(spec.scoring.model_copy(update={"rewards": opinions}))
        counted = tuple(reward for reward in spec.scoring.rewards if reward.role != "gold")
        training = spec.scoring.model_copy(update={"rewards": counted})
    return RunScorers(training=build(training), held_out=build(evaluated), gold=gold)


def scheduled_provider(
    spec: RunSpec, run: RunDirectory | None, clock: Clock, *, log: Callable[[str], None]
) -> Provider | None:
    """The provider of simulated machines; None without a pool, or when the machines are real.

    Args:
        run: None: of a job without one.
        log: gets the span and mean of a trace, irregularities in it, and a warning when the run outlives it.

    Raises:
        UserError: the trace cannot be read.
    """
    if spec.pool.kind == "ray" or not spec.is_elastic:
        return None
    for remark in trace_remarks(spec.pool):
        log(remark)
    price, session = spec.fleet.preemptible_usd_per_hour, session_number(run)
    return build_provider(spec.pool, price_usd_per_hour=price, clock=clock, session=session, warn=log)


def session_number(run: RunDirectory | None) -> int:
    """Number of this process among those that have worked on a run, from 1."""
    return run.past.count + 1 if run is not None else 1


def checkpoint_store(spec: RunSpec, folder: Path) -> CheckpointStore:
    """The checkpoints of a run, in their folder."""
    return CheckpointStore(folder, keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best)


@dataclass(frozen=True, slots=True)
class TrainerCheckpoints:
    """Implements `core.protocols.Checkpoints`."""

    store: CheckpointStore
    trainer: PolicyTrainer
    compute: Compute
    _: KW_ONLY
    warn: Callable[[str], None]  # gets a message for every damaged checkpoint that was skipped
    ranks: Ranks = ONE_RANK  # all of them call every method; the first creates the folders

    async def save(self, step: int, *, score: float | None, pinned: int | None = None) -> None:
        def save() -> None:
            write, nbytes = self.trainer.write_state, self.trainer.state_bytes()
            write_together(self.store, step, write, ranks=self.ranks, score=score, expected_bytes=nbytes, pinned=pinned)

        await self.compute.run(save)

    async def steps(self) -> Sequence[int]:
        return [checkpoint.step for checkpoint in await self.compute.run(self.store.checkpoints)]

    async def restore_latest(self) -> int:
        return await self.compute.run(self._restore)

    def _restore(self) -> int:
        for finding in recover_together(self.store, ranks=self.ranks):
            self.warn(finding)
        latest = self.store.latest()
        for name, reason in latest.skipped.items():
            self.warn(f"skipped checkpoint {name}: {reason}")
        if latest.checkpoint is None:
            return 0
        self.trainer.read_state(latest.checkpoint.path)
        return latest.checkpoint.step
