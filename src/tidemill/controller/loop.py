"""The training loop.

```
 source ──prompts──▶ open ──▶ generate ⇄ score ──groups──▶ accumulate ──▶ commit ──▶ publish ──▶ evaluate ──▶ checkpoint
                      ▲          │         │                 (trainer)   (trainer)   (fleet)  (if due)     (if due)
                      │          ▼         ▼                                                                  │
                      │        ledger ◀── journal                        ledger.prune ◀───────────────────────┘
                      └─────────────────────────── the next step ◀────────────────────────────────────────────┘
```
A step consumes one batch of prompts and produces one version. Samples are scored one by one as they finish, and a group
goes to the trainer as soon as its last sample is scored, while others are still being generated. At lag 0 no sample is
in flight when the optimizer updates the weights, so that an engine may share them with the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tidemill.config.schema import RunSpec
from tidemill.controller.collector import collect_samples
from tidemill.controller.entries import EvalResult
from tidemill.controller.fleet import Fleet
from tidemill.controller.in_flight import TRAIN, InFlight, SamplingPlan
from tidemill.controller.ledger import Ledger
from tidemill.controller.reading import Reading
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.controller.run import Run
from tidemill.controller.turns import AgentLimits
from tidemill.controller.waiting import Timeouts
from tidemill.core.errors import GuardStop
from tidemill.core.guards import ScoreGuard, UpdateGuard
from tidemill.core.protocols import (
    Checkpoints,
    Clock,
    Codec,
    Environments,
    PromptSource,
    Scorer,
    Telemetry,
    Trainer,
)
from tidemill.core.records import PolicyVersion, Prompt, Record, SamplingParams


class LoopResult(Record):
    """Result of `train_loop`."""

    steps: int  # batches committed, by all sessions
    version: PolicyVersion
    resumed_from: int  # step of the checkpoint that this session resumed; 0 without one
    replayed: int  # batches that this session found in the journal, whole or in part
    interrupted: bool
    already_finished: bool  # all steps were done before
    tokens_generated: int  # by this session, without evaluations
    evaluations: tuple[EvalResult, ...]  # by step, of all sessions and sets


async def train_loop(
    *,
    spec: RunSpec,
    source: PromptSource,
    fleet: Fleet,
    trainer: Trainer,
    scorer: Scorer,
    eval_scorer: Scorer,
    ledger: Ledger,
    checkpoints: Checkpoints,
    telemetry: Telemetry,
    codec: Codec,
    clock: Clock,
    stop: asyncio.Event,
    stop_strings: tuple[str, ...] = (),
    reading: Reading | None = None,
    timeouts: Timeouts | None = None,
    eval_sets: Mapping[str, Sequence[Prompt]] = {},
    environments: Environments | None = None,
    agent: AgentLimits | None = None,
) -> LoopResult:
    """Train until `spec.trainer.steps` batches are committed, resuming from the newest checkpoint and the ledger.

    Args:
        source: prompts by step.
        fleet: the workers; already entered.
        scorer: scores training samples.
        eval_scorer: scores held-out samples.
        stop: set it to end the run early. Samples in flight are journalled, and a checkpoint of the last committed
            batch is written unless it exists.
        stop_strings: of the task, used if `spec.sampling.stop` is empty.
        reading: frozen models that read samples one by one.
        timeouts: deadlines of all waits.
        eval_sets: prompts by name, evaluated in addition to the held-out ones.
        environments: answer the turns of agents; None for single completions.
        agent: the limits of an agent's turns.

    Raises:
        UserError: an error in the user's input, the run directory or the disk.
        DeadlineError: a wait passed its deadline.
        GuardStop: samples get no valid rewards, gradients are not finite, or machines live too short and there is no
            reserved engine; the last batch is in a checkpoint.
        TidemillError: the engine failed repeatedly on one sample.
    """
    rollout = RolloutContext(
        fleet=fleet,
        ledger=ledger,
        scorer=scorer,
        codec=codec,
        telemetry=telemetry,
        clock=clock,
        stop=stop,
        timeouts=timeouts or Timeouts(),
        truncated=spec.scoring.truncated,
        reading=reading,
        environments=environments,
        agent=agent,
    )
    plan = SamplingPlan(
        purpose=TRAIN,
        run_seed=spec.run.seed,
        group_size=spec.batch.group_size,
        sampling=sampling_params(spec, codec, stop_strings),
        exact_version=spec.schedule.one_version,
        agent=agent,
    )
    in_flight = InFlight(plan, version_number=trainer.version.number)
    run = Run(spec, source, trainer, eval_scorer, checkpoints, rollout, in_flight, eval_sets)
    scores, updates = ScoreGuard(), UpdateGuard(spec.trainer.steps)
    await run.resume()
    try:
        await run.evaluate_start()
        async with collect_samples(in_flight, rollout, endless=True) as run.collector:
            while run.step < spec.trainer.steps:
                batch = await run.begin_batch()
                trajectories = await run.train_on(batch)
                metrics = await run.publish(batch, trajectories)
                await run.log_step(metrics)
                await run.checkpoint_if_due()
                scores.check(trajectories, steps_left=spec.trainer.steps - run.step)
                updates.check(metrics)
            scores.finish(ledger.rewards_through(run.step))
    except GuardStop:
        await run.checkpoint_if_newer()
        raise
    except StopRequested:
        await run.checkpoint_if_newer()
        return _result(run, interrupted=True)
    return _result(run, interrupted=False)


def sampling_params(spec: RunSpec, codec: Codec, stop_strings: tuple[str, ...]) -> SamplingParams:
    """Sampling of training completions; the task's stop strings apply unless the user gave some."""
    sampling = spec.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        stop_token_ids=codec.stop_token_ids,
        stop_strings=sampling.stop or stop_strings,
    )


def _result(run: Run, *, interrupted: bool) -> LoopResult:
    known = sorted(run.rollout.ledger.evaluations.values(), key=lambda each: each.result.step)
    return LoopResult(
        steps=run.step,
        version=run.trainer.version,
        resumed_from=run.resumed_from,
        replayed=run.replayed,
        interrupted=interrupted,
        already_finished=run.already_finished,
        tokens_generated=run.tokens_generated,
        evaluations=tuple(each.result for each in known if each.result.step <= run.step),
    )
