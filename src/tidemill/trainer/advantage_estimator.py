"""From groups to weighted samples: what shapes their rewards, their advantages, and what a critic is to learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from tidemill.algos.advantages import ADVANTAGES, has_signal, overlong_penalty, scope_of
from tidemill.algos.kl import kl_reward
from tidemill.algos.returns import whiten
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Group, Segment, Trajectory, pack_logprobs, pack_tokens
from tidemill.trainer.critic import Deferred, resolved
from tidemill.trainer.packing import (
    FloatArray,
    Microbatch,
    Weighted,
    by_sample,
    pack,
    ref_logprobs,
    rollout_logprobs,
    split_by_budget,
    trained_tokens,
    without_reference,
)

Measure = Callable[[Microbatch], Deferred[torch.Tensor]]
"""Something float32 [T] of every token of a microbatch, without gradient."""
DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A group's valid samples. Where they stand in the mean is not known yet: all weights are 1."""

    samples: list[Weighted]
    signal: bool  # whether any of them moves the policy, before whitening


class AdvantageEstimator:
    """What `spec.algorithm` makes of rewards.

    Args:
        device: where microbatches are measured.
        reference: logprobs of the reference model, for samples that come without; None where it is in another process.
        values: what the critic says, where there is one.
        ahead: the critic computes elsewhere: it is asked for each group by itself, as soon as that is complete.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        *,
        reference: Callable[[Microbatch], torch.Tensor] | None = None,
        values: Measure | None = None,
        ahead: bool = False,
    ) -> None:
        self._spec, self._device = spec, device
        self._row = ADVANTAGES[spec.algorithm.advantage]
        self._reference, self._values, self._ahead = reference, values, ahead
        self._penalised = spec.algorithm.kl_beta > 0 and spec.algorithm.kl_in == "reward"
        self.scope = scope_of(spec.algorithm.advantage, whiten=spec.algorithm.whiten)

    def begin(self, group: Group, valid: Sequence[bool]) -> Deferred[list[FloatArray]] | None:
        """Ask for the values of a complete group's samples that count, [T_s] each; None where all are measured later,
        together, so that what groups have in common is computed once."""
        if self._values is None or not self._ahead:
            return None
        return self._asked(self._values, [self._up_to_the_end(group.trajectories[at]) for at in _kept(group, valid)])

    def of_groups(
        self,
        groups: Sequence[Group],
        valid: Sequence[Sequence[bool]],
        *,
        kl_beta: float,
        values: Sequence[Deferred[list[FloatArray]] | None] = (),
    ) -> list[Estimate]:
        """Advantages of complete groups: of one at a time, or of the whole batch where the scope is the batch.

        What must be measured is measured of all of them together, so that prefixes are computed once.

        Args:
            valid: which samples of each group count.
            kl_beta: the present coefficient, where the penalty is part of the reward.
            values: what `begin` returned of each group, where it was called.

        Raises:
            UserError: rollout logprobs are needed and the engine gave none, or those it gave are not finite.
        """
        kept = [_kept(group, ok) for group, ok in zip(groups, valid, strict=True)]
        trajectories = [g.trajectories[at] for g, of_group in zip(groups, kept, strict=True) for at in of_group]
        if not trajectories:  # every completion is empty
            return [Estimate(samples=[], signal=False) for _ in groups]
        self._require_logprobs(trajectories)
        references = self._references(trajectories)
        penalties = [
            _penalty(t, ref if self._penalised else None, kl_beta)
            for t, ref in zip(trajectories, references, strict=True)
        ]
        if self._row.level == "token":
            rewards = [_with_final(-p, self._shaped(t)) for t, p in zip(trajectories, penalties, strict=True)]
            samples = self._over_time(trajectories, rewards, [asked for asked in values if asked is not None])
        else:
            samples = []
            rest = iter(penalties)
            for group, ok, of_group in zip(groups, valid, kept, strict=True):
                samples += self._among_siblings(group, ok, of_group, [next(rest) for _ in of_group])
        samples = [replace(sample, ref_logprobs=ref) for sample, ref in zip(samples, references, strict=True)]
        moves = [_moves(sample) for sample in samples]
        samples = self._whitened(samples)
        ends = np.cumsum([0, *map(len, kept)]).tolist()
        return [Estimate(samples=samples[start:end], signal=any(moves[start:end])) for start, end in pairwise(ends)]

    def _among_siblings(
        self, group: Group, valid: Sequence[bool], kept: Sequence[int], penalties: Sequence[DoubleArray]
    ) -> list[Weighted]:
        """One advantage a sample, from what its group was rewarded with."""
        rewards = [self._shaped(t) if ok else 0.0 for t, ok in zip(group.trajectories, valid, strict=True)]
        for at, penalty in zip(kept, penalties, strict=True):
            rewards[at] -= float(penalty.sum())
        advantages = self._row.function(torch.tensor(rewards), torch.tensor(valid)).tolist()
        return [Weighted(trajectory=group.trajectories[at], advantage=advantages[at], token_weight=1.0) for at in kept]

    def _whitened(self, samples: list[Weighted]) -> list[Weighted]:
        """Over all trained tokens of the batch, if that is asked for."""
        if not self._spec.algorithm.whiten:
            return samples
        lengths = [trained_tokens(sample.trajectory) for sample in samples]
        flat = np.concatenate([np.full(n, s.advantage, np.float64) for s, n in zip(samples, lengths, strict=True)])
        parts = np.split(whiten(torch.from_numpy(flat)).numpy(), np.cumsum(lengths)[:-1])
        return [replace(sample, advantage=part) for sample, part in zip(samples, parts, strict=True)]

    def _over_time(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[DoubleArray],
        asked: Sequence[Deferred[list[FloatArray]]],
    ) -> list[Weighted]:
        """Token-level advantages; with a critic also the returns it is to learn and the values it began with, which
        may have been asked for already."""
        settings = {name: getattr(self._spec.algorithm, name) for name in self._row.settings}
        lengths = [len(each) for each in rewards]
        rewards_ST = _padded(rewards)
        if self._values is None:
            advantages_ST = self._row.function(rewards_ST, **settings).numpy()
            rows = zip(trajectories, advantages_ST.astype(np.float32), lengths, strict=True)
            return [Weighted(trajectory=t, advantage=row[:n], token_weight=1.0) for t, row, n in rows]
        asked = asked or [self._asked(self._values, [self._up_to_the_end(t) for t in trajectories])]
        measured = [each for promise in asked for each in promise()]
        cut = [self._goes_on(t) for t in trajectories]
        values = [each[:n] for each, n in zip(measured, lengths, strict=True)]
        ahead = [np.append(each, 0.0)[1 : n + 1] for each, n in zip(measured, lengths, strict=True)]
        last_ST = torch.arange(rewards_ST.shape[1]) == torch.tensor(lengths)[:, None] - 1
        cut_S = torch.tensor(cut)[:, None]
        advantages_ST = self._row.function(
            rewards_ST,
            _padded(values),
            _padded(ahead),
            terminated_T=last_ST & ~cut_S,
            truncated_T=last_ST & cut_S,
            **settings,
        ).numpy()
        return [
            Weighted(
                trajectory=trajectory,
                advantage=row[: len(value)].astype(np.float32),
                token_weight=1.0,
                returns=(row[: len(value)] + value).astype(np.float32),
                values=value,
            )
            for trajectory, row, value in zip(trajectories, advantages_ST, values, strict=True)
        ]

    def _references(self, trajectories: Sequence[Trajectory]) -> list[FloatArray | None]:
        """Reference logprobs [T] of each sample: those it came with, or measured if the reward depends on them."""
        reference, told = self._reference, [ref_logprobs(trajectory) for trajectory in trajectories]
        missing = [trajectory for trajectory, each in zip(trajectories, told, strict=True) if each is None]
        if not self._penalised or not missing:
            return told
        if reference is None:
            raise without_reference(missing[0])
        measured = iter(self._asked(lambda microbatch: resolved(reference(microbatch)), missing)())
        return [next(measured) if each is None else each for each in told]

    def _asked(self, measure: Measure, trajectories: Sequence[Trajectory]) -> Deferred[list[FloatArray]]:
        """[T] of each sample, in its tokens' order."""
        bare = [Weighted(trajectory=trajectory, advantage=0.0, token_weight=0.0) for trajectory in trajectories]
        runs = split_by_budget(bare, self._spec.batch.microbatch_tokens)
        asked = [(microbatch, measure(microbatch)) for microbatch in (pack(run, self._device) for run in runs)]
        return lambda: [each for microbatch, promise in asked for each in by_sample(promise(), microbatch.samples)]

    def _goes_on(self, trajectory: Trajectory) -> bool:
        """Whether the value of where a sample was cut stands for what would have followed."""
        return self._spec.algorithm.bootstrap_truncated and trajectory.truncated

    def _up_to_the_end(self, trajectory: Trajectory) -> Trajectory:
        """With the state that a value is needed of besides those of its tokens."""
        return _with_final_observation(trajectory) if self._goes_on(trajectory) else trajectory

    def _shaped(self, trajectory: Trajectory) -> float:
        """The reward, with what is added for its length."""
        value = trajectory.reward.value if trajectory.reward else 0.0
        return value + overlong_penalty(
            trajectory.completion_length,
            max_new_tokens=self._spec.sampling.max_new_tokens,
            buffer_tokens=self._spec.algorithm.overlong_buffer_tokens,
        )

    def _require_logprobs(self, trajectories: Sequence[Trajectory]) -> None:
        needs = self._spec.algorithm.needs_rollout_logprobs
        missing = [t for t in trajectories if not t.rollout_logprobs]
        if needs and missing:
            raise UserError(
                f"the engine returned no logprobs of the tokens it generated ({len(missing)} of {len(trajectories)} "
                f"samples of prompt {missing[0].sample_id.prompt_id}), and {needs[0]} needs them",
                where="algorithm",
                hint="have the engine return logprobs of sampled tokens, or set algorithm.correction.kind = "
                '"none", algorithm.proximal = "recomputed" and algorithm.kl_in = "loss"',
            )
        broken = [t for t in trajectories if not np.isfinite(np.frombuffer(t.rollout_logprobs, np.float32)).all()]
        if broken:
            raise UserError(
                f"the logprobs of the tokens that the model generated are not finite ({len(broken)} of "
                f"{len(trajectories)} samples of prompt {broken[0].sample_id.prompt_id})",
                where=self._spec.model.source,
                hint="its weights hold NaN or infinity, or are so large that computing with them overflows: give "
                "another model or an earlier checkpoint, and lower optimizer.learning_rate if training made them so",
            )


def _kept(group: Group, valid: Sequence[bool]) -> list[int]:
    """Indices of the samples that count and have something to learn."""
    return [at for at, t in enumerate(group.trajectories) if valid[at] and trained_tokens(t)]


def _penalty(trajectory: Trajectory, ref_logprobs: FloatArray | None, kl_beta: float) -> DoubleArray:
    """[T], what each token's reward loses to the KL divergence."""
    tokens = trained_tokens(trajectory)
    if ref_logprobs is None:
        return np.zeros(tokens)
    made = torch.from_numpy(rollout_logprobs(trajectory, tokens).astype(np.float64))
    penalty: DoubleArray = kl_beta * kl_reward(made, torch.from_numpy(ref_logprobs.astype(np.float64))).numpy()
    return penalty


def _with_final(token_rewards: DoubleArray, reward: float) -> DoubleArray:
    token_rewards[-1] += reward
    return token_rewards


def _with_final_observation(trajectory: Trajectory) -> Trajectory:
    """The sample with one more token to be predicted, whichever: the state it is predicted from is the last one."""
    ids = np.append(np.frombuffer(trajectory.token_ids, np.int32), 0)
    final = Segment(role="observation", start=len(ids) - 1, end=len(ids), trained=True)
    tokens = trained_tokens(trajectory)
    return Trajectory(
        sample_id=trajectory.sample_id,
        token_ids=pack_tokens(ids.tolist()),
        segments=(*trajectory.segments, final),
        rollout_logprobs=pack_logprobs([0.0] * (tokens + 1)),
        versions=(),
        finish=trajectory.finish,
    )


def _padded(rows: Sequence[npt.NDArray[np.floating]]) -> torch.Tensor:
    """float64 [S, T], zeros after each row's end."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)


def _moves(sample: Weighted) -> bool:
    return has_signal(torch.as_tensor(sample.advantage))
