"""The policy trainer: groups become gradients as they come, a batch becomes one new version.

Within a batch, minibatch 0 is learned from while the rest is still being generated; every later one waits for `commit`,
because an optimizer step changes the parameters that the engine reads. Where advantages depend on the whole batch,
all of it waits. Gradients accumulate as sums and are divided once, before clipping.
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
from transformers import PreTrainedModel

from tidemill.algos.corrections import interpolated_proximal
from tidemill.algos.kl import adapted_beta
from tidemill.algos.losses import denominator, token_weights
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import Compute
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, StepMetrics
from tidemill.models.loading import weights_digest
from tidemill.trainer.advantage_estimator import AdvantageEstimator, Estimate
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.critic import Critic, Deferred
from tidemill.trainer.packing import (
    FloatArray,
    Microbatch,
    Weighted,
    pack,
    split_by_budget,
    trained_tokens,
    without_reference,
)
from tidemill.trainer.scoring import completion_logprobs, predicting_states, token_logprobs
from tidemill.trainer.update import (
    Minibatch,
    UpdateSums,
    build_optimizer,
    clip_and_step,
    learning_rate,
    policy_outcome,
    set_learning_rate,
)

MEGABYTE = 1 << 20
CRITIC_FOLDER = "critic"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A complete group that has not been taken into its minibatch yet."""

    minibatch: int
    group: Group
    valid: list[bool]  # which samples count
    values: Deferred[list[FloatArray]] | None  # asked of a critic elsewhere


class PolicyTrainer:
    """Implements `core.protocols.Trainer` on one device.

    Args:
        model: trained in place; the embedded engine reads the same parameters.
        reference: frozen; needed when `algorithm.kl_beta` is positive, unless every sample comes with its logprobs.
        critic: needed when `algorithm.advantage` is "gae".
        source: the folder the model came from; its tokenizer goes into checkpoints.
        compute: where the work runs; the public coroutines only wait for it.
        autocast: dtype of the forward and backward passes; None computes in the weights' own.

    Raises:
        UserError: the algorithm needs a critic and there is none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: RunSpec,
        *,
        compute: Compute,
        source: Path,
        reference: PreTrainedModel | None = None,
        critic: Critic | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.spec = model, spec
        self.optimizer = build_optimizer(model, spec.optimizer)
        self.optimizer_steps = 0
        self.critic_steps = 0
        self.kl_beta = spec.algorithm.kl_beta
        self._compute, self._source = compute, source
        self._reference, self._autocast = reference, autocast
        self._device = next(model.parameters()).device
        self._critic = _critic_for(spec, critic)
        self._advantages = AdvantageEstimator(
            spec,
            self._device,
            reference=self._reference_logprobs if reference is not None else None,
            values=self._critic.values if self._critic else None,
            ahead=self._critic_elsewhere,
        )
        self._version = PolicyVersion(number=0, digest=weights_digest(model))
        self._open_batch()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.take(group))

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self.learn(step))

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._compute.run(
            lambda: completion_logprobs(
                self.model,
                completions,
                budget=self.spec.batch.microbatch_tokens,
                temperature=self.spec.sampling.temperature,
                logits_budget_bytes=self.spec.trainer.logits_budget_mb * MEGABYTE,
                autocast=self._autocast,
            )
        )

    def take(self, group: Group) -> None:
        """A complete group, and as many microbatches as it fills unless its advantages depend on the whole batch."""
        started = _now()
        index = min(self._groups * self.spec.batch.minibatches // self.spec.batch.prompts, len(self._minibatches) - 1)
        self._groups += 1
        minibatch = self._minibatches[index]
        minibatch.groups += 1
        valid = _valid(group)
        values = self._advantages.begin(group, valid)
        asked = None if values is None else partial(self._critics, values)
        self._waiting.append(Waiting(minibatch=index, group=group, valid=valid, values=asked))
        if self._advantages.scope != "batch":
            self._admit(all_but=int(self._critic_elsewhere))  # values of the newest are on their way
        self._count(started)

    def learn(self, step: int) -> StepMetrics:
        """The rest of the batch, its optimizer steps, and the next version."""
        started = _now()
        self._admit()
        for index, minibatch in enumerate(self._minibatches):
            if rest := minibatch.close():
                self._close(minibatch, rest, backward=index == 0)
        self._optimize()
        steps_taken = self._sums.optimizer_steps
        digest = weights_digest(self.model) if steps_taken else self._version.digest
        self._version = PolicyVersion(number=step, digest=digest)
        self._sums.critic = [self._critics(promise) for promise in self._critic_metrics]
        self._count(started)
        values = self._sums.values()
        self._adapt(values.get("kl_ref"))
        self._open_batch()
        return StepMetrics(step=step, version=self._version, optimizer_steps=steps_taken, values=values)

    def _count(self, since: tuple[float, float]) -> None:
        now = _now()
        self._sums.train_s += now[0] - since[0]
        self._sums.cpu_s += now[1] - since[1]

    def _open_batch(self) -> None:
        self._groups = 0
        self._sums = UpdateSums(kl_beta=self.kl_beta, critic_wait_s=0.0 if self._critic_elsewhere else None)
        self._loss = 0.0  # summed over the open minibatch
        self._minibatches = [Minibatch() for _ in range(self.spec.batch.minibatches)]
        self._waiting: list[Waiting] = []
        self._critic_metrics: list[Deferred[dict[str, float]]] = []  # of its steps
        self.optimizer.zero_grad(set_to_none=True)

    def _adapt(self, kl_ref: float | None) -> None:
        """Move the KL coefficient towards its target."""
        if self.spec.algorithm.kl_target is not None and kl_ref is not None:
            self.kl_beta = adapted_beta(self.kl_beta, kl_ref, self.spec.algorithm.kl_target)

    @property
    def _warming_up(self) -> bool:
        """Whether the critic learns alone."""
        return self._critic is not None and self.critic_steps < self.spec.critic.warmup_steps

    def _admit(self, all_but: int = 0) -> None:
        """Take the groups that wait into their minibatches, or leave the newest `all_but` for later."""
        ready = len(self._waiting) - all_but
        waiting, self._waiting = self._waiting[:ready], self._waiting[ready:]
        siblings = 2 if self.spec.algorithm.compares_siblings else 1
        enough = [each for each in waiting if sum(each.valid) >= siblings]
        self._sums.groups_skipped_invalid += len(waiting) - len(enough)
        estimates = self._advantages.of_groups(
            [each.group for each in enough],
            [each.valid for each in enough],
            kl_beta=self.kl_beta,
            values=[each.values for each in enough],
        )
        for each, estimate in zip(enough, estimates, strict=True):
            minibatch = self._minibatches[each.minibatch]
            self._feed(each.minibatch, self._weighted(each.group, each.valid, estimate, minibatch))

    @property
    def _critic_elsewhere(self) -> bool:
        return self._critic is not None and self._critic.elsewhere

    def _critics(self, promise: Deferred[T]) -> T:
        """What the critic promised, when it is there."""
        started = time.perf_counter()
        result = promise()
        if self._sums.critic_wait_s is not None:
            self._sums.critic_wait_s += time.perf_counter() - started
        return result

    def _weighted(
        self, group: Group, valid: Sequence[bool], estimate: Estimate, minibatch: Minibatch
    ) -> list[Weighted]:
        """The group's valid samples with their token weights; none when they would add no gradient.

        Skipped samples stay in the denominator: leaving them out of the work must not change the mean.
        """
        algorithm = self.spec.algorithm
        lengths = [trained_tokens(t) if ok else 0 for t, ok in zip(group.trajectories, valid, strict=True)]
        constant = self.spec.sampling.max_new_tokens
        minibatch.denominator += denominator(lengths, algorithm.normalize, constant=constant)
        if algorithm.compares_siblings and not estimate.signal:
            self._sums.groups_without_signal += 1
            if not self._learns_without_signal:
                return []
        weights = [weight for weight in token_weights(lengths, algorithm.normalize) if weight > 0]
        return [
            replace(sample, token_weight=weight * sample.trajectory.weight)
            for sample, weight in zip(estimate.samples, weights, strict=True)
        ]

    @property
    def _learns_without_signal(self) -> bool:
        """Whether samples of advantage 0 have a gradient all the same, or will have another advantage."""
        algorithm = self.spec.algorithm
        return (algorithm.kl_beta > 0 and algorithm.kl_in == "loss") or algorithm.entropy_bonus > 0 or algorithm.whiten

    def _feed(self, index: int, samples: list[Weighted]) -> None:
        """Add a group's samples to a minibatch, and learn from what microbatches they fill."""
        minibatch, budget = self._minibatches[index], self.spec.batch.microbatch_tokens
        for run in split_by_budget(samples, budget):
            if full := minibatch.add(run, budget):
                self._close(minibatch, full, backward=index == 0)

    def _close(self, minibatch: Minibatch, samples: list[Weighted], *, backward: bool) -> None:
        """A microbatch is full: measure what must be known before the first optimizer step, and learn from it if
        this is the minibatch whose turn it is."""
        microbatch = pack(samples, self._device, version=self._version.number)
        minibatch.microbatches.append(microbatch)
        if self.spec.algorithm.kl_beta and microbatch.ref_logprobs is None:
            if self._reference is None:
                raise without_reference(next(s.trajectory for s in samples if s.ref_logprobs is None))
            microbatch.ref_logprobs = self._reference_logprobs(microbatch)
        if backward:
            self._backward(microbatch)
        elif self.spec.algorithm.proximal == "recomputed":
            microbatch.proximal_logprobs = self._measure(microbatch)

    def _optimize(self) -> None:
        """Minibatch after minibatch, epoch after epoch; gradients of the very first are already there."""
        for epoch in range(self.spec.batch.epochs):
            for index, minibatch in enumerate(self._minibatches):
                if not minibatch.microbatches:
                    continue
                if (epoch, index) != (0, 0) and not self._learn_again(minibatch):
                    remaining = self.spec.batch.epochs * len(self._minibatches) - epoch * len(self._minibatches) - index
                    self._sums.minibatches_dropped += remaining
                    self._drop(minibatch)
                    return
                self._step(minibatch)

    def _learn_again(self, minibatch: Minibatch) -> bool:
        """Gradients of a minibatch after the first; False when the policy has moved too far to use them."""
        before, tokens = self._sums.approx_kl, 0
        for microbatch in minibatch.microbatches:
            self._backward(microbatch)
            tokens += microbatch.tokens
        limit = self.spec.algorithm.kl_stop
        return limit is None or (self._sums.approx_kl - before) / max(tokens, 1) <= limit

    def _drop(self, minibatch: Minibatch) -> None:
        """Forget the policy's gradient; returns are as true as before, and the critic learns them."""
        self._step_critic(minibatch)
        self._loss = 0.0
        self.optimizer.zero_grad(set_to_none=True)

    def _step_critic(self, minibatch: Minibatch) -> None:
        if self._critic is not None:
            self._critic_metrics.append(self._critic.step(minibatch.denominator))
            self.critic_steps += 1

    def _step(self, minibatch: Minibatch) -> None:
        if self._warming_up:
            self._drop(minibatch)
            return
        self._step_critic(minibatch)
        config = self.spec.optimizer
        rate = learning_rate(self.optimizer_steps + 1, self.spec.policy_steps, config)
        set_learning_rate(self.optimizer, rate)
        norm = clip_and_step(self.optimizer, scale=1.0 / minibatch.denominator, max_grad_norm=config.max_grad_norm)
        self._sums.learning_rate = rate
        loss, self._loss = self._loss / minibatch.denominator, 0.0
        if math.isfinite(norm):
            self._sums.loss += loss
            self._sums.grad_norm += norm
            self._sums.optimizer_steps += 1
            self.optimizer_steps += 1
        else:
            self._sums.steps_skipped_nonfinite += 1

    def _backward(self, microbatch: Microbatch) -> None:
        """Add a microbatch's summed gradient and figures; of the critic alone while that warms up."""
        with torch.set_grad_enabled(not self._warming_up):
            logprobs, entropy = self._logprobs(self.model, microbatch)
        now = logprobs.detach()
        if microbatch.proximal_logprobs is None:
            self._sums.first_sight(microbatch, now)
            microbatch.proximal_logprobs = self._proximal(microbatch, now)
        if self._critic is not None:
            assert microbatch.returns is not None and microbatch.values is not None
            self._critic.learn(microbatch, microbatch.returns, microbatch.values)
        outcome = policy_outcome(self.spec.algorithm, microbatch, logprobs, entropy, kl_beta=self.kl_beta)
        if not self._warming_up:
            outcome.loss.backward()
            self._loss += float(outcome.loss.detach())
        microbatch.states = None  # the forward pass they belong to is over
        self._sums.learned(microbatch, outcome, now, entropy)

    def _proximal(self, microbatch: Microbatch, now: torch.Tensor) -> torch.Tensor:
        """What clipping is measured from, where it was not measured before the first optimizer step."""
        if self.spec.algorithm.proximal == "rollout":
            return microbatch.rollout_logprobs
        if self._sums.optimizer_steps == 0:  # nothing has changed since the update began
            return now
        return interpolated_proximal(microbatch.rollout_logprobs, now, microbatch.lags)

    @torch.no_grad()
    def _measure(self, microbatch: Microbatch) -> torch.Tensor:
        logprobs, _ = self._logprobs(self.model, microbatch)
        microbatch.states = None
        self._sums.first_sight(microbatch, logprobs)
        return logprobs

    @torch.no_grad()
    def _reference_logprobs(self, microbatch: Microbatch) -> torch.Tensor:
        assert self._reference is not None
        return self._logprobs(self._reference, microbatch)[0]

    def _logprobs(self, model: PreTrainedModel, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            states = predicting_states(model, microbatch)
            if model is self.model and self._critic is not None:
                microbatch.states = states
            return token_logprobs(
                model,
                microbatch,
                temperature=self.spec.sampling.temperature,
                logits_budget_bytes=self.spec.trainer.logits_budget_mb * MEGABYTE,
                states=states,
                learn_figure=self.spec.algorithm.entropy_bonus > 0,
            )

    def state_bytes(self) -> int:
        """About what `write_state` will write."""
        critic = self._critic.state_bytes() if self._critic else 0
        return state_bytes(self.model, self.optimizer, source=self._source) + critic

    def write_state(self, directory: Path) -> None:
        """Weights as a Hugging Face folder, optimizer, critic, random states and counters, into an empty directory."""
        counters = {
            "optimizer_steps": self.optimizer_steps,
            "critic_steps": self.critic_steps,
            "kl_beta": self.kl_beta,
            "version": msgspec.to_builtins(self._version),
        }
        save_state(directory, model=self.model, optimizer=self.optimizer, source=self._source, counters=counters)
        if self._critic is not None:
            (directory / CRITIC_FOLDER).mkdir()
            self._critic.write_state(directory / CRITIC_FOLDER)

    def read_state(self, directory: Path) -> None:
        """Go on from what `write_state` wrote.

        Raises:
            UserError: the weights are not those that were written.
        """
        if self._critic is not None:
            self._critic.read_state(directory / CRITIC_FOLDER)
        counters = restore_state(directory, model=self.model, optimizer=self.optimizer)
        self.optimizer_steps = int(counters["optimizer_steps"])
        self.critic_steps = int(counters["critic_steps"])
        self.kl_beta = float(counters["kl_beta"])
        self._version = msgspec.convert(counters["version"], PolicyVersion)
        if weights_digest(self.model) != self._version.digest:
            raise UserError(
                "the weights are not those of the version written beside them",
                where=str(directory),
                hint="delete this checkpoint; the run goes on from the one before",
            )
        self._open_batch()


def _now() -> tuple[float, float]:
    """Seconds that have passed, and those of them that this thread spent on a processor."""
    return time.perf_counter(), time.thread_time()


def _valid(group: Group) -> list[bool]:
    """Which samples count."""
    return [t.weight > 0 and t.reward is not None and t.reward.valid for t in group.trajectories]


def _critic_for(spec: RunSpec, critic: Critic | None) -> Critic | None:
    """The critic, where the algorithm has a use for one."""
    if not spec.algorithm.needs_critic:
        return None
    if critic is None:
        raise UserError(
            f'algorithm.advantage = "{spec.algorithm.advantage}" needs a critic, and this trainer was given none',
            where="algorithm.advantage",
            hint='give it one, or choose an advantage without: "grpo", "rloo", "reinforce_pp", ...',
        )
    return critic
