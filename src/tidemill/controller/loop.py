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

from tidemill.controller.collector import collect_samples
from tidemill.controller.entries import EvalResult
from tidemill.controller.rollout_context import StopRequested
from tidemill.controller.run import TrainingRun
from tidemill.core.errors import GuardStop
from tidemill.core.guards import ScoreGuard, UpdateGuard
from tidemill.core.records import PolicyVersion, Record


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


async def train_loop(run: TrainingRun) -> LoopResult:
    """Train until `trainer.steps` batches are committed, resuming from the newest checkpoint and the ledger.

    `run.rollout.stop` ends it early: samples in flight are journalled, and a checkpoint of the last committed batch is
    written unless it exists.

    Raises:
        UserError: an error in the user's input, the run directory or the disk.
        DeadlineError: a wait passed its deadline.
        GuardStop: samples get no valid rewards, gradients are not finite, quality does not follow the reward, or
            machines live too short and there is no reserved engine; the last batch is in a checkpoint.
        RollBack: the guard returns to an earlier checkpoint; see `jobs.rollback`.
        TidemillError: the engine failed repeatedly on one sample.
    """
    steps = run.spec.trainer.steps
    scores = ScoreGuard()
    updates = UpdateGuard(steps)
    interrupted = False
    await run.resume()
    try:
        await run.evaluate_start()
        async with collect_samples(run.in_flight, run.rollout, endless=True) as run.collector:
            run.collector.ranking_may_change = run.rounds.ranking_may_change if run.rounds is not None else None
            while run.step < steps:
                await run.obey()
                batch = await run.begin_batch()
                trajectories = await run.train_on(batch)
                metrics = await run.publish(batch, trajectories)
                await run.log_step(metrics)
                await run.checkpoint_if_due()
                await run.decide()
                scores.check(trajectories, steps_left=steps - run.step)
                updates.check(metrics)
            scores.finish(run.rollout.ledger.rewards_through(run.step))
    except GuardStop:
        await run.checkpoint_if_newer()
        raise
    except StopRequested:
        await run.checkpoint_if_newer()
        interrupted = True
    evaluations = [stored.result for stored in run.rollout.ledger.evaluations.values()]
    evaluations.sort(key=lambda result: result.step)
    return LoopResult(
        steps=run.step,
        version=run.trainer.version,
        resumed_from=run.resumed_from,
        replayed=run.replayed,
        interrupted=interrupted,
        already_finished=run.already_finished,
        tokens_generated=run.tokens_generated,
        evaluations=tuple(result for result in evaluations if result.step <= run.step),
    )
