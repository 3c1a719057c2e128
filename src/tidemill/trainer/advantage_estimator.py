"""Compute advantages, returns and reference logprobs of complete groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tidemill.algos.advantages import ADVANTAGES, Scope, has_signal, overlong_penalty
from tidemill.algos.credit import CREDITS, GroupTurns
from tidemill.algos.kl import kl_reward
from tidemill.algos.returns import whiten
from tidemill.algos.user_functions import UserAdvantage, user_advantage
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import Group, Segment, Trajectory, pack_logprobs, pack_tokens
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.trainer.critic import Deferred, resolved
from tidemill.trainer.packing import (
    FloatArray,
    Microbatch,
    WeightedSample,
    missing_reference,
    pack,
    ref_logprobs,
    rollout_logprobs,
    split_by_sample,
    split_by_tokens,
    trained_positions,
)

TokenFunction = Callable[[Microbatch], Deferred[torch.Tensor]]
"""Computes float32 [T] for the tokens of a microbatch, without gradient."""
DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The valid samples of a group with their advantages. All token weights are 1."""

    samples: list[WeightedSample]
    signal: bool  # whether any advantage was non-zero before whitening


class AdvantageEstimator:
    """Turns rewards into advantages as configured in `spec.algorithm`.

    Args:
        device: of the microbatches.
        reference: computes logprobs of the reference model for samples that have none; None if there is no model.
        values: computes values of the critic, if there is one.
        request_early: request values as soon as a group is complete, because the critic runs in another process.
        ranks: the ranks that share the computation of values and reference logprobs.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        *,
        reference: Callable[[Microbatch], torch.Tensor] | None = None,
        values: TokenFunction | None = None,
        request_early: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._spec, self._device, self._ranks = spec, device, ranks
        name = spec.algorithm.advantage
        self._estimator = ADVANTAGES.get(name)
        self._user: UserAdvantage | None = None if self._estimator else user_advantage(name)
        self._reference, self._values, self._request_early = reference, values, request_early
        self._kl_in_reward = spec.algorithm.kl_beta > 0 and spec.algorithm.kl_in == "reward"
        own_scope = self._user.scope if self._user else ADVANTAGES[name].scope
        self.scope: Scope = "batch" if spec.algorithm.whiten else own_scope

    def request_values(self, group: Group, valid: Sequence[bool]) -> Deferred[list[FloatArray]] | None:
        """Request the values [T_s] of a group's valid samples; None if `estimate` is to compute them for all groups
        together, which shares prefixes between groups."""
        if self._values is None or not self._request_early:
            return None
        trajectories = [self._with_final_state(group.trajectories[index]) for index in _trainable(group, valid)]
        return self._compute(self._values, trajectories)

    def estimate(
        self,
        groups: Sequence[Group],
        valid: Sequence[Sequence[bool]],
        *,
        kl_beta: float,
        step: int = 0,
        values: Sequence[Deferred[list[FloatArray]] | None] = (),
    ) -> list[GroupAdvantages]:
        """Advantages of complete groups; if the scope is the batch, `groups` must be the whole batch.

        Args:
            valid: which samples of each group count.
            kl_beta: current coefficient of the KL penalty in the reward.
            step: number of the batch, for user functions.
            values: results of `request_values` for the groups.

        Raises:
            UserError: the algorithm needs rollout logprobs and the engine returned none, or they are not finite.
        """
        kept = [_trainable(group, ok) for group, ok in zip(groups, valid, strict=True)]
        trajectories = [g.trajectories[index] for g, indices in zip(groups, kept, strict=True) for index in indices]
        if not trajectories:  # every completion is empty
            return [GroupAdvantages(samples=[], signal=False) for _ in groups]
        self._check_logprobs(trajectories)
        references = self._ref_logprobs(trajectories)
        penalties: list[DoubleArray] = []  # [T] each, of every token
        for trajectory, ref in zip(trajectories, references, strict=True):
            penalty = np.zeros(trajectory.trained_length)
            if self._kl_in_reward and ref is not None:
                rollout = torch.from_numpy(rollout_logprobs(trajectory, len(penalty)).astype(np.float64))
                penalty = kl_beta * kl_reward(rollout, torch.from_numpy(ref.astype(np.float64))).numpy()
            penalties.append(penalty)
        if self._user is not None:
            samples = self._user_level(self._user, groups, valid, kept, penalties, step)
        elif self._estimator is not None and self._estimator.level == "token":
            token_rewards = []
            for trajectory, penalty in zip(trajectories, penalties, strict=True):
                token_rewards.append(-penalty)
                turns = np.arange(max(len(trajectory.turns), 1))
                last_tokens = np.searchsorted(_turn_of_tokens(trajectory), turns, side="right") - 1
                np.add.at(token_rewards[-1], last_tokens, self._turn_rewards(trajectory))
            samples = self._token_level(trajectories, token_rewards, [each for each in values if each is not None])
        else:
            samples = []
            rest = iter(penalties)
            level = self._sample_level if self._spec.algorithm.credit == "outcome" else self._turn_level
            for group, ok, indices in zip(groups, valid, kept, strict=True):
                samples += level(group, ok, indices, [next(rest) for _ in indices])
        samples = [replace(sample, ref_logprobs=ref) for sample, ref in zip(samples, references, strict=True)]
        signals = [has_signal(torch.as_tensor(sample.advantage)) for sample in samples]
        if self._spec.algorithm.whiten:  # over all trained tokens
            lengths = [trajectory.trained_length for trajectory in trajectories]
            flat = np.concatenate([np.full(n, s.advantage, np.float64) for s, n in zip(samples, lengths, strict=True)])
            parts = np.split(whiten(torch.from_numpy(flat)).numpy(), np.cumsum(lengths)[:-1])
            samples = [replace(sample, advantage=part) for sample, part in zip(samples, parts, strict=True)]
        ends = np.cumsum([0, *map(len, kept)]).tolist()
        return [
            GroupAdvantages(samples=samples[start:end], signal=any(signals[start:end])) for start, end in pairwise(ends)
        ]

    def _user_level(
        self,
        function: UserAdvantage,
        groups: Sequence[Group],
        valid: Sequence[Sequence[bool]],
        kept: Sequence[Sequence[int]],
        penalties: Sequence[DoubleArray],
        step: int,
    ) -> list[WeightedSample]:
        """Call the user function once per group, or once for all groups if its scope is the batch."""
        rest = iter(penalties)
        rewards = [
            self._rewards(g, ok, k, [next(rest) for _ in k]) for g, ok, k in zip(groups, valid, kept, strict=True)
        ]
        calls = [list(range(len(groups)))] if function.scope == "batch" else [[index] for index in range(len(groups))]
        samples: list[WeightedSample] = []
        for call in calls:
            trajectories = [trajectory for index in call for trajectory in groups[index].trajectories]
            components = [t.reward.components if t.reward else {} for t in trajectories]
            names = sorted({name for each in components for name in each})
            advantages = function(
                rewards=torch.tensor([reward for index in call for reward in rewards[index]], dtype=torch.float64),
                valid=torch.tensor([each for index in call for each in valid[index]]),
                lengths=[trajectory.trained_length for trajectory in trajectories],
                truncated=torch.tensor([trajectory.truncated for trajectory in trajectories]),
                components={
                    name: torch.tensor([each.get(name, math.nan) for each in components], dtype=torch.float64)
                    for name in names
                },
                step=step,
                group=torch.tensor([at for at, index in enumerate(call) for _ in groups[index].trajectories]),
            )
            rows = iter(zip(trajectories, advantages, strict=True))
            for index in call:
                own = [next(rows) for _ in groups[index].trajectories]
                chosen = [own[at] for at in kept[index]]
                samples += [WeightedSample(trajectory=t, advantage=a, token_weight=1.0) for t, a in chosen]
        return samples

    def _rewards(
        self, group: Group, valid: Sequence[bool], kept: Sequence[int], penalties: Sequence[DoubleArray]
    ) -> list[float]:
        """The shaped reward of each sample, minus its KL penalty; 0 for invalid samples."""
        rewards = [self._shaped_reward(t) if ok else 0.0 for t, ok in zip(group.trajectories, valid, strict=True)]
        for index, penalty in zip(kept, penalties, strict=True):
            rewards[index] -= float(penalty.sum())
        return rewards

    def _sample_level(
        self, group: Group, valid: Sequence[bool], kept: Sequence[int], penalties: Sequence[DoubleArray]
    ) -> list[WeightedSample]:
        """One advantage per sample, from the rewards of its group."""
        assert self._estimator is not None
        rewards = torch.tensor(self._rewards(group, valid, kept, penalties), dtype=torch.float64)
        advantages = self._estimator.function(rewards, torch.tensor(valid)).tolist()
        return [
            WeightedSample(trajectory=group.trajectories[index], advantage=advantages[index], token_weight=1.0)
            for index in kept
        ]

    def _turn_level(
        self, group: Group, valid: Sequence[bool], kept: Sequence[int], penalties: Sequence[DoubleArray]
    ) -> list[WeightedSample]:
        """One advantage per turn, for all its trained tokens."""
        assert self._estimator is not None
        algorithm, trajectories = self._spec.algorithm, group.trajectories
        counted = [index for index, ok in enumerate(valid) if ok]
        rewards = {index: self._turn_rewards(trajectories[index]) for index in counted}
        for index, penalty in zip(kept, penalties, strict=True):
            np.subtract.at(rewards[index], _turn_of_tokens(trajectories[index]), penalty)
        keys = [[turn.state_key for turn in trajectories[index].turns] or [""] for index in counted]
        numbers = {key: number for number, key in enumerate({key for row in keys for key in row})}
        turns = GroupTurns(
            rewards_GN=_padded(list(rewards.values())),
            reached_GN=_padded([np.ones(len(row)) for row in keys]).bool(),
            states_GN=_padded([np.array([float(numbers[key]) for key in row]) for row in keys]).long(),
        )
        credit = CREDITS[algorithm.credit]
        settings = {name: getattr(algorithm, name) for name in credit.settings}
        advantages_GN = credit.function(turns, self._estimator, **settings).numpy()
        rows = dict(zip(counted, advantages_GN, strict=True))
        chosen = [(trajectories[index], rows[index]) for index in kept]
        return [WeightedSample(trajectory=t, advantage=row[_turn_of_tokens(t)], token_weight=1.0) for t, row in chosen]

    def _token_level(
        self,
        trajectories: Sequence[Trajectory],
        rewards: Sequence[DoubleArray],
        requested: Sequence[Deferred[list[FloatArray]]],
    ) -> list[WeightedSample]:
        """One advantage per token; with a critic also its targets and its values, which may be `requested` already."""
        assert self._estimator is not None
        settings = {name: getattr(self._spec.algorithm, name) for name in self._estimator.settings}
        lengths = [len(each) for each in rewards]
        rewards_ST = _padded(rewards)
        if self._values is None:
            advantages_ST = self._estimator.function(rewards_ST, **settings).numpy()
            rows = zip(trajectories, advantages_ST, lengths, strict=True)  # in double until they are whitened or packed
            return [WeightedSample(trajectory=t, advantage=row[:n], token_weight=1.0) for t, row, n in rows]
        if not requested:
            requested = [self._compute(self._values, [self._with_final_state(t) for t in trajectories])]
        measured = [each for deferred in requested for each in deferred()]
        values = [each[:n] for each, n in zip(measured, lengths, strict=True)]
        next_values = [np.append(each, 0.0)[1 : n + 1] for each, n in zip(measured, lengths, strict=True)]
        last_ST = torch.arange(rewards_ST.shape[1]) == torch.tensor(lengths)[:, None] - 1
        truncated_S = torch.tensor([self._bootstraps(t) for t in trajectories])[:, None]
        advantages_ST = self._estimator.function(
            rewards_ST,
            _padded(values),
            _padded(next_values),
            terminated_T=last_ST & ~truncated_S,
            truncated_T=last_ST & truncated_S,
            **settings,
        ).numpy()
        return [
            WeightedSample(
                trajectory=trajectory,
                advantage=row[: len(value)],
                token_weight=1.0,
                returns=(row[: len(value)] + value).astype(np.float32),
                values=value,
            )
            for trajectory, row, value in zip(trajectories, advantages_ST, values, strict=True)
        ]

    def _ref_logprobs(self, trajectories: Sequence[Trajectory]) -> list[FloatArray | None]:
        """Reference logprobs [T] of each sample; missing ones are computed only if the reward needs them."""
        reference, known = self._reference, [ref_logprobs(trajectory) for trajectory in trajectories]
        missing = [trajectory for trajectory, each in zip(trajectories, known, strict=True) if each is None]
        if not self._kl_in_reward or not missing:
            return known
        if reference is None:
            raise missing_reference(missing[0])
        computed = iter(self._compute(lambda microbatch: resolved(reference(microbatch)), missing)())
        return [next(computed) if each is None else each for each in known]

    def _compute(self, function: TokenFunction, trajectories: Sequence[Trajectory]) -> Deferred[list[FloatArray]]:
        """[T] of each sample, in token order. Of several ranks each computes one run of a round; those without one in
        the last round compute the last run again."""
        samples = [WeightedSample(trajectory=each, advantage=0.0, token_weight=0.0) for each in trajectories]
        runs = split_by_tokens(samples, lambda sample: sample.input_ids, self._spec.batch.microbatch_budget)
        ranks = self._ranks
        own = [runs[min(first + ranks.index, len(runs) - 1)] for first in range(0, len(runs), ranks.size)]
        started = [(microbatch, function(microbatch)) for microbatch in (pack(run, self._device) for run in own)]

        def computed() -> list[FloatArray]:
            values = [split_by_sample(result(), microbatch.samples) for microbatch, result in started]
            if ranks.size > 1:
                sent = msgspec.msgpack.encode([[each.tobytes() for each in of_run] for of_run in values])
                parts = [msgspec.msgpack.decode(part, type=list[list[bytes]]) for part in ranks.gather(sent)]
                in_order = [of_run for of_round in zip(*parts, strict=True) for of_run in of_round][: len(runs)]
                values = [[np.frombuffer(each, np.float32) for each in of_run] for of_run in in_order]
            return [each for of_run in values for each in of_run]

        return computed

    def _bootstraps(self, trajectory: Trajectory) -> bool:
        """Whether the value of the final state stands in for the missing rest of a truncated sample."""
        return self._spec.algorithm.bootstrap_truncated and trajectory.truncated

    def _with_final_state(self, trajectory: Trajectory) -> Trajectory:
        """If the sample is bootstrapped, append a token (any) that the final state predicts."""
        if not self._bootstraps(trajectory):
            return trajectory
        ids = np.append(np.frombuffer(trajectory.token_ids, np.int32), 0)
        final = Segment(role="observation", start=len(ids) - 1, end=len(ids), trained=True)
        return Trajectory(
            sample_id=trajectory.sample_id,
            token_ids=pack_tokens(ids.tolist()),
            segments=(*trajectory.segments, final),
            rollout_logprobs=pack_logprobs([0.0] * (trajectory.trained_length + 1)),
            versions=(),
            finish=trajectory.finish,
        )

    def _shaped_reward(self, trajectory: Trajectory) -> float:
        """The reward plus the length penalty."""
        value = trajectory.reward.value if trajectory.reward else 0.0
        return value + overlong_penalty(
            trajectory.trained_length,
            max_new_tokens=self._spec.sampling.max_new_tokens,
            buffer_tokens=self._spec.algorithm.overlong_buffer_tokens,
        )

    def _turn_rewards(self, trajectory: Trajectory) -> DoubleArray:
        """The reward of each turn; an ordinary sample is one turn. Everything of the shaped reward that is not a reward
        of a turn belongs to the last turn, so the sum is the shaped reward."""
        rewards = np.array([turn.reward for turn in trajectory.turns] or [0.0], np.float64)
        rewards[-1] = self._shaped_reward(trajectory) - rewards[:-1].sum()
        return rewards

    def _check_logprobs(self, trajectories: Sequence[Trajectory]) -> None:
        needs = self._spec.algorithm.needs_rollout_logprobs
        missing = [t for t in trajectories if not t.rollout_logprobs]
        if needs and missing:
            raise UserError(
                f"the engine returned no rollout logprobs for {len(missing)} of {len(trajectories)} samples of prompt "
                f"{missing[0].sample_id.prompt_id}, and {needs[0]} needs them",
                where="algorithm",
                hint="use an engine that returns logprobs of sampled tokens, or set algorithm.correction.kind = "
                '"none", algorithm.proximal = "recomputed" and algorithm.kl_in = "loss"',
            )
        broken = [t for t in trajectories if not np.isfinite(np.frombuffer(t.rollout_logprobs, np.float32)).all()]
        if broken:
            raise UserError(
                f"rollout logprobs are not finite ({len(broken)} of {len(trajectories)} samples of prompt "
                f"{broken[0].sample_id.prompt_id})",
                where=self._spec.model.source,
                hint="the weights contain NaN or infinity, or the forward pass overflows: use another model or an "
                "earlier checkpoint, and lower optimizer.learning_rate if training caused it",
            )


def _turn_of_tokens(trajectory: Trajectory) -> npt.NDArray[np.int64]:
    """int64 [T], the turn of each trained token."""
    starts = [turn.start for turn in trajectory.turns[1:]]
    return np.searchsorted(starts, trained_positions(trajectory), side="right")


def _trainable(group: Group, valid: Sequence[bool]) -> list[int]:
    """Indices of the valid samples that have trained tokens."""
    return [index for index, t in enumerate(group.trajectories) if valid[index] and t.trained_length]


def _padded(rows: Sequence[npt.NDArray[np.floating]]) -> torch.Tensor:
    """float64 [S, T], padded with zeros."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
