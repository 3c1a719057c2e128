"""Invariants of scoring, training, publishing and logging."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tests.fault_simulation.episodes import told_of
from tests.fault_simulation.invariants import Invariants, Violation, require
from tests.fault_simulation.journal_reading import DurableSample
from tidemill.config.schema import RunSpec
from tidemill.controller.in_flight import InFlight
from tidemill.controller.loop import LoopResult
from tidemill.core.records import Group, PolicyVersion, Prompt, Reward, StepMetrics, Trajectory
from tidemill.sim.simulated_trainer import publish_logprobs

TRAIN = "train"


class TrainingInvariants:
    """Checks the batches in the trainer's weights over all lives of a run.

    Args:
        positions: the position of a group by (epoch, prompt id).
        reward: the expected reward of a trajectory.
    """

    def __init__(
        self, invariants: Invariants, positions: Mapping[tuple[int, str], int], reward: Callable[[Trajectory], Reward]
    ) -> None:
        self.history: dict[int, tuple[int, ...]] = {}  # trained groups by step
        self.dropped: set[int] = set()
        self.dropped_at: dict[int, set[int]] = {}  # before a checkpoint, by its step
        self._invariants, self._positions, self._reward = invariants, positions, reward
        self._spec: RunSpec = invariants.spec
        self._batch: list[int] = []
        self._lengths: list[int] = []  # tokens of the batch's completions
        self._equal: list[int] = []  # groups of the batch whose valid rewards are equal
        self._may_be_equal = False  # dynamic sampling reached its limit in this life
        self._to_restart: dict[int, int] = {}  # restarts, by ordinal, of samples in flight at the last commit
        self._told = 0  # step of the last metrics line
        self._resumed_from = 0

    def restored(self, step: int) -> None:
        """The weights were restored from a checkpoint."""
        self.history = {done: positions for done, positions in self.history.items() if done <= step}
        self._batch, self._lengths, self._told, self._resumed_from = [], [], step, step
        self._equal, self._may_be_equal, self._to_restart = [], False, {}

    def returns(self, step: int) -> None:
        """The run returns to a checkpoint: what was dropped after it is to be trained on."""
        self.history = {done: positions for done, positions in self.history.items() if done <= step}
        self.dropped = set(self.dropped_at.get(step, ()))
        self._invariants.newest = step

    @property
    def learned(self) -> set[int]:
        return {position for positions in self.history.values() for position in positions}

    def judged(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """A sample goes to the scorer: its finish must be durable."""
        require(trajectory.sample_id.prompt_id == prompt.prompt_id, f"{trajectory.sample_id} has another prompt")
        require(trajectory.prompt_ids == prompt.token_ids, f"{trajectory.sample_id} has other prompt tokens")
        if trajectory.sample_id.purpose == TRAIN and self._position(trajectory) >= 0:  # else it was returned meanwhile
            self._check_durable(trajectory)

    def learns(self, group: Group, version: PolicyVersion) -> None:
        """A group goes to the trainer at `version`."""
        position = self._position(group.trajectories[0])
        due = version.number + 1
        name = f"group {position}, trained in step {due},"
        require(position not in self.learned and position not in self._batch, f"{name} was trained before")
        require(group.position == position, f"{name} has position {group.position}")
        indices = [trajectory.sample_id.index for trajectory in group.trajectories]
        size, drawn = self._spec.batch.group_size, self._spec.batch.group_size + self._spec.schedule.extra_samples
        right = len(indices) == size and indices == sorted(set(indices) & set(range(drawn)))
        require(right, f"{name} has samples {indices}")
        self._check_needed(group, name)
        for trajectory in group.trajectories:
            require(self._position(trajectory) == position, f"{name} has a sample of another group")
            self._check_learned(trajectory, version, name)
        self._batch.append(position)
        if len({each.reward.value for each in group.trajectories if each.reward and each.reward.valid}) < 2:
            self._equal.append(position)
        self._lengths += [trajectory.trained_length for trajectory in group.trajectories]

    def _check_needed(self, group: Group, name: str) -> None:
        in_flight = self._invariants.in_flight
        assert in_flight is not None
        aside = [one.sample_id.index for one in group.trajectories if not in_flight[one.sample_id].needed]
        require(not aside, f"{name} has samples {aside}, which were set aside")

    def _check_learned(self, trajectory: Trajectory, version: PolicyVersion, name: str) -> None:
        purpose = trajectory.sample_id.purpose
        require(purpose == TRAIN, f"{name} has a sample of {purpose}")
        self._check_tokens(trajectory, self._spec.sampling.max_new_tokens)
        lags = [version.number - run.version.number for run in trajectory.versions]
        right = all(0 <= lag <= self._spec.schedule.max_policy_lag for lag in lags)
        require(right, f"{name} has a sample that lags by {lags} versions")
        reward = self._reward(trajectory)
        require(trajectory.reward == reward, f"{name} has a wrong reward: {trajectory.reward}")
        require(trajectory.weight == float(reward.valid), f"{name} has weight {trajectory.weight}")
        require(not (trajectory.fault and reward.valid), f"{name} is trained on a fault")
        self._check_durable(trajectory)
        kept = self._durable(trajectory)
        require(kept.reward == reward, f"{name} was trained before its reward was durable")
        self._check_published(trajectory, kept, name)

    def _check_tokens(self, trajectory: Trajectory, limit: int) -> None:
        """Check a finished sample: its tokens, versions and end; of an episode also its turns and segments."""
        invariants, sample_id = self._invariants, trajectory.sample_id
        if not invariants.episodes:
            invariants.check_tokens(
                sample_id, trajectory.completion_ids, trajectory.rollout_logprobs, trajectory.versions
            )
            invariants.check_end(sample_id, trajectory.completion_length, trajectory.finish, limit)
            return
        walked = invariants.check_episode(sample_id, told_of(trajectory), limit)
        require(
            (walked.stage, walked.finish, walked.segments) == ("ended", trajectory.finish, trajectory.segments),
            f"{sample_id} ended as {trajectory.finish} with {trajectory.segments}, expected {walked}",
        )

    def _check_published(self, trajectory: Trajectory, kept: DurableSample, name: str) -> None:
        """Check logprobs at each publish, and at generation for later tokens."""
        ids, rollout = trajectory.completion_ids, trajectory.rollout_logprobs
        for (number, known), said in zip(sorted(kept.published.items()), trajectory.publish_logprobs, strict=True):
            right = publish_logprobs(number, ids[: len(known)])
            require(said == right + rollout[len(known) :], f"{name} has wrong logprobs under version {number}")

    def committed(self, step: int) -> None:
        """A batch was committed."""
        batch, self._batch = tuple(self._batch), []
        size, recorded = self._spec.batch.prompts, self._invariants.durable.learned.get(step)
        require(step == max(self.history, default=0) + 1, f"step {step} follows {sorted(self.history)}")
        require(len(batch) == size, f"batch {step} has {len(batch)} groups, not {size}")
        if recorded is not None:
            require(batch == recorded, f"batch {step} was {recorded}, now {batch}")
        elif self._spec.batch.order == "canonical" and self._invariants.tail is None:
            require(list(batch) == sorted(batch), f"batch {step} is not ordered: {batch}")
        if self._invariants.tail is not None:
            self._invariants.tail.committed(step, batch, self._invariants.durable)
        elif self._nothing_is_replaced and self._spec.schedule.membership == "planned":
            planned = set(range((step - 1) * size, step * size))
            require(set(batch) == planned, f"batch {step} is {batch}, planned {planned}")
        if recorded is None and self._invariants.tail is None:
            self._check_renewed(step, batch)
        else:
            self._equal = []  # chosen in an earlier life, or checked with the round
        self.history[step] = batch
        self._invariants.newest = max(self._invariants.newest, step)

    @property
    def _nothing_is_replaced(self) -> bool:
        return not self._spec.algorithm.dynamic_sampling and self._spec.schedule.on_lag_limit != "drop"

    def _check_renewed(self, step: int, batch: Sequence[int]) -> None:
        """Check the share of groups started under the newest weights."""
        wanted = math.ceil(self._spec.schedule.fresh_fraction * self._spec.batch.prompts)
        fresh = sum(self._invariants.durable.group(position)[0].from_version == step - 1 for position in batch)
        require(fresh >= wanted, f"batch {step} has {fresh} fresh groups, expected {wanted}")

    def recorded(self, in_flight: InFlight) -> None:
        """A batch was recorded: samples that have begun may have to start again."""
        if self._spec.schedule.unfinished == "restart":
            begun = [sample for sample in in_flight if sample.length and sample.finish is None]
            self._to_restart = {sample.ordinal: sample.restarts for sample in begun}

    def _check_restarted(self) -> None:
        waiting, self._to_restart = self._to_restart, {}
        for sample in self._invariants.in_flight or ():
            if sample.finish is None and sample.length and sample.ordinal in waiting:
                again = sample.restarts > waiting[sample.ordinal]
                require(again, f"{sample.ordinal} did not start again before a publish")

    def published(self, version: PolicyVersion) -> None:
        """A version is published: its batch must be durable."""
        step = version.number
        self._check_restarted()
        if step > self._resumed_from:
            known = self._invariants.durable.learned.get(step)
            require(known == self.history[step], f"version {step} is published before its batch is durable: {known}")

    def told(self, metrics: StepMetrics) -> None:
        if metrics.step == 0:
            return
        require(metrics.step == self._told + 1, f"step {metrics.step} is logged after step {self._told}")
        self._told = metrics.step
        self._check_redrawn(metrics)
        lengths, self._lengths = self._lengths, []
        for name, right in (("samples", len(lengths)), ("tokens_generated", sum(lengths))):
            said = metrics.values[name]
            require(said == right, f"step {metrics.step} has {name} = {said}, expected {right}")

    def _check_redrawn(self, metrics: StepMetrics) -> None:
        """Dynamic sampling replaces groups without a signal, up to a limit per step."""
        equal, self._equal, algorithm = self._equal, [], self._spec.algorithm
        most = algorithm.max_redraws * self._spec.batch.prompts
        self._may_be_equal |= not algorithm.dynamic_sampling or metrics.values["groups_redrawn"] >= most
        require(
            self._may_be_equal or not equal, f"step {metrics.step} trains on groups {equal}, whose rewards are equal"
        )

    def told_samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        purpose = trajectories[0].sample_id.purpose
        if purpose == TRAIN:
            groups = [self._position(trajectory) for trajectory in trajectories]
            right = sorted(position for position in self.history[step] for _ in range(self._spec.batch.group_size))
            require(groups == right, f"samples of groups {groups} are logged for step {step}, expected {right}")
            return
        names = {trajectory.sample_id.prompt_id for trajectory in trajectories}
        require(len(names) == len(trajectories) == self._spec.eval.prompts, f"step {step} evaluates {sorted(names)}")
        limit = self._spec.eval.max_new_tokens or self._spec.sampling.max_new_tokens
        for trajectory in trajectories:
            numbers = {run.version.number for run in trajectory.versions}
            require(numbers == {step}, f"step {step} is evaluated with versions {numbers}")
            self._check_tokens(trajectory, limit)

    def finished(self, result: LoopResult, steps: int) -> None:
        """The run finished: no started group may be missing."""
        durable = self._invariants.durable
        require(
            result.steps == steps and not result.interrupted, f"the run ended after {result.steps} of {steps} steps"
        )
        require(sorted(self.history) == list(range(1, steps + 1)), f"there are steps {sorted(self.history)}")
        if self._invariants.tail is not None:
            self._invariants.tail.finished(steps, durable)
            return
        accounted = self.learned | self.dropped | durable.positions
        everything = set(range(max(accounted) + 1))
        require(accounted == everything, f"groups {sorted(everything - accounted)} were lost")

    def _position(self, trajectory: Trajectory) -> int:
        place = self._positions[trajectory.sample_id.epoch, trajectory.sample_id.prompt_id]
        if self._invariants.tail is None:
            return place
        durable = self._invariants.durable
        return next((at for at in durable.positions if durable.groups[at].place == place), -1)

    def _durable(self, trajectory: Trajectory) -> DurableSample:
        drawn = self._spec.batch.group_size + self._spec.schedule.extra_samples
        ordinal = self._position(trajectory) * drawn + trajectory.sample_id.index
        kept = self._invariants.durable.samples.get(ordinal)
        if kept is None:
            raise Violation(f"{trajectory.sample_id} is used but not in the journal")
        return kept

    def _check_durable(self, trajectory: Trajectory) -> None:
        kept = self._durable(trajectory)
        right = (kept.token_ids, kept.finish) == (trajectory.completion_ids, trajectory.finish)
        require(right, f"{trajectory.sample_id} is used before it is durable")
