"""A run under way: its parts, where it stands, and the verbs of the training loop."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from tidemill.controller.collector import RolloutContext, SampleCollector, StopRequested
from tidemill.controller.evaluation import EvalSchedule
from tidemill.controller.in_flight import InFlight, plan_groups
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.seeding import Seeding
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import Checkpoints, PromptSource, Scorer, Trainer
from tidemill.core.records import Group, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.events import CHECKPOINT

T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """The state of one `train_loop`."""

    spec: RunSpec
    source: PromptSource
    trainer: Trainer
    eval_scorer: Scorer
    checkpoints: Checkpoints
    rollout: RolloutContext
    in_flight: InFlight
    samples: SampleCollector | None = None  # of what is in flight, while the loop runs
    step: int = 0  # batches committed
    resumed_from: int = 0
    checkpointed: int = 0  # the step of the newest checkpoint
    replayed: int = 0
    already_finished: bool = False
    tokens_told: int = 0  # in the metrics of this session
    timings: dict[str, float] = field(default_factory=dict)  # of the batch that is due, in seconds
    began_s: float = 0.0  # when it fell due
    trainer_answers: bool = True  # or a run that was to end waited for it in vain
    planned: tuple[int, Sequence[tuple[int, Prompt]]] = (0, ())  # the step whose prompts were asked for last, and they
    assembly: GroupAssembly = field(init=False)
    held_out: EvalSchedule = field(init=False)
    seeding: Seeding = field(init=False)

    def __post_init__(self) -> None:
        self.assembly = GroupAssembly(self.spec.batch.group_size)
        self.held_out = EvalSchedule(
            self.spec, self.source, self.eval_scorer, self.rollout, sampling=self.in_flight.plan.sampling
        )
        self.seeding = Seeding(self.rollout.fleet, ahead=self.spec.schedule.max_policy_lag > 0)

    @property
    def tokens_generated(self) -> int:
        """By this session, those of samples that no batch has learned from yet among them."""
        return self.tokens_told + self.in_flight.counters.tokens_accepted

    async def resume(self) -> None:
        """Restore the newest checkpoint and find out what the journal has beyond it."""
        step = await self._checkpoint_io(self.checkpoints.restore_latest(), "the checkpoint to be read")
        self.step = self.resumed_from = self.checkpointed = step
        ledger, telemetry = self.rollout.ledger, self.rollout.telemetry
        self.seeding.begin()
        self.in_flight.newest_version = self.trainer.version.number
        self.replayed = await ledger.load(self.in_flight, self._prompt, after_step=step)
        telemetry.resume(step)
        self.already_finished = step >= self.spec.trainer.steps
        if self.already_finished:
            telemetry.event("already_finished", step=step, steps=self.spec.trainer.steps)
        elif self.replayed:
            telemetry.event("replay", first_step=step + 1, last_step=step + self.replayed)
        await self.rollout.fleet.publishing.publish(self.trainer.version)

    async def evaluate_start(self) -> None:
        """Where this session begins; before the first step the figures make a metrics line of their own."""
        figures = await self._held_out()
        if figures and self.step == 0:
            self._tell(StepMetrics(step=0, version=self.trainer.version, optimizer_steps=0, values=figures), {})

    async def begin_batch(self) -> BatchBuilder:
        """The next step's batch: what the journal says it was, or what is to be put together now."""
        if self.rollout.stop.is_set():
            raise StopRequested
        batch, schedule = self.spec.batch, self.spec.schedule
        self.timings, self.began_s = {"time_train_s": 0.0}, self.rollout.clock.now()
        recorded = self.rollout.ledger.learned.get(self.step + 1)
        forming = BatchBuilder(
            self.step + 1, batch.prompts, membership=schedule.membership, order=batch.order, recorded=recorded
        )
        await self._admit(0)
        window_s = self.seeding.begin_step()
        if window_s is not None:
            self.timings["seed_window_s"] = window_s
        self._collection.begin_step(
            samples=forming.size * batch.group_size,
            window_s=math.inf if window_s is None else window_s,
            balance=self.seeding.balance,
        )
        return forming

    async def _admit(self, taken: int) -> None:
        """Begin as many groups as the policy lag allows, `taken` of the due batch's being learned from."""
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
            self._collection.look()

    def _prompt(self, position: int) -> tuple[int, Prompt]:
        """The (epoch, prompt) of a group: the prompts of all steps, one after another."""
        step, place = position // self.spec.batch.prompts + 1, position % self.spec.batch.prompts
        if step != self.planned[0]:
            self.planned = step, self.source.train_batch(step)
        return self.planned[1][place]

    async def learn_from(self, forming: BatchBuilder) -> list[Trajectory]:
        """Take groups as they complete, until the batch is full; its trajectories, once the trainer has them all.

        Consumes scored samples, produces gradients; waits for samples, and is unblocked by the last sample of the next
        group being scored.
        """
        rollout, learned, step = self.rollout, list[Trajectory](), self.step + 1
        with rollout.span("rollout", step=step) as fields:
            news = True
            while not forming.full:
                if news and not rollout.stop.is_set():  # once stopped, what is in flight is only journalled
                    learned += await self._learn_what_is_there(forming)
                if not forming.full:
                    news = await self._add(await self._collection.next(), forming)
            if rollout.stop.is_set():
                raise StopRequested
            samples = [sample for position in forming.taken for sample in self.in_flight.group(position)]
            self._keep_time(samples)
            tokens = self.in_flight.counters.tokens_accepted
            fields |= {"samples": len(learned), "tokens": tokens, "recovered": sum(s.recovered for s in samples)}
        return learned

    async def _learn_what_is_there(self, forming: BatchBuilder) -> list[Trajectory]:
        """Give the trainer every complete group whose turn it is."""
        learned = list[Trajectory]()
        while self._may_take(forming):  # a look at all groups takes time where there are many
            taken = set(forming.taken)
            untaken = {position: self._latest(position) for position in self.in_flight.groups if position not in taken}
            chosen = forming.take(self.assembly.complete.keys(), untaken)
            if not chosen:
                break
            for position in chosen:
                trajectories = self.assembly.complete.pop(position)
                await self._accumulate(position, trajectories)
                learned += trajectories
                if forming.full and position == chosen[-1]:
                    self.rollout.telemetry.progress("training", len(learned), len(learned))
        return learned

    def _may_take(self, forming: BatchBuilder) -> bool:
        """Whether a look at all groups could find any to take."""
        if forming.full or not forming.may_take(len(self.assembly.complete)):
            return False
        position = forming.held_up_by
        if position is None or position not in self.in_flight.groups or position in self.assembly.complete:
            return True
        return not forming.is_last_for(self._latest(position))

    async def _accumulate(self, position: int, trajectories: Sequence[Trajectory]) -> None:
        version = self.trainer.version.number
        lag = max((version - t.versions[0].version.number for t in trajectories if t.versions), default=0)
        if lag > self.spec.schedule.max_policy_lag:
            raise TidemillError(f"group {position} is {lag} versions old: the schedule let it pass its limit")
        group = Group(
            position=position,
            prompt_id=trajectories[0].sample_id.prompt_id,
            trajectories=tuple(
                msgspec.structs.replace(one, publish_logprobs=self.in_flight[one.sample_id].publish_logprobs)
                for one in trajectories
            ),
        )
        await self._train(self.trainer.accumulate(group), f"the trainer to learn from group {position}")

    async def _add(self, trajectory: Trajectory, forming: BatchBuilder) -> bool:
        """Take in a scored sample; says whether it completed its group. A group without signal is replaced, where the
        algorithm wants that."""
        position = self.in_flight[trajectory.sample_id].ordinal // self.spec.batch.group_size
        if not self.assembly.add(position, trajectory):
            return False
        if not self.spec.algorithm.dynamic_sampling or self.rollout.ledger.has_learned_from(position):
            return True
        counters, most = self.in_flight.counters, self.spec.algorithm.max_redraws * self.spec.batch.prompts
        if counters.groups_redrawn < most and not has_signal(self.assembly.complete[position]):
            counters.groups_redrawn += 1
            await self._give_up(position)
            await self._admit(len(forming.taken))
        return True

    async def _give_up(self, position: int) -> None:
        self.assembly.forget(position)
        samples = self.in_flight.group(position)
        self._call_back(samples)
        self._let_readers_forget(samples)
        await self.rollout.ledger.drop(self.in_flight, position)
        self.in_flight.counters.tokens_discarded += sum(sample.length for sample in samples)

    def _call_back(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.state is SampleState.RUNNING:
                self.rollout.fleet.abort(sample.lease_id, [sample.sample_id])

    def _let_readers_forget(self, samples: Sequence[Sample]) -> None:
        if self.rollout.reading is not None:
            self.rollout.reading.forget(samples)

    def _latest(self, position: int) -> int | None:
        """The last step that may learn from a group, where the schedule is to wait for it; None for any."""
        schedule = self.spec.schedule
        if schedule.on_lag_limit != "wait" or schedule.membership == "planned":  # which is in time by itself
            return None
        return latest_step(
            self.in_flight.oldest_version(position), self.in_flight.newest_version, schedule.max_policy_lag
        )

    def _keep_time(self, samples: Sequence[Sample]) -> None:
        """How long the step's samples took, from when it fell due; by then those of a run ahead may be done."""
        collection, began_s = self._collection, self.began_s
        finished_s = max(began_s, *(sample.finished_s for sample in samples))
        self.timings |= {
            "time_rollout_s": finished_s - began_s,
            "time_score_s": max(finished_s, *(sample.scored_s for sample in samples)) - finished_s,
            "time_trainer_idle_s": collection.waited_s,
        }
        if self.rollout.fleet.elastic:
            self.timings |= {"workers_mean": collection.workers_mean, "time_trainer_wait_s": collection.idle_s}

    async def publish(self, forming: BatchBuilder, trajectories: Sequence[Trajectory]) -> StepMetrics:
        """Commit the batch and give everybody the new weights; returns what the step was like."""
        rollout, step, version = self.rollout, self.step + 1, self.trainer.version
        with rollout.span("training", step=step):
            metrics = await self._train(self.trainer.commit(step), f"the trainer to commit step {step}")
        await self._finish_under_way(forming)
        if "time_train_s" in metrics.values:  # without its waits for the device
            self.timings["time_train_s"] = metrics.values["time_train_s"]
        told = sample_figures(trajectories)
        samples = await rollout.ledger.note_learned(
            self.in_flight, step, forming.taken, reward_mean=told.get("reward_mean")
        )
        self.step = step
        await self._make_way()
        self.in_flight.newest_version = step
        await self._of_trainer(
            rollout.fleet.publishing.publish(self.trainer.version, finishing=self._finishing),
            f"version {step} to be published",
        )
        if self.spec.corrects_each_publish:
            await self._note_logprobs()
        self.timings |= self.seeding.learn(
            self.timings,
            tokens=sum(trajectory.completion_length for trajectory in trajectories),
            hand_over=self._collection.handed_over,
            finished_s=self.began_s + self.timings["time_rollout_s"],
        )
        samples.sort(key=lambda sample: sample.ordinal)
        by_id = {trajectory.sample_id: trajectory for trajectory in trajectories}
        ordered = [by_id[sample.sample_id] for sample in samples]
        rollout.telemetry.samples(step, ordered, [sample.prompt for sample in samples])
        counters = self.in_flight.take_counters()
        self.tokens_told += counters.tokens_accepted
        figures = {**told, **batch_figures(samples, counters, version), **self.timings}
        if rollout.reading is not None:
            figures |= rollout.reading.take_figures()
        ahead = self.spec.schedule.max_policy_lag > 0  # then there is no end to generating
        generating_s = rollout.clock.now() - self.began_s if ahead else self.timings["time_rollout_s"]
        if generating_s > 0:
            figures["tokens_per_s"] = counters.tokens_accepted / generating_s
        # Where both know a number, the trainer's counts: it measures on its own thread.
        return msgspec.structs.replace(metrics, values={**figures, **metrics.values})

    async def _finish_under_way(self, forming: BatchBuilder) -> None:
        """With `unfinished = "wait"`: wait until every group that the published weights can generate is scored."""
        while self.spec.schedule.unfinished == "wait" and (position := self._under_way(forming)) is not None:
            while position in self.in_flight.groups and position not in self.assembly.complete:
                await self._add(await self._collection.next(), forming)

    def _under_way(self, forming: BatchBuilder) -> int | None:
        """A group beside the batch that is not scored yet, or None. After a restart, groups begun under versions that
        have not been made again do not count: they cannot be generated before the publish."""
        newest, done = self.in_flight.newest_version, {*forming.taken, *self.assembly.complete}
        groups = self.in_flight.groups.items()
        return next(
            (position for position, group in groups if position not in done and group.from_version <= newest), None
        )

    def _finishing(self) -> Sequence[str]:
        """Leases whose workers go on under their weights until they have nothing left."""
        return self.in_flight.leases if self.spec.schedule.unfinished == "finish" else ()

    async def _note_logprobs(self) -> None:
        """Note what the new weights say of the tokens in flight that older ones made.

        Batches that the journal has are learned again as they were: with what was noted the first time, and no more.
        """
        self.timings["time_publish_logprobs_s"] = 0.0
        version, ledger = self.trainer.version.number, self.rollout.ledger
        samples = [
            sample
            for sample in self.in_flight.without_logprobs_of(version)
            if not ledger.has_learned_from(sample.ordinal // self.spec.batch.group_size)
        ]
        if samples:
            completions = [sample.completion(sample.made_before(version)) for sample in samples]
            logprobs = await self._train(
                self.trainer.logprobs(completions),
                f"logprobs of {len(samples)} samples in flight under version {version}",
                counted_as="time_publish_logprobs_s",
            )
            await ledger.note_published(self.in_flight, version, list(zip(samples, logprobs, strict=True)))

    async def _make_way(self) -> None:
        """Before a publish: what the new weights would make too old is given up or begins again, and so does what the
        schedule does not let go on under them."""
        schedule, counters, in_flight = self.spec.schedule, self.in_flight.counters, self.in_flight
        for position in list(in_flight.groups):
            samples = in_flight.group(position)
            if schedule.on_lag_limit == "drop" and any(map(self._too_old, samples)):
                counters.groups_dropped += 1
                await self._give_up(position)
                continue
            again = [sample for sample in samples if self._too_old(sample) or self._begins_again(sample)]
            if again:
                counters.samples_restarted += sum(sample.length > 0 for sample in again)
                counters.tokens_discarded += sum(sample.length for sample in again)
                self.assembly.forget(position, [sample.sample_id for sample in again])
                self._call_back(again)
                self._let_readers_forget(again)
                await self.rollout.ledger.restart(in_flight, again)

    def _too_old(self, sample: Sample) -> bool:
        """Whether the next batch may not learn from it; never so where batches wait."""
        return latest_step(sample.oldest_version, self.step, self.spec.schedule.max_policy_lag) <= self.step

    def _begins_again(self, sample: Sample) -> bool:
        begun = sample.length > 0 or sample.state is SampleState.RUNNING
        return self.spec.schedule.unfinished == "restart" and sample.finish is None and begun

    @property
    def _collection(self) -> SampleCollector:
        assert self.samples is not None, "the loop has not begun"
        return self.samples

    async def _held_out(self) -> dict[str, float]:
        return await self.held_out.if_due(self.step, self.trainer.version, training=self.samples)

    async def tell(self, metrics: StepMetrics) -> None:
        """One line of metrics, with an evaluation's figures if one is due; written even if that is cut short."""
        figures: dict[str, float] = {}
        try:
            figures = await self._held_out()
        finally:
            self._tell(metrics, figures)

    def _tell(self, metrics: StepMetrics, figures: dict[str, float]) -> None:
        happened = self.rollout.fleet.event_log.take_figures()
        values = {**happened, **metrics.values, **figures}
        self.rollout.telemetry.step(msgspec.structs.replace(metrics, values=values))

    async def checkpoint_if_due(self) -> None:
        every = self.spec.checkpoint.every_steps
        if self.step == self.spec.trainer.steps or (every and self.step % every == 0):
            await self._checkpoint()

    async def checkpoint_if_newer(self) -> None:
        """Before an early end; without it if the trainer does not answer in time."""
        committed = self.trainer.version.number == self.step  # or it stopped between a commit and its publish
        if self.step > self.checkpointed and self.trainer_answers and committed:
            with suppress(StopRequested):
                await self._checkpoint()

    async def _of_trainer(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        """Await what only the trainer can do.

        Raises:
            StopRequested: the run is to end, and the trainer does not answer in time.
        """
        lost = f"there is no checkpoint after step {self.checkpointed}; what came later is learned again"
        try:
            return await self.rollout.unless_stopped(call, awaited=awaited, lost=lost)
        except StopRequested:
            self.trainer_answers = False
            raise

    async def _checkpoint(self) -> None:
        """Write the trainer's state; what the ledger has up to here is then superfluous."""
        rollout, step = self.rollout, self.step
        known = rollout.ledger.evaluations.get(step)
        score = known.result.reward_mean if known and known.result.version == self.trainer.version else None
        rollout.telemetry.progress("checkpoint", 0, 1)
        with rollout.span(CHECKPOINT, step=step):
            saving = self._checkpoint_io(self.checkpoints.save(step, score=score), "the checkpoint to be written")
            await self._of_trainer(saving, "the checkpoint to be written")
        self.checkpointed = step
        await rollout.ledger.prune(self.in_flight, step)

    async def _train(self, call: Coroutine[Any, Any, T], awaited: str, *, counted_as: str = "time_train_s") -> T:
        """Await the trainer, and count how long."""
        rollout, began = self.rollout, self.rollout.clock.now()
        waiting = rollout.patiently(
            call, awaited=awaited, look_at="the trainer's device and memory", deadline_s=rollout.timeouts.trainer_s
        )
        result = await self._of_trainer(waiting, awaited)
        self.timings[counted_as] += rollout.clock.now() - began
        return result

    async def _checkpoint_io(self, call: Coroutine[Any, Any, T], awaited: str) -> T:
        return await self.rollout.patiently(
            call,
            awaited=awaited,
            look_at="the disk of the run directory",
            deadline_s=self.rollout.timeouts.checkpoint_s,
        )
