"""The policy trainer: accumulates gradients of groups, and publishes one version per batch.

Minibatch 0 is trained on while the rest of the batch is still being generated. Later minibatches wait for `commit`,
because an optimizer step changes the parameters that the engine reads. If advantages depend on the whole batch,
all minibatches wait. Gradients accumulate as sums and are divided once, before clipping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from tidemill.algos.corrections import interpolated_proximal
from tidemill.algos.kl import adapted_beta
from tidemill.algos.losses import denominator, token_weights
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import Compute
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, SampleUpdate, StepMetrics
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.token_logprobs import Statistic
from tidemill.models.tree_forward import TreeForward, TreeOutput
from tidemill.models.weights_digest import weights_digest
from tidemill.trainer.advantage_estimator import AdvantageEstimator, GroupAdvantages
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.critic import Critic, Deferred
from tidemill.trainer.packing import FloatArray, Microbatch, WeightedSample, missing_reference, pack, split_by_tokens
from tidemill.trainer.scoring import completion_logprobs, token_logprobs
from tidemill.trainer.update import (
    Minibatch,
    UpdateSums,
    build_optimizer,
    clip_and_step,
    learning_rate,
    own_gradient_norm,
    policy_outcome,
    sample_update,
    set_learning_rate,
    user_losses,
)

CRITIC_FOLDER = "critic"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """A complete group whose advantages are not computed yet."""

    number: int  # in the batch
    minibatch: int
    group: Group
    valid: list[bool]  # which samples count
    values: Deferred[list[FloatArray]] | None  # requested from a critic in another process


class PolicyTrainer:
    """Implements `core.protocols.Trainer` on one device, or one rank of several.

    With several ranks, every rank is given the same groups and makes the same decisions. Microbatches are computed in
    rounds, one on each rank; in the last round of a minibatch, ranks without one compute the first with weights of 0.

    Args:
        forward: its model is trained in place; the embedded engine reads the same parameters.
        reference: frozen model, needed if `algorithm.kl_beta` is positive and samples have no reference logprobs.
        critic: needed if `algorithm.advantage` is "gae".
        source: the folder of the model; its tokenizer is copied into checkpoints.
        compute: runs the work; the public coroutines wait for it.

    Raises:
        UserError: the algorithm needs a critic and there is none.
    """

    def __init__(
        self,
        forward: TreeForward,
        spec: RunSpec,
        *,
        compute: Compute,
        source: Path,
        reference: TreeForward | None = None,
        critic: Critic | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.model, self.spec = forward.model, spec
        self.optimizer = build_optimizer(forward, spec.optimizer)
        self.schedule_steps = spec.schedule_steps
        self.critic_steps = 0
        self.kl_beta = spec.algorithm.kl_beta
        details, logged = spec.telemetry.token_details, spec.telemetry.samples_per_step
        self._most_details = min(details, logged or details)
        self._compute, self._source = compute, source
        self._forward, self._reference, self._ranks = forward, reference, ranks
        self._device = forward.device
        self._logits_budget_bytes = spec.trainer.logits_bytes(on_gpu=self._device.type == "cuda")
        if spec.algorithm.needs_critic and critic is None:
            raise UserError(
                f'algorithm.advantage = "{spec.algorithm.advantage}" needs a critic, and this trainer has none',
                where="algorithm.advantage",
                hint='pass a critic, or use an advantage without one: "grpo", "rloo", "reinforce_pp", ...',
            )
        self._critic = critic if spec.algorithm.needs_critic else None
        self._remote_critic = self._critic is not None and self._critic.remote
        self._advantages = AdvantageEstimator(
            spec,
            self._device,
            reference=self._ref_logprobs if reference is not None else None,
            values=self._critic.values if self._critic else None,
            request_early=self._remote_critic,
            ranks=ranks,
        )
        self._user_losses = user_losses(spec.algorithm, has_reference=spec.algorithm.kl_beta > 0)
        self.version = PolicyVersion(number=0, digest=weights_digest(self.model, ranks))
        self._start_batch()

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.add_group(group))

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self.finish_batch(step))

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._compute.run(
            lambda: completion_logprobs(
                self._forward,
                completions,
                budget=self.spec.batch.microbatch_budget,
                temperature=self.spec.sampling.temperature,
                logits_budget_bytes=self._logits_budget_bytes,
            )
        )

    def add_group(self, group: Group) -> None:
        """Add a complete group, and train on full microbatches unless advantages depend on the whole batch."""
        started = _clocks()
        number = self._groups
        self._groups += 1
        index = min(number * self.spec.batch.minibatches // self.spec.batch.prompts, len(self._minibatches) - 1)
        valid = [t.weight > 0 and t.reward is not None and t.reward.valid for t in group.trajectories]
        requested = self._advantages.request_values(group, valid)
        values = None if requested is None else partial(self._wait_for_critic, requested)
        self._pending.append(PendingGroup(number=number, minibatch=index, group=group, valid=valid, values=values))
        if self._advantages.scope != "batch":
            # A remote critic computes the values of the newest group while the group before is trained on.
            self._process_pending(all_but=int(self._remote_critic))
        self._add_time(started)

    def finish_batch(self, step: int) -> StepMetrics:
        """Train on the rest of the batch, take its optimizer steps, and create the next version."""
        started = _clocks()
        self._process_pending()
        for index, minibatch in enumerate(self._minibatches):
            if rest := minibatch.flush():
                self._add_microbatch(minibatch, rest, backward=index == 0)
            self._run_round(minibatch, backward=index == 0)
        self._optimize()
        self._add_time(started)
        started = _clocks()
        self._sums.add_ranks(self._ranks)
        steps_taken = self._sums.optimizer_steps
        digest = weights_digest(self.model, self._ranks) if steps_taken else self.version.digest
        self.version = PolicyVersion(number=step, digest=digest)
        self._sums.critic = [self._wait_for_critic(metrics) for metrics in self._critic_metrics]
        self._add_time(started)
        values, mismatch_of, of_ranks = self._sums.values(), self._sums.mismatch_by_lease(), self._sums.of_ranks
        updates = {update.sample_id: update for update in self._updates}
        for each, (logprobs, entropies) in self._sums.details.items():
            updates[each] = msgspec.structs.replace(updates[each], trainer_logprobs=logprobs, entropies=entropies)
        kl_target, kl_ref = self.spec.algorithm.kl_target, values.get("kl_ref")
        if kl_target is not None and kl_ref is not None:
            self.kl_beta = adapted_beta(self.kl_beta, kl_ref, kl_target)
        self._start_batch()
        return StepMetrics(
            step=step,
            version=self.version,
            optimizer_steps=steps_taken,
            values=values,
            mismatch=mismatch_of,
            ranks=of_ranks,
            updates=tuple(updates.values()),
        )

    def _add_time(self, since: tuple[float, float]) -> None:
        wall_s, cpu_s = _clocks()
        self._sums.train_s += wall_s - since[0]
        self._sums.cpu_s += cpu_s - since[1]

    def _start_batch(self) -> None:
        self._groups = 0
        self._sums = UpdateSums(kl_beta=self.kl_beta, critic_wait_s=0.0 if self._remote_critic else None)
        # Of the current minibatch.
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._minibatches = [Minibatch() for _ in range(self.spec.batch.minibatches)]
        self._pending: list[PendingGroup] = []
        self._updates: list[SampleUpdate] = []
        self._detailed = 0  # samples whose tokens are logged
        self._critic_metrics: list[Deferred[dict[str, float]]] = []  # of each critic step
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _critic_warmup(self) -> bool:
        """Whether only the critic is trained."""
        return self._critic is not None and self.critic_steps < self.spec.critic.warmup_steps

    def _process_pending(self, all_but: int = 0) -> None:
        """Compute the advantages of pending groups, except the newest `all_but`, and add them to their minibatches."""
        ready = len(self._pending) - all_but
        pending, self._pending = self._pending[:ready], self._pending[ready:]
        siblings = 2 if self.spec.compares_siblings else 1
        usable = [each for each in pending if sum(each.valid) >= siblings]
        self._sums.groups_skipped_invalid += len(pending) - len(usable)
        advantages = self._advantages.estimate(
            [each.group for each in usable],
            [each.valid for each in usable],
            kl_beta=self.kl_beta,
            step=self.version.number + 1,
            values=[each.values for each in usable],
        )
        for each, group_advantages in zip(usable, advantages, strict=True):
            signal = group_advantages.signal or not self.spec.compares_siblings
            self._updates += [sample_update(sample, signal=signal) for sample in group_advantages.samples]
            samples = self._weighted_samples(each, group_advantages)
            self._add_samples(each.minibatch, self._choose_details(samples, each.number))

    def _choose_details(self, samples: list[WeightedSample], number: int) -> list[WeightedSample]:
        """Mark the samples of the batch's group `number` whose tokens are logged, if they have a gradient: they are
        spread over the first three quarters of the batch. The rest makes up for groups without gradient."""
        limit = self._most_details
        due = min(limit, 4 * limit * (number + 1) // (3 * self.spec.batch.prompts)) - self._detailed
        size = min(due, len(samples))
        indices = [(number + at * len(samples) // size) % len(samples) for at in range(size)]
        self._detailed += size
        return [replace(each, detailed=index in indices) for index, each in enumerate(samples)]

    def _wait_for_critic(self, deferred: Deferred[T]) -> T:
        started = time.perf_counter()
        result = deferred()
        if self._sums.critic_wait_s is not None:
            self._sums.critic_wait_s += time.perf_counter() - started
        return result

    def _weighted_samples(self, pending: PendingGroup, advantages: GroupAdvantages) -> list[WeightedSample]:
        """The valid samples of a group with token weights; empty if they have no gradient.

        Skipped groups count in the denominator, so that skipping does not change the mean.
        """
        algorithm = self.spec.algorithm
        trajectories = zip(pending.group.trajectories, pending.valid, strict=True)
        lengths = [trajectory.trained_length if valid else 0 for trajectory, valid in trajectories]
        constant = self.spec.sampling.max_new_tokens
        self._minibatches[pending.minibatch].denominator += denominator(lengths, algorithm.normalize, constant=constant)
        if self.spec.compares_siblings and not advantages.signal:
            self._sums.groups_without_signal += 1
            kl_in_loss = algorithm.kl_beta > 0 and algorithm.kl_in == "loss"
            # These have a gradient without advantages; whitening changes advantages of 0.
            if not (kl_in_loss or algorithm.entropy_bonus > 0 or algorithm.whiten or algorithm.has_user_loss):
                return []
        weights = [weight for weight in token_weights(lengths, algorithm.normalize) if weight > 0]
        return [
            replace(sample, token_weight=weight * sample.trajectory.weight)
            for sample, weight in zip(advantages.samples, weights, strict=True)
        ]

    def _add_samples(self, index: int, samples: list[WeightedSample]) -> None:
        """Add the samples of a group to a minibatch, and process its full microbatches."""
        minibatch, budget = self._minibatches[index], self.spec.batch.microbatch_budget
        for run in split_by_tokens(samples, lambda sample: sample.input_ids, budget):
            if full := minibatch.add(run, budget):
                self._add_microbatch(minibatch, full, backward=index == 0)

    def _add_microbatch(self, minibatch: Minibatch, samples: list[WeightedSample], *, backward: bool) -> None:
        """Add the samples of one microbatch, and process a round of microbatches when every rank has one."""
        minibatch.round.append(samples)
        if len(minibatch.round) == self._ranks.size:
            self._run_round(minibatch, backward=backward)

    def _run_round(self, minibatch: Minibatch, *, backward: bool) -> None:
        """Pack this rank's samples, compute what is needed from before the first optimizer step, and run the backward
        pass if `backward`."""
        waiting, minibatch.round = minibatch.round, []
        if not waiting:
            return
        counted = self._ranks.index < len(waiting)
        samples = waiting[self._ranks.index] if counted else [replace(waiting[0][0], token_weight=0.0)]
        keep_cache = self.spec.schedule.keeps_cache
        microbatch = pack(samples, self._device, version=self.version.number, keep_cache=keep_cache)
        microbatch.counted = counted
        minibatch.microbatches.append(microbatch)
        if self.spec.algorithm.kl_beta and microbatch.ref_logprobs is None:
            if self._reference is None:
                raise missing_reference(next(s.trajectory for s in samples if s.ref_logprobs is None))
            microbatch.ref_logprobs = self._ref_logprobs(microbatch)
        if backward:
            self._backward(microbatch)
        elif self.spec.algorithm.proximal == "recomputed":
            with torch.no_grad():
                microbatch.proximal_logprobs = self._logprobs(self._forward, microbatch, statistic="none").logprobs
            if counted:
                self._sums.add_rollout(microbatch, microbatch.proximal_logprobs)

    def _optimize(self) -> None:
        """Take the optimizer steps of all minibatches and epochs; the first minibatch already has its gradient."""
        minibatches = len(self._minibatches)
        before = self.version.number * self.spec.batch.epochs * minibatches
        for epoch in range(self.spec.batch.epochs):
            for index, minibatch in enumerate(self._minibatches):
                if not minibatch.microbatches:
                    continue
                if (epoch, index) != (0, 0) and not self._recompute_gradient(minibatch):
                    self._sums.minibatches_dropped += (self.spec.batch.epochs - epoch) * minibatches - index
                    self._step_critic_only(minibatch)
                    return
                self._step(minibatch, position=before + epoch * minibatches + index + 1)

    def _recompute_gradient(self, minibatch: Minibatch) -> bool:
        """Compute the gradient of a later minibatch; returns False if `kl_stop` is exceeded."""
        kl_before, tokens = self._sums.on_device.get("approx_kl", 0.0), 0
        for microbatch in minibatch.microbatches:
            self._backward(microbatch)
            tokens += microbatch.tokens if microbatch.counted else 0
        limit = self.spec.algorithm.kl_stop
        if limit is None:
            return True
        kl_here = float(self._sums.on_device.get("approx_kl", 0.0) - kl_before)
        sums = torch.tensor([kl_here, tokens], dtype=torch.float64)
        kl, tokens_of_all = self._ranks.all_sum(sums).tolist()
        return bool(kl / max(tokens_of_all, 1) <= limit)

    def _step_critic_only(self, minibatch: Minibatch) -> None:
        """Discard the policy gradient; the returns are still valid targets of the critic."""
        self._step_critic(minibatch)
        self._loss = torch.zeros_like(self._loss)
        self.optimizer.zero_grad(set_to_none=True)

    def _step_critic(self, minibatch: Minibatch) -> None:
        if self._critic is not None:
            self._critic_metrics.append(self._critic.step(minibatch.denominator))
            self.critic_steps += 1

    def _step(self, minibatch: Minibatch, *, position: int) -> None:
        """Take the optimizer step at a 1-based position of the run; steps left out before it count."""
        if self._critic_warmup:
            self._step_critic_only(minibatch)
            return
        self._step_critic(minibatch)
        config = self.spec.optimizer
        critic_only = self.spec.critic.warmup_steps if self._critic is not None else 0
        rate = learning_rate(position - critic_only, self.schedule_steps, config)
        set_learning_rate(self.optimizer, rate)
        scale, ranks = 1.0 / minibatch.denominator, self._ranks
        if ranks.size > 1:
            self._sums.add("own_grad_norm", own_gradient_norm(self.optimizer))
        norm = clip_and_step(self.optimizer, scale=scale, max_grad_norm=config.max_grad_norm, ranks=ranks)
        self._sums.learning_rate = rate
        loss = ranks.all_sum(self._loss) / minibatch.denominator
        self._loss = torch.zeros_like(self._loss)
        if math.isfinite(norm):
            self._sums.add("loss", loss)
            self._sums.grad_norm += norm
            self._sums.optimizer_steps += 1
        else:
            self._sums.steps_skipped_nonfinite += 1

    def _backward(self, microbatch: Microbatch) -> None:
        """Add the gradient and statistics of a microbatch; during critic warm-up the gradient of the critic only."""
        with torch.set_grad_enabled(not self._critic_warmup):
            output = self._logprobs(self._forward, microbatch)
        logprobs, entropy = output.logprobs, output.statistic
        detached = logprobs.detach()
        if microbatch.proximal_logprobs is None:
            if microbatch.counted:
                self._sums.add_rollout(microbatch, detached)
            if self.spec.algorithm.proximal == "rollout":
                microbatch.proximal_logprobs = microbatch.rollout_logprobs
            elif self._sums.optimizer_steps == 0:  # the weights are still those of the start of the update
                microbatch.proximal_logprobs = detached
            else:
                microbatch.proximal_logprobs = interpolated_proximal(
                    microbatch.rollout_logprobs, detached, microbatch.lags
                )
        if self._critic is not None:
            assert microbatch.returns is not None and microbatch.values is not None
            microbatch.states = output.states
            self._critic.learn(microbatch, microbatch.returns, microbatch.values)
        outcome = policy_outcome(
            self.spec.algorithm,
            microbatch,
            logprobs,
            entropy,
            kl_beta=self.kl_beta,
            user=self._user_losses,
            step=self.version.number + 1,
        )
        if not self._critic_warmup:
            outcome.loss.backward()
            self._loss += outcome.loss.detach()
        microbatch.states = None  # only valid during this pass
        if microbatch.counted:
            self._sums.add_backward(microbatch, outcome, detached, entropy)
            self._sums.add_details(microbatch, detached, entropy)

    @torch.no_grad()
    def _ref_logprobs(self, microbatch: Microbatch) -> torch.Tensor:
        assert self._reference is not None
        return self._logprobs(self._reference, microbatch, statistic="none").logprobs

    def _logprobs(self, forward: TreeForward, microbatch: Microbatch, statistic: Statistic = "entropy") -> TreeOutput:
        return token_logprobs(
            forward,
            microbatch,
            temperature=self.spec.sampling.temperature,
            logits_budget_bytes=self._logits_budget_bytes,
            statistic=statistic,
        )

    def state_bytes(self) -> int:
        """Upper bound of the bytes that `write_state` writes."""
        critic = self._critic.state_bytes() if self._critic else 0
        return state_bytes(self.model, self.optimizer, source=self._source) + critic

    def write_state(self, directory: Path) -> None:
        """Write weights (a Hugging Face folder), optimizer, critic, random states and counters into an empty folder."""
        counters = {
            "schedule_steps": self.schedule_steps,
            "critic_steps": self.critic_steps,
            "kl_beta": self.kl_beta,
            "configured_kl_beta": self.spec.algorithm.kl_beta,
            "version": msgspec.to_builtins(self.version),
        }
        save_state(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            source=self._source,
            counters=counters,
            ranks=self._ranks,
        )
        if self._critic is not None:
            if self._ranks.index == 0:
                (directory / CRITIC_FOLDER).mkdir()
            self._ranks.barrier()
            self._critic.write_state(directory / CRITIC_FOLDER)

    def read_state(self, directory: Path) -> None:
        """Restore what `write_state` wrote.

        Raises:
            UserError: the weights do not have the digest of the stored version.
        """
        if self._critic is not None:
            self._critic.read_state(directory / CRITIC_FOLDER)
        counters = restore_state(directory, model=self.model, optimizer=self.optimizer, ranks=self._ranks)
        stored = int(counters.get("schedule_steps", 0))  # absent in checkpoints of older versions
        self.schedule_steps = self.spec.optimizer.schedule_steps or stored or self.spec.policy_steps
        self.critic_steps = int(counters["critic_steps"])
        if counters.get("configured_kl_beta", self.kl_beta) == self.kl_beta:  # else the run was amended
            self.kl_beta = float(counters["kl_beta"])
        self.version = msgspec.convert(counters["version"], PolicyVersion)
        if weights_digest(self.model, self._ranks) != self.version.digest:
            raise UserError(
                "the weights do not match the trainer state of the checkpoint",
                where=str(directory),
                hint="delete this checkpoint; the run resumes from the previous one",
            )
        self._start_batch()


def _clocks() -> tuple[float, float]:
    """(wall-clock time, CPU time of this thread) in seconds."""
    return time.perf_counter(), time.thread_time()
