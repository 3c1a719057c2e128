"""The policy trainer: groups become gradients as they come, a batch becomes one new version.

Within a batch, minibatch 0 is learned from while the rest is still being generated; every later one waits for `commit`,
because an optimizer step changes the parameters that the engine reads. Gradients accumulate as sums and are divided
once, before clipping.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from tidemill.algos.advantages import ADVANTAGES, has_signal
from tidemill.algos.kl import approximate_kl, k3, mismatch
from tidemill.algos.losses import LOSSES, denominator, token_weights
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import Compute
from tidemill.core.records import Group, PolicyVersion, StepMetrics
from tidemill.models.loading import weights_digest
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.logprobs import token_logprobs
from tidemill.trainer.optimizer import build_optimizer, clip_and_step, learning_rate, set_learning_rate
from tidemill.trainer.packing import Microbatch, Weighted, pack, split_by_budget, trained_tokens
from tidemill.trainer.update import Minibatch, Sums

MEGABYTE = 1 << 20


class PolicyTrainer:
    """Implements `core.protocols.Trainer` on one device.

    Args:
        model: trained in place; the embedded engine reads the same parameters.
        reference: frozen; needed when `algorithm.kl_beta` is positive.
        source: the folder the model came from; its tokenizer goes into checkpoints.
        compute: where the work runs; the public coroutines only wait for it.
        autocast: dtype of the forward and backward passes; None computes in the weights' own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: RunSpec,
        *,
        compute: Compute,
        source: Path,
        reference: PreTrainedModel | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.spec = model, spec
        self.optimizer = build_optimizer(model, spec.optimizer)
        self.optimizer_steps = 0
        self._compute, self._source = compute, source
        self._reference, self._autocast = reference, autocast
        self._device = next(model.parameters()).device
        self._version = PolicyVersion(number=0, digest=weights_digest(model))
        self._open_batch()

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def accumulate(self, group: Group) -> None:
        await self._compute.run(lambda: self.take(group))

    async def commit(self, step: int) -> StepMetrics:
        return await self._compute.run(lambda: self.learn(step))

    def take(self, group: Group) -> None:
        """Advantages of a complete group, and as many microbatches as it fills."""
        started = time.perf_counter()
        index = min(self._groups * self.spec.batch.minibatches // self.spec.batch.prompts, len(self._minibatches) - 1)
        self._groups += 1
        minibatch = self._minibatches[index]
        minibatch.groups += 1
        for run in split_by_budget(self._weighted(group, minibatch), self.spec.batch.microbatch_tokens):
            if full := minibatch.add(run, self.spec.batch.microbatch_tokens):
                self._close(minibatch, full, backward=index == 0)
        self._sums.train_s += time.perf_counter() - started

    def learn(self, step: int) -> StepMetrics:
        """The rest of the batch, its optimizer steps, and the next version."""
        started = time.perf_counter()
        for index, minibatch in enumerate(self._minibatches):
            if rest := minibatch.close():
                self._close(minibatch, rest, backward=index == 0)
        self._optimize()
        steps_taken = self._sums.optimizer_steps
        digest = weights_digest(self.model) if steps_taken else self._version.digest
        self._version = PolicyVersion(number=step, digest=digest)
        self._sums.train_s += time.perf_counter() - started
        metrics = StepMetrics(step=step, version=self._version, optimizer_steps=steps_taken, values=self._sums.values())
        self._open_batch()
        return metrics

    def _open_batch(self) -> None:
        self._groups = 0
        self._sums = Sums()
        self._loss = 0.0  # summed over the open minibatch
        self._minibatches = [Minibatch() for _ in range(self.spec.batch.minibatches)]
        self.optimizer.zero_grad(set_to_none=True)

    def _weighted(self, group: Group, minibatch: Minibatch) -> list[Weighted]:
        """The group's valid samples with advantage and token weight; none when they would add no gradient.

        Skipped samples stay in the denominator: leaving them out of the work must not change the mean.
        """
        algorithm = self.spec.algorithm
        rewards = torch.tensor([t.reward.value if t.reward else 0.0 for t in group.trajectories])
        valid = torch.tensor([t.weight > 0 and t.reward is not None and t.reward.valid for t in group.trajectories])
        if int(valid.sum()) < 2:
            self._sums.groups_skipped_invalid += 1
            return []
        lengths = [trained_tokens(t) if ok else 0 for t, ok in zip(group.trajectories, valid.tolist(), strict=True)]
        minibatch.denominator += denominator(lengths, algorithm.normalize)
        advantages = ADVANTAGES[algorithm.advantage].function(rewards, valid)
        if not has_signal(advantages):
            self._sums.groups_without_signal += 1
            if algorithm.kl_beta == 0:
                return []
        weights = token_weights(lengths, algorithm.normalize)
        return [
            Weighted(trajectory=trajectory, advantage=advantage, token_weight=weight * trajectory.weight)
            for trajectory, advantage, weight in zip(group.trajectories, advantages.tolist(), weights, strict=True)
            if weight > 0
        ]

    def _close(self, minibatch: Minibatch, samples: list[Weighted], *, backward: bool) -> None:
        """A microbatch is full: measure what must be known before the first optimizer step, and learn from it if
        this is the minibatch whose turn it is."""
        microbatch = pack(samples, self._device)
        minibatch.microbatches.append(microbatch)
        if self._reference is not None:
            microbatch.ref_logprobs = self._measure(self._reference, microbatch)
        if backward:
            self._backward(microbatch)
        else:
            microbatch.proximal_logprobs = self._measure(self.model, microbatch)

    def _optimize(self) -> None:
        """Minibatch after minibatch, epoch after epoch; gradients of the very first are already there."""
        for epoch in range(self.spec.batch.epochs):
            for index, minibatch in enumerate(self._minibatches):
                if not minibatch.microbatches:
                    continue
                if (epoch, index) != (0, 0) and not self._learn_again(minibatch):
                    remaining = self.spec.batch.epochs * len(self._minibatches) - epoch * len(self._minibatches) - index
                    self._sums.minibatches_dropped += remaining
                    self.optimizer.zero_grad(set_to_none=True)
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

    def _step(self, minibatch: Minibatch) -> None:
        config, batch = self.spec.optimizer, self.spec.batch
        total = self.spec.trainer.steps * batch.minibatches * batch.epochs
        rate = learning_rate(self.optimizer_steps + 1, total, config)
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
        """Add a microbatch's summed gradient and figures."""
        algorithm = self.spec.algorithm
        logprobs, entropy = self._logprobs(self.model, microbatch)
        now = logprobs.detach()
        if microbatch.proximal_logprobs is None:  # nothing has changed since the update began
            microbatch.proximal_logprobs = now
        first_time = microbatch.proximal_logprobs is now
        token = LOSSES[algorithm.loss].function(
            logprobs,
            microbatch.proximal_logprobs,
            microbatch.advantages,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        loss_T = token.loss_T
        if microbatch.ref_logprobs is not None:
            penalty = k3(logprobs, microbatch.ref_logprobs)
            loss_T = loss_T + algorithm.kl_beta * penalty
            self._sums.kl_ref = (self._sums.kl_ref or 0.0) + float(penalty.detach().sum())
        loss = (microbatch.weights * loss_T).sum()
        loss.backward()
        sums = self._sums
        self._loss += float(loss.detach())
        sums.clipped += float(token.clipped_T.sum())
        sums.entropy += float(entropy.sum())
        sums.approx_kl += float(approximate_kl(now, microbatch.proximal_logprobs).sum())
        sums.tokens_trained += microbatch.tokens
        sums.tokens_packed += microbatch.tree.size
        sums.tokens_unpacked += microbatch.unpacked_tokens
        if first_time:
            sums.mismatch += mismatch(microbatch.rollout_logprobs, now)

    @torch.no_grad()
    def _measure(self, model: PreTrainedModel, microbatch: Microbatch) -> torch.Tensor:
        logprobs, _ = self._logprobs(model, microbatch)
        if model is self.model:
            self._sums.mismatch += mismatch(microbatch.rollout_logprobs, logprobs)
        return logprobs

    def _logprobs(self, model: PreTrainedModel, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            return token_logprobs(
                model,
                microbatch,
                temperature=self.spec.sampling.temperature,
                logits_budget_bytes=self.spec.trainer.logits_budget_mb * MEGABYTE,
            )

    def state_bytes(self) -> int:
        """About what `write_state` will write."""
        return state_bytes(self.model, self.optimizer)

    def write_state(self, directory: Path) -> None:
        """Weights as a Hugging Face folder, optimizer, random states and counters, into an empty directory."""
        counters = {"optimizer_steps": self.optimizer_steps, "version": msgspec.to_builtins(self._version)}
        save_state(directory, model=self.model, optimizer=self.optimizer, source=self._source, counters=counters)

    def read_state(self, directory: Path) -> None:
        """Go on from what `write_state` wrote.

        Raises:
            UserError: the weights are not those that were written.
        """
        counters = restore_state(directory, model=self.model, optimizer=self.optimizer)
        self.optimizer_steps = int(counters["optimizer_steps"])
        self._version = msgspec.convert(counters["version"], PolicyVersion)
        if weights_digest(self.model) != self._version.digest:
            raise UserError(
                "the weights are not those of the version written beside them",
                where=str(directory),
                cure="delete this checkpoint; the run goes on from the one before",
            )
        self._open_batch()
