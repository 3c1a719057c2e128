"""The steps of the training loop: starting, training on, publishing, logging and checkpointing a batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.controller.batching import (
    BatchBuilder,
    GroupAssembly,
    batch_figures,
    has_signal,
    latest_step,
    may_start,
    overcommitted,
    sample_figures,
)
from tidemill.controller.collector import SampleCollector
from tidemill.controller.evaluation import EvalSchedule
from tidemill.controller.in_flight import TRAIN, InFlight, SamplingPlan, plan_groups, sampling_params
from tidemill.controller.offload import Seeding
from tidemill.controller.reward_watch import RewardWatch
from tidemill.controller.rollout_context import RolloutContext, StopRequested
from tidemill.controller.rounds import Rounds
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.tainted import TrainedLeases
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import Checkpoints, Guard, PromptSource, Scorer, Trainer
from tidemill.core.records import Group, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.control import POLL_S, RunControl
from tidemill.telemetry.events import CHECKPOINT, PAUSED
from tidemill.telemetry.metrics import HELD_OUT_NAME

T = TypeVar("T")

MOST_STEPS = 3
"""Steps whose prompts are kept: those of a round may be of several."""
KNOWN_ROUNDS = 64
"""Newest rounds from whose lengths a resumed run predicts others, until it has lengths of its own."""


@dataclass(slots=True, kw_only=True)
class TrainingRun:
    """What a run trains with, and its state during `train_loop`."""

    spec: RunSpec
    rollout: RolloutContext  # its fleet is already entered
    source: PromptSource
    trainer: Trainer
    eval_scorer: Scorer  # of held-out samples
    checkpoints: Checkpoints
    eval_sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)  # by name, besides the held-out prompts
    stop_strings: tuple[str, ...] = ()  # of the task, used if `spec.sampling.stop` is empty
    guard: Guard | None = None  # of the reward
    rollbacks: int = 0  # of earlier decisions
    control: RunControl | None = None  # requests of people
    collector: SampleCollector | None = field(default=None, init=False)  # set while the loop runs
    step: int = field(default=0, init=False)  # batches committed
    resumed_from: int = field(default=0, init=False)
    checkpointed: int = field(default=0, init=False)  # step of the newest checkpoint
    replayed: int = field(default=0, init=False)
    already_finished: bool = field(default=False, init=False)
    tokens_logged: int = field(default=0, init=False)  # in this session's metrics
    timings: dict[str, float] = field(default_factory=dict, init=False)  # of the current step, in seconds
    step_started_s: float = field(default=0.0, init=False)
    trainer_responds: bool = field(default=True, init=False)  # False if it did not when the run was stopped
    prompts: dict[int, Sequence[tuple[int, Prompt]]] = field(default_factory=dict, init=False)  # cache, by step
    published: Sequence[tuple[Prompt, Trajectory]] = field(default=(), init=False)  # the newest batch
    watch: RewardWatch | None = field(default=None, init=False)
    in_flight: InFlight = field(init=False)
    rounds: Rounds | None = field(default=None, init=False)  # of tail batching
    assembly: GroupAssembly = field(init=False)
    trained_leases: TrainedLeases = field(default_factory=TrainedLeases, init=False)
    eval_schedule: EvalSchedule = field(init=False)
    seeding: Seeding = field(init=False)

    def __post_init__(self) -> None:
        plan = SamplingPlan(
            purpose=TRAIN,
            run_seed=self.spec.run.seed,
            group_size=self.spec.batch.group_size + self.spec.schedule.extra_samples,
            sampling=sampling_params(self.spec, self.rollout.codec, self.stop_strings),
            exact_version=self.spec.schedule.one_version,
            agent=self.rollout.agent,
        )
        self.in_flight = InFlight(plan, version_number=self.trainer.version.number)
        self.assembly = GroupAssembly(self.in_flight.plan.group_size)
        if self.spec.schedule.tail == "batching":
            self.rounds = Rounds(
                self.spec,
                self.rollout,
                self.in_flight,
                self.assembly,
                prompt_at=self._prompt,
                abort=self._abort,
            )
        self.eval_schedule = EvalSchedule(
            spec=self.spec,
            source=self.source,
            scorer=self.eval_scorer,
            rollout=self.rollout,
            sampling=self.in_flight.plan.sampling,
            sets=self.eval_sets,
        )
        if self.guard is not None:
            config = self.spec.guard
            canaries = self.eval_sets[config.canary_set] if config.canary_set else self.source.held_out(config.canaries)
            self.watch = RewardWatch(
                guard=self.guard,
                config=config,
                rollbacks=self.rollbacks,
                canaries=canaries[: config.canaries],
                rollout=self.rollout,
                sampling=self.in_flight.plan.sampling,
                seed=self.spec.run.seed,
            )
        self.seeding = Seeding(self.rollout.fleet, ahead=self.spec.schedule.max_policy_lag > 0)

    @property
    def tokens_generated(self) -> int:
        """Training tokens of this session, including those of samples in flight."""
        return self.tokens_logged + self.in_flight.counters.tokens_accepted

    async def resume(self) -> None:
        """Restore the newest checkpoint, and the samples that the journal has after it."""
        step = await self._checkpoint_io(self.checkpoints.restore_latest(), "the checkpoint to be read")
        self.step = self.resumed_from = self.checkpointed = step
        ledger, telemetry = self.rollout.ledger, self.rollout.telemetry
        self.seeding.begin()
        self.in_flight.newest_version = self.trainer.version.number
        self.replayed = await ledger.load(
            self.in_flight, self._prompt, after_step=step, restart_open=self.rounds is None
        )
        for closed in sorted(ledger.rounds.values(), key=lambda each: each.step)[-KNOWN_ROUNDS:]:
            for group in closed.trained:
                self.rollout.fleet.lengths.observe(group.prompt_id, group.prompt_tokens, group.lengths)
        if self.watch is not None:
            await self.watch.restore(self.checkpoints)
        telemetry.resume(step)
        self.already_finished = step >= self.spec.trainer.steps
        if self.already_finished:
            telemetry.event("already_finished", step=step, steps=self.spec.trainer.steps)
        elif self.replayed:
            telemetry.event("replay", first_step=step + 1, last_step=step + self.replayed)
        await self.rollout.fleet.publishing.publish(self.trainer.version)

    async def evaluate_start(self) -> None:
        """Evaluate if due; before the first step the figures are logged as step 0."""
        figures = await self.eval_schedule.if_due(self.step, self.trainer.version, training=self.collector)
        if figures and self.step == 0:
            self._log(StepMetrics(step=0, version=self.trainer.version, optimizer_steps=0, values=figures), {})
        if self.watch is not None and not self.already_finished:
            await self.watch.measure_canaries(self.step, self.trainer.version, self.collector)

    async def begin_batch(self) -> BatchBuilder:
        """Start the next step: its batch, recorded in the journal or still to be built, and its groups."""
        if self.rollout.stop.is_set():
            raise StopRequested
        batch, schedule = self.spec.batch, self.spec.schedule
        self.timings, self.step_started_s = {"time_train_s": 0.0}, self.rollout.clock.now()
        if self.rounds is not None:
            builder = await self.rounds.begin(self.step + 1, self._collector)
        else:
            recorded = self.rollout.ledger.batches.get(self.step + 1)
            builder = BatchBuilder(
                self.step + 1, batch.prompts, membership=schedule.membership, order=batch.order, recorded=recorded
            )
            await self._start_groups(0)
        self._collector.on_tainted = partial(self._restart_tainted, builder)
        window_s = self.seeding.begin_step()
        if window_s is not None:
            self.timings["seed_window_s"] = window_s
        self._collector.begin_step(
            samples=builder.size * self.in_flight.plan.group_size,
            window_s=math.inf if window_s is None else window_s,
            balance=self.seeding.balance,
        )
        return builder

    async def _start_groups(self, taken: int) -> None:
        """Start as many groups as the policy lag allows, `taken` of the current batch being trained on."""
        batch, schedule = self.spec.batch, self.spec.schedule
        open_groups = len(self.in_flight.groups) - taken
        learned = self.step * batch.prompts + taken
        number = may_start(
            version=self.in_flight.newest_version,
            learned=learned,
            in_flight=open_groups,
            batch_groups=batch.prompts,
            overcommit=overcommitted(
                schedule, batch.prompts, [mean or 0.0 for mean in self.rollout.ledger.rewards_through(self.step)]
            ),
        )
        number = min(number, self.spec.trainer.steps * batch.prompts - learned - open_groups)
        if number > 0:
            first = self.rollout.ledger.next_position
            pairs = [self._prompt(position) for position in range(first, first + number)]
            groups = plan_groups(pairs, first_position=first, from_version=self.in_flight.newest_version)
            await self.rollout.ledger.open(self.in_flight, groups, [prompt for _, prompt in pairs])
            self._collector.mailbox.notify()

    def _prompt(self, place: int) -> tuple[int, Prompt]:
        """The (epoch, prompt) at a place among the prompts of all steps."""
        step, index = place // self.spec.batch.prompts + 1, place % self.spec.batch.prompts
        if step not in self.prompts:
            while len(self.prompts) >= MOST_STEPS:
                del self.prompts[next(iter(self.prompts))]
            self.prompts[step] = self.source.train_batch(step)
        return self.prompts[step][index]

    async def train_on(self, batch: BatchBuilder) -> list[Trajectory]:
        """Pass groups to the trainer as they complete, until the batch is full; returns its trajectories.

        Consumes scored samples and produces gradients; waits for the last sample of the next group to be scored.
        """
        rollout = self.rollout
        trajectories = list[Trajectory]()
        step = self.step + 1
        with rollout.span("rollout", step=step) as fields:
            completed = True
            while not batch.full:
                if completed and not rollout.stop.is_set():  # when stopping, samples are only journalled
                    trajectories += await self._train_on_complete_groups(batch)
                if not batch.full:
                    trajectory = await self._collector.next_change()
                    completed = trajectory is None or await self._add_sample(trajectory, batch)
            if rollout.stop.is_set():
                raise StopRequested
            if self.rounds is not None:
                await self.rounds.close(batch, self._collector)
                self.timings["prompts_waiting"] = float(self.rounds.prompts_waiting)
            samples = [sample for position in batch.taken for sample in self.in_flight.group(position)]
            self._record_times(samples)
            tokens = self.in_flight.counters.tokens_accepted
            fields |= {"samples": len(trajectories), "tokens": tokens, "recovered": sum(s.recovered for s in samples)}
        return trajectories

    async def _train_on_complete_groups(self, batch: BatchBuilder) -> list[Trajectory]:
        """Pass to the trainer every complete group that the batch takes."""
        learned = list[Trajectory]()
        if self.rounds is not None and not batch.recorded:
            await self.rounds.rank(batch, self._collector)
        while self._may_take(batch):  # checked first: listing all groups is slow if there are many
            await self._restart_tainted(batch)
            taken = set(batch.taken)
            untaken = {at: self._latest_step(at) for at in self.in_flight.groups if at not in taken}
            chosen = batch.take(self.assembly.complete.keys(), untaken)
            if not chosen:
                break
            for place, position in enumerate(chosen):
                if self._is_tainted(position):  # since an earlier one was accumulated
                    batch.give_back(chosen[place:])
                    break
                trajectories = self.assembly.complete.pop(position)
                await self._accumulate(position, trajectories)
                learned += trajectories
                if batch.full and position == chosen[-1]:
                    self.rollout.telemetry.progress("training", len(learned), len(learned))
        return learned

    def _is_tainted(self, position: int) -> bool:
        leases = self.rollout.fleet.tainted
        return bool(leases) and any(sample.uses(leases) for sample in self.in_flight.group(position))

    async def _restart_tainted(self, batch: BatchBuilder) -> None:
        """Generate samples again that have tokens of workers that computed wrongly, unless they were accumulated."""
        leases = self.rollout.fleet.tainted
        if not leases:
            return
        # Tokens that a worker reported just before it was found may arrive later: complete groups are always checked.
        taken, new = set(batch.taken), not leases.keys() <= self.trained_leases.logged
        positions = [at for at in (self.in_flight.groups if new else self.assembly.complete) if at not in taken]
        restarted = [one for at in positions for one in self.in_flight.group(at) if one.uses(leases)]
        if new:
            accumulated = [one for at in batch.taken for one in self.in_flight.group(at) if one.uses(leases)]
            self.trained_leases.log_tainted(self.rollout.telemetry, leases, self.step + 1, accumulated, restarted)
        if restarted and self.rounds is not None and not batch.recorded:
            await self._restart(self.rounds.rank_again(batch, leases))
            self.rounds.restarted(batch.step)
        elif restarted:
            await self._restart(restarted)
        if restarted:
            self._collector.mailbox.notify()

    def _may_take(self, batch: BatchBuilder) -> bool:
        """Whether the batch could take any group."""
        if batch.full or not batch.may_take(len(self.assembly.complete)):
            return False
        position = batch.blocked_by
        if position is None or position not in self.in_flight.groups or position in self.assembly.complete:
            return True
        return not batch.must_take(self._latest_step(position))

    async def _accumulate(self, position: int, trajectories: Sequence[Trajectory]) -> None:
        version = self.trainer.version.number
        lag = max((version - t.versions[0].version.number for t in trajectories if t.versions), default=0)
        if lag > self.spec.schedule.max_policy_lag:
            raise TidemillError(
                f"group {position} has policy lag {lag}, above schedule.max_policy_lag = "
                f"{self.spec.schedule.max_policy_lag}: this is a bug"
            )
        group = Group(
            position=position,
            prompt_id=trajectories[0].sample_id.prompt_id,
            trajectories=tuple(
                msgspec.structs.replace(one, publish_logprobs=self.in_flight[one.sample_id].publish_logprobs)
                for one in trajectories
            ),
        )
        await self._call_trainer(self.trainer.accumulate(group), f"the trainer to learn from group {position}")

    async def _add_sample(self, trajectory: Trajectory, batch: BatchBuilder) -> bool:
        """Add a scored sample; returns whether its group is complete.

        With dynamic sampling, a group without reward signal is dropped and another one started.
        """
        sample = self.in_flight[trajectory.sample_id]
        position = self.in_flight.position(sample)
        if not sample.needed or not self.assembly.add(position, trajectory):
            return not sample.needed
        if (
            self.rounds is not None
            or not self.spec.algorithm.dynamic_sampling
            or self.rollout.ledger.in_stored_batch(position)
        ):
            return True
        counters, most = self.in_flight.counters, self.spec.algorithm.max_redraws * self.spec.batch.prompts
        if counters.groups_redrawn < most and not has_signal(self.assembly.complete[position]):
            counters.groups_redrawn += 1
            await self._drop_group(position)
            await self._start_groups(len(batch.taken))
        return True

    async def _drop_group(self, position: int) -> None:
        self.assembly.forget(position)
        samples = self.in_flight.group(position)
        self._abort(samples)
        await self.rollout.ledger.drop(self.in_flight, position)
        self.in_flight.counters.tokens_discarded += sum(sample.generated for sample in samples)

    def _abort(self, samples: Sequence[Sample]) -> None:
        """Abort samples that are dropped or restarted, on their workers, in environments and in models that read
        ahead."""
        for sample in samples:
            if sample.state is SampleState.RUNNING:
                self.rollout.fleet.abort(sample.lease_id, [sample.sample_id])
        if self.rollout.frozen_scoring is not None:
            self.rollout.frozen_scoring.forget(samples)
        self._collector.acting.forget(samples)

    def _latest_step(self, position: int) -> int | None:
        """The last step that may train on a group; None if the schedule does not wait for groups at the lag limit."""
        schedule = self.spec.schedule
        if schedule.on_lag_limit != "wait" or schedule.membership == "planned":  # planned groups are always in time
            return None
        return latest_step(
            self.in_flight.oldest_version(position), self.in_flight.newest_version, schedule.max_policy_lag
        )

    def _record_times(self, samples: Sequence[Sample]) -> None:
        """Rollout and scoring time of the batch since the step started; it may have been generated before."""
        collector, started_s = self._collector, self.step_started_s
        finished_s = max(started_s, *(sample.finished_s for sample in samples))
        self.timings |= {
            "time_rollout_s": finished_s - started_s,
            "time_score_s": max(finished_s, *(sample.scored_s for sample in samples)) - finished_s,
            "time_trainer_idle_s": collector.waited_s,
        }
        if self.rollout.fleet.elastic:
            self.timings |= {"workers_mean": collector.dispatcher.workers_mean, "time_trainer_wait_s": collector.idle_s}

    async def publish(self, batch: BatchBuilder, trajectories: Sequence[Trajectory]) -> StepMetrics:
        """Commit the batch and publish the new weights; returns the step's metrics."""
        rollout = self.rollout
        step = self.step + 1
        version = self.trainer.version
        rollout.telemetry.progress("training", 0, 1)
        with rollout.span("training", step=step):
            metrics = await self._call_trainer(self.trainer.commit(step), f"the trainer to commit step {step}")
        rollout.telemetry.progress("training", 1, 1)
        await self._finish_in_flight(batch)
        if "time_train_s" in metrics.values:  # excludes its waits for the device
            self.timings["time_train_s"] = metrics.values["time_train_s"]
        rewards = sample_figures(trajectories)
        samples = await rollout.ledger.record_batch(
            self.in_flight, step, batch.taken, reward_mean=rewards.get("reward_mean")
        )
        self.step = step
        self.trained_leases.add(step, samples, rollout.clock.now())
        rollout.fleet.note_trained(metrics)
        await self._drop_or_restart_before_publish()
        self.in_flight.newest_version = step
        await self._unless_stopped(
            rollout.fleet.publishing.publish(
                self.trainer.version,
                finishing=lambda: self.in_flight.leases if self.spec.schedule.unfinished == "finish" else (),
            ),
            f"version {step} to be published",
        )
        if self.spec.corrects_each_publish:
            await self._compute_publish_logprobs()
        self.timings |= self.seeding.end_step(
            self.timings,
            tokens=sum(trajectory.trained_length for trajectory in trajectories),
            hand_over=self._collector.dispatcher.hand_over,
            finished_s=self.step_started_s + self.timings["time_rollout_s"],
        )
        samples.sort(key=lambda sample: sample.ordinal)
        samples = [sample for sample in samples if sample.needed]
        by_id = {trajectory.sample_id: trajectory for trajectory in trajectories}
        ordered = [by_id[sample.sample_id] for sample in samples]
        prompts = [sample.prompt for sample in samples]
        updates = {update.sample_id: update for update in metrics.updates}
        learned = [msgspec.structs.replace(one, update=updates.get(one.sample_id)) for one in ordered]
        rollout.telemetry.samples(step, learned, prompts)
        if self.watch is not None:
            self.published = list(zip(prompts, ordered, strict=True))
        counters = self.in_flight.take_counters()
        self.tokens_logged += counters.tokens_accepted
        figures = {**rewards, **batch_figures(samples, counters, version), **self.timings}
        if rollout.frozen_scoring is not None:
            figures |= rollout.frozen_scoring.take_figures()
        ahead = self.spec.schedule.max_policy_lag > 0  # then generating never pauses
        generating_s = rollout.clock.now() - self.step_started_s if ahead else self.timings["time_rollout_s"]
        if generating_s > 0:
            figures["tokens_per_s"] = counters.tokens_accepted / generating_s
        # The trainer's own measurements take precedence.
        return msgspec.structs.replace(metrics, values={**figures, **metrics.values})

    async def _finish_in_flight(self, batch: BatchBuilder) -> None:
        """With `unfinished = "wait"`: wait until every group that the published weights can generate is scored.

        Excludes groups of versions that a resumed run has not recomputed yet: they are generated after the publish.
        """
        in_flight, complete = self.in_flight, self.assembly.complete
        while self.spec.schedule.unfinished == "wait":
            done = {*batch.taken, *complete}
            waiting = (
                position
                for position, group in in_flight.groups.items()
                if position not in done and group.from_version <= in_flight.newest_version
            )
            if (position := next(waiting, None)) is None:
                break
            while position in in_flight.groups and position not in complete:
                await self._add_sample(await self._collector.next(), batch)

    async def _compute_publish_logprobs(self) -> None:
        """Compute and store the new version's logprobs of tokens in flight that older versions generated.

        Groups of replayed batches keep the logprobs stored the first time.
        """
        self.timings["time_publish_logprobs_s"] = 0.0
        version, ledger = self.trainer.version.number, self.rollout.ledger
        samples = [
            sample
            for sample in self.in_flight.missing_logprobs(version)
            if not ledger.in_stored_batch(self.in_flight.position(sample))
        ]
        if samples:
            completions = [sample.completion(sample.tokens_before(version)) for sample in samples]
            logprobs = await self._call_trainer(
                self.trainer.logprobs(completions),
                f"logprobs of {len(samples)} samples in flight under version {version}",
                timing="time_publish_logprobs_s",
            )
            await ledger.record_published(self.in_flight, version, list(zip(samples, logprobs, strict=True)))

    async def _drop_or_restart_before_publish(self) -> None:
        """Before publishing, drop or restart samples that would exceed `max_policy_lag`, and restart those that
        `schedule.unfinished` forbids to continue."""
        schedule = self.spec.schedule
        counters = self.in_flight.counters
        in_flight = self.in_flight
        for position in list(in_flight.groups):
            samples = in_flight.group(position)
            if schedule.on_lag_limit == "drop" and any(map(self._exceeds_lag, samples)):
                counters.groups_dropped += 1
                await self._drop_group(position)
                continue
            restarted = [sample for sample in samples if self._exceeds_lag(sample) or self._may_not_continue(sample)]
            await self._restart(restarted)

    async def _restart(self, samples: Sequence[Sample]) -> None:
        """Discard the tokens of samples that were not accumulated, and generate them again."""
        counters = self.in_flight.counters
        for position, of_group in groupby(samples, key=self.in_flight.position):
            restarted = list(of_group)
            counters.samples_restarted += sum(sample.length > 0 for sample in restarted)
            counters.tokens_discarded += sum(sample.generated for sample in restarted)
            self.assembly.forget(position, [sample.sample_id for sample in restarted])
            self._abort(restarted)
            await self.rollout.ledger.restart(self.in_flight, restarted)

    def _exceeds_lag(self, sample: Sample) -> bool:
        """Whether the next batch may not train on it; always False if batches wait at the lag limit."""
        return latest_step(sample.oldest_version, self.step, self.spec.schedule.max_policy_lag) <= self.step

    def _may_not_continue(self, sample: Sample) -> bool:
        started = sample.length > 0 or sample.state is SampleState.RUNNING
        return self.spec.schedule.unfinished == "restart" and sample.finish is None and started

    async def log_step(self, metrics: StepMetrics) -> None:
        """Log a step's metrics, with an evaluation if one is due; also if the evaluation is interrupted. Let the guard
        see the step."""
        figures: dict[str, float] = {}
        try:
            if self.watch is not None:
                await self.watch.collect()
                self.watch.begin(self.step, self.published, metrics.values)
                if self.step < self.spec.trainer.steps:
                    await self.watch.measure_canaries(self.step, self.trainer.version, self.collector)
            figures = await self.eval_schedule.if_due(self.step, self.trainer.version, training=self.collector)
        finally:
            self._log(metrics, figures)

    def _log(self, metrics: StepMetrics, figures: dict[str, float]) -> None:
        environments = self.rollout.environments
        counts = environments.take_counts() if environments is not None else {}
        counted = {f"env_{name}": float(count) for name, count in counts.items()}
        values = {**self.rollout.fleet.event_log.take_figures(), **counted, **metrics.values, **figures}
        self.rollout.telemetry.step(msgspec.structs.replace(metrics, values=values))

    async def checkpoint_if_due(self) -> None:
        every = self.spec.checkpoint.every_steps
        if self.step == self.spec.trainer.steps or (every and self.step % every == 0):
            await self._checkpoint()

    async def decide(self) -> None:
        """Carry out a decision of the guard; see `RewardWatch.decide`."""
        if self.watch is not None:
            await self.watch.decide(self.checkpoints)

    async def obey(self) -> None:
        """Between two steps: write the checkpoint that somebody asked for, and pause if somebody asked for that."""
        control = self.control
        if control is not None and control.poll():
            if self.step > self.checkpointed:
                await self._checkpoint()
            if control.take_waiting():
                await self._pause(control)

    async def _pause(self, control: RunControl) -> None:
        """Generate nothing until somebody resumes or stops the run. No deadline: it waits for a person; trainer.hours,
        Ctrl-C and a failing engine end it, too. Rented machines are returned when the hold time is over."""
        collector, fleet, clock = self._collector, self.rollout.fleet, self.rollout.clock
        with self.rollout.span(PAUSED, step=self.step, machines_returned=0) as fields:
            fleet.rent(more=False)
            async with collector.paused():
                started_s = clock.now()
                while (pause := control.paused) and not self.rollout.stop.is_set() and not collector.failed:
                    if clock.now() - started_s >= pause.hold_s:  # again if the provider granted one meanwhile
                        fields["machines_returned"] += fleet.return_machines("the run is paused")
                    await asyncio.sleep(POLL_S)
                    control.poll()
            fleet.rent(more=True)

    async def checkpoint_if_newer(self) -> None:
        """Before an early end: write a checkpoint of the last committed batch, unless the trainer does not respond."""
        committed = self.trainer.version.number == self.step  # False between a commit and its publish
        if self.step > self.checkpointed and self.trainer_responds and committed:
            with suppress(StopRequested):
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Write a checkpoint, and prune the ledger's entries that it covers."""
        rollout, step = self.rollout, self.step
        pinned = None
        if self.watch is not None:
            await self.watch.collect()
            pinned = self.watch.guard.earliest_onset - 1
        known = rollout.ledger.evaluations.get((step, HELD_OUT_NAME))
        score = known.result.reward_mean if known and known.result.version == self.trainer.version else None
        rollout.telemetry.progress("checkpoint", 0, 1)
        with rollout.span(CHECKPOINT, step=step):
            saving = self._checkpoint_io(
                self.checkpoints.save(step, score=score, pinned=pinned), "the checkpoint to be written"
            )
            await self._unless_stopped(saving, "the checkpoint to be written")
        self.checkpointed = step
        await rollout.ledger.prune(self.in_flight, step)

    @property
    def _collector(self) -> SampleCollector:
        assert self.collector is not None, "the loop has not started"
        return self.collector

    async def _unless_stopped(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        """Await a call that needs the trainer; raises StopRequested if it does not respond while the run is to stop."""
        lost = f"no checkpoint after step {self.checkpointed}; later steps are trained again from the journal"
        try:
            return await self.rollout.unless_stopped(call, awaited=awaited, lost=lost)
        except StopRequested:
            self.trainer_responds = False
            raise

    async def _call_trainer(self, call: Coroutine[Any, Any, T], awaited: str, *, timing: str = "time_train_s") -> T:
        """Await the trainer, and add the time to a timing."""
        rollout, started_s = self.rollout, self.rollout.clock.now()
        waiting = rollout.wait_for(
            call, awaited=awaited, look_at="the trainer's device and memory", deadline_s=rollout.timeouts.trainer_s
        )
        result = await self._unless_stopped(waiting, awaited)
        self.timings[timing] += rollout.clock.now() - started_s
        return result

    async def _checkpoint_io(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        return await self.rollout.wait_for(
            call,
            awaited=awaited,
            look_at="the disk of the run directory",
            deadline_s=self.rollout.timeouts.checkpoint_s,
        )
