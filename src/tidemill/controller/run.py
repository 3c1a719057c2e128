"""A run under way: its parts, where it stands, and the verbs of the training loop."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.assembly import GroupAssembly
from tidemill.controller.batch import Batch, plan_batch
from tidemill.controller.collection import collecting
from tidemill.controller.entries import EvalResult, Evaluated
from tidemill.controller.evaluation import evaluate
from tidemill.controller.figures import batch_figures, sample_figures
from tidemill.controller.offload import OffloadState, StepObservation, after_step, start, window
from tidemill.controller.rollout import Rollout, StopRequested
from tidemill.core.protocols import Checkpoints, PromptSource, Scorer, Trainer
from tidemill.core.records import Group, Prompt, SamplingParams, StepMetrics, Trajectory
from tidemill.telemetry.events import CHECKPOINT, EVALUATION
from tidemill.telemetry.metrics import GREEDY_ACCURACY

T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """The state of one `train_loop`."""

    spec: RunSpec
    source: PromptSource
    trainer: Trainer
    eval_scorer: Scorer
    checkpoints: Checkpoints
    rollout: Rollout
    sampling: SamplingParams
    step: int = 0  # batches committed
    resumed_from: int = 0
    checkpointed: int = 0  # the step of the newest checkpoint
    replayed: int = 0
    already_finished: bool = False
    tokens_generated: int = 0
    offload: OffloadState | None = None  # None where no preemptible worker can come
    timings: dict[str, float] = field(default_factory=dict)  # of the open batch, in seconds

    async def resume(self) -> None:
        """Restore the newest checkpoint and find out what the journal has beyond it."""
        step = await self._checkpoint_io(self.checkpoints.restore_latest(), "the checkpoint to be read")
        self.step = self.resumed_from = self.checkpointed = step
        ledger, telemetry, fleet = self.rollout.ledger, self.rollout.telemetry, self.rollout.fleet
        if fleet.elastic:
            self._balance(start(fleet.config.seed_window_s))
        self.replayed = await ledger.load(after_step=step)
        telemetry.resume(step)
        self.already_finished = step >= self.spec.trainer.steps
        if self.already_finished:
            telemetry.event("already_finished", step=step, steps=self.spec.trainer.steps)
        elif self.replayed:
            telemetry.event("replay", first_step=step + 1, last_step=step + self.replayed)
        await fleet.publish(self.trainer.version)

    async def evaluate_start(self) -> None:
        """Where this session begins; before the first step the figures make a metrics line of their own."""
        figures = await self._evaluate_if_due()
        if figures and self.step == 0:
            version = self.trainer.version
            self.rollout.telemetry.step(StepMetrics(step=0, version=version, optimizer_steps=0, values=figures))

    async def open_batch(self) -> Batch:
        """The next step's batch, new or as the journal has it."""
        if self.rollout.stop.is_set():
            raise StopRequested
        step, spec = self.step + 1, self.spec
        prompts = self.source.train_batch(step)
        plan = plan_batch(
            step, prompts, run_seed=spec.run.seed, group_size=spec.batch.group_size, sampling=self.sampling
        )
        return await self.rollout.ledger.open(plan, prompts, version_number=self.trainer.version.number)

    async def learn_from(self, batch: Batch) -> list[Trajectory]:
        """Generate, score and accumulate; returns the batch's trajectories once the trainer has them all.

        Consumes the batch's prompts, produces gradients; waits for samples, and is unblocked by the last sample of the
        next group being scored.
        """
        rollout, plan = self.rollout, batch.plan
        assembly, learned = GroupAssembly(plan, self.spec.batch.order), list[Trajectory]()
        self.timings = {"time_train_s": 0.0}
        with rollout.span("rollout", step=plan.step) as fields:
            async with collecting(batch, replace(rollout, window_s=self._window_s())) as samples:
                async for sample in samples:
                    if rollout.stop.is_set():
                        continue  # the iteration ends when what is in flight has been journalled
                    for group in assembly.add(sample):
                        await self._accumulate(group)
                        learned += group.trajectories
                        if batch.complete:
                            rollout.telemetry.progress("training", len(learned), len(batch.samples))
            if rollout.stop.is_set():
                raise StopRequested
            self.timings |= {"time_rollout_s": samples.generating_s, "time_score_s": samples.scoring_s}
            if rollout.fleet.elastic:
                self.timings |= {"workers_mean": samples.workers_mean, "time_trainer_wait_s": samples.waited_s}
            fields |= {"samples": len(learned), "tokens": batch.tokens_accepted, "recovered": batch.tokens_recovered}
        self.tokens_generated += batch.tokens_accepted
        return learned

    async def _accumulate(self, group: Group) -> None:
        await self._train(self.trainer.accumulate(group), f"the trainer to learn from group {group.position}")

    async def publish(self, batch: Batch, trajectories: Sequence[Trajectory]) -> StepMetrics:
        """Commit the batch and give the worker the new weights; returns what the step was like."""
        rollout, step, version = self.rollout, batch.plan.step, self.trainer.version
        with rollout.span("training", step=step):
            metrics = await self._train(self.trainer.commit(step), f"the trainer to commit step {step}")
        self.step = step
        await rollout.fleet.publish(self.trainer.version)
        self._adapt()
        ordinals = {sample.sample_id: sample.ordinal for sample in batch.samples}
        ordered = sorted(trajectories, key=lambda trajectory: ordinals[trajectory.sample_id])
        rollout.telemetry.samples(step, ordered, [sample.prompt for sample in batch.samples])
        figures = {**sample_figures(ordered), **batch_figures(batch, version), **self.timings}
        if self.timings["time_rollout_s"] > 0:
            figures["tokens_per_s"] = batch.tokens_accepted / self.timings["time_rollout_s"]
        # Where both know a number, the trainer's counts: it measures on its own thread.
        return msgspec.structs.replace(metrics, values={**figures, **metrics.values})

    def _window_s(self) -> float:
        """How long the reserved side generates beside the preemptible workers in the next step."""
        if self.offload is None:
            return math.inf
        return window(self.offload, len(self.rollout.fleet.serving(self.trainer.version.number)))

    def _adapt(self) -> None:
        """Learn from who waited for whom: the seeding window of later steps, and how many workers would be of use."""
        fleet, timings = self.rollout.fleet, self.timings
        if self.offload is None:
            return
        timings["time_remote_wait_s"], timings["seed_window_s"] = fleet.idle_s(), self.offload.window_s
        observation = StepObservation(
            workers_mean=timings["workers_mean"],
            trainer_wait_s=timings["time_trainer_wait_s"],
            remote_wait_s=timings["time_remote_wait_s"],
            remote_s=timings["time_rollout_s"],
            train_s=timings["time_train_s"],
        )
        self._balance(after_step(self.offload, observation, gain=fleet.config.window_gain))

    def _balance(self, offload: OffloadState) -> None:
        self.offload = offload
        if self.rollout.fleet.config.size == "adaptive":
            self.rollout.fleet.want(offload.wanted_workers)

    async def tell(self, metrics: StepMetrics) -> None:
        """One line of metrics, with held-out accuracy when it is due; written even if that evaluation is cut short."""
        figures: dict[str, float] = {}
        try:
            figures = await self._evaluate_if_due()
        finally:
            self.rollout.telemetry.step(msgspec.structs.replace(metrics, values={**metrics.values, **figures}))

    async def _evaluate_if_due(self) -> dict[str, float]:
        """Before the first step, every so many, and after the last; a result of these very weights is not repeated."""
        every, rollout = self.spec.eval.every_steps, self.rollout
        if not (self.step in (0, self.spec.trainer.steps) or (every and self.step % every == 0)):
            return {}
        prompts = list(self.source.held_out())[: self.spec.eval.prompts]
        known = rollout.ledger.evaluations.get(self.step)
        if known is not None and (known.result.version, known.result.n) == (self.trainer.version, len(prompts)):
            self._tell_again(known, prompts)
            return _figures(known.result)
        return _figures(await self._evaluate(prompts)) if prompts else {}

    async def _evaluate(self, prompts: Sequence[Prompt]) -> EvalResult:
        rollout, step = self.rollout, self.step
        limit = self.spec.eval.max_new_tokens or self.sampling.max_new_tokens
        with rollout.span(EVALUATION, step=step) as fields:
            evaluation = await evaluate(
                step=step,
                version=self.trainer.version,
                prompts=prompts,
                rollout=rollout,
                scorer=self.eval_scorer,
                sampling=msgspec.structs.replace(self.sampling, max_new_tokens=limit),
                seed=self.spec.run.seed,
            )
            fields |= _fields(evaluation.result)
        rollout.telemetry.samples(step, evaluation.samples, prompts)
        await rollout.ledger.evaluated(evaluation.result, evaluation.samples)
        return evaluation.result

    def _tell_again(self, known: Evaluated, prompts: Sequence[Prompt]) -> None:
        """Write what the resume dropped of an evaluation beyond the checkpoint."""
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        samples = [sample for sample in known.samples if sample.sample_id.prompt_id in by_id]
        if samples:
            self.rollout.telemetry.samples(self.step, samples, [by_id[s.sample_id.prompt_id] for s in samples])
        self.rollout.telemetry.event(EVALUATION, step=self.step, recovered=True, **_fields(known.result))

    async def checkpoint_if_due(self) -> None:
        every = self.spec.checkpoint.every_steps
        if self.step == self.spec.trainer.steps or (every and self.step % every == 0):
            await self._checkpoint()

    async def checkpoint_if_newer(self) -> None:
        if self.step > self.checkpointed:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Write the trainer's state; what the ledger has up to here is then superfluous."""
        rollout, step = self.rollout, self.step
        known = rollout.ledger.evaluations.get(step)
        score = known.result.greedy_accuracy if known and known.result.version == self.trainer.version else None
        rollout.telemetry.progress("checkpoint", 0, 1)
        with rollout.span(CHECKPOINT, step=step):
            await self._checkpoint_io(self.checkpoints.save(step, score=score), "the checkpoint to be written")
        self.checkpointed = step
        await rollout.ledger.prune(step)

    async def _train(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        """Await the trainer, and count how long."""
        rollout, began = self.rollout, self.rollout.clock.now()
        result = await rollout.patiently(
            call, awaited=awaited, look_at="the trainer's device and memory", deadline_s=rollout.patience.trainer_s
        )
        self.timings["time_train_s"] += rollout.clock.now() - began
        return result

    async def _checkpoint_io(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        return await self.rollout.patiently(
            call,
            awaited=awaited,
            look_at="the disk of the run directory",
            deadline_s=self.rollout.patience.checkpoint_s,
        )


def _fields(result: EvalResult) -> dict[str, Any]:
    """What the event log says of an evaluation."""
    return {
        "greedy_accuracy": result.greedy_accuracy,
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
    }


def _figures(result: EvalResult) -> dict[str, float]:
    """What a step's metrics say of an evaluation."""
    return {GREEDY_ACCURACY: result.greedy_accuracy, "eval/n": float(result.n), "time_eval_s": result.duration_s}
