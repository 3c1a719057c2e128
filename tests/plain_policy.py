"""A plain policy update: one turn and one token at a time, without packing or shared prefixes.

The formulas are reimplemented from the papers, without any function of `algos`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.fixed_critic import fixed_value
from tidemill.config.schema import RunSpec
from tidemill.core.records import Group, Trajectory, unpack_logprobs, unpack_tokens


@dataclass(kw_only=True)
class PlainSample:
    """A sample; lists and tensors have one element per generated token."""

    trajectory: Trajectory
    group: int
    reward: float
    logprobs: Tensor
    entropy: Tensor
    rollout: list[float]
    ref: Tensor | None
    advantages: list[float]
    returns: list[float]

    @property
    def length(self) -> int:
        return len(self.rollout)

    @property
    def turn_lengths(self) -> list[int]:
        return [len(ids) - start for ids, start in _passes(self.trajectory)]

    def turn_rewards(self, penalty: Sequence[float]) -> list[float]:
        """The rewards of the turns minus the penalties of their tokens; the last turn gets the rest of the reward."""
        rewards = [turn.reward for turn in self.trajectory.turns] or [0.0]
        rewards[-1] = self.reward - sum(rewards[:-1])
        ends = list(accumulate(self.turn_lengths))
        return [r - sum(penalty[end - n : end]) for r, end, n in zip(rewards, ends, self.turn_lengths, strict=True)]


def plain_policy(
    model: PreTrainedModel, settings: RunSpec, batch: Sequence[Group], reference: PreTrainedModel | None
) -> tuple[Tensor, list[PlainSample]]:
    """(loss of the whole batch at the start of the update, with gradient, samples)."""
    samples = [
        _sample(model, settings, t, number, reference) for number, one in enumerate(batch) for t in one.trajectories
    ]
    for number in range(len(batch)):
        _advantages(settings, [sample for sample in samples if sample.group == number])
    if settings.algorithm.whiten:
        _whiten(samples)
    total = torch.zeros(())
    for sample in samples:
        loss = _loss(settings, sample, _proximal(settings, sample))
        total = total + (loss.mean() if settings.algorithm.normalize == "sample" else loss.sum())
    divisor = {
        "sample": len(samples),
        "token": sum(sample.length for sample in samples),
        "constant": len(samples) * settings.sampling.max_new_tokens,
    }[settings.algorithm.normalize]
    return total / divisor, samples


def _sample(
    model: PreTrainedModel, settings: RunSpec, t: Trajectory, group: int, reference: PreTrainedModel | None
) -> PlainSample:
    logits = _logits(model, t)
    with torch.no_grad():
        ref = _chosen(_logits(reference, t), t) if reference is not None else None
    buffer = settings.algorithm.overlong_buffer_tokens
    over = len(logits) - (settings.sampling.max_new_tokens - buffer)
    assert t.reward is not None
    probabilities = logits.softmax(-1)
    return PlainSample(
        trajectory=t,
        group=group,
        reward=t.reward.value - (max(over, 0) / buffer if buffer else 0.0),
        logprobs=_chosen(logits, t),
        entropy=-(probabilities * probabilities.log()).sum(-1),
        rollout=unpack_logprobs(t.rollout_logprobs),
        ref=ref,
        advantages=[],
        returns=[],
    )


def _passes(t: Trajectory) -> list[tuple[list[int], int]]:
    """(tokens from the start of the context to the end of the turn, place where the turn starts) of every turn."""
    ids, passes, context = unpack_tokens(t.token_ids), [], 0
    for segment in t.segments:
        if segment.role == "context":
            context = segment.start
        if segment.role == "action":
            passes.append((ids[context : segment.end], segment.start - context))
    return passes


def _logits(model: PreTrainedModel, t: Trajectory) -> Tensor:
    """[T, vocabulary], with one forward pass for every turn."""
    passes = _passes(t)
    return torch.cat(
        [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, at - 1 : -1] for ids, at in passes]
    )


@torch.no_grad()
def generated_logprobs(model: PreTrainedModel, t: Trajectory) -> list[float]:
    """[T] of the generated tokens."""
    logprobs: list[float] = _chosen(_logits(model, t), t).tolist()
    return logprobs


def _chosen(logits: Tensor, t: Trajectory) -> Tensor:
    generated = [token for ids, start in _passes(t) for token in ids[start:]]
    return logits.log_softmax(-1)[torch.arange(len(generated)), torch.tensor(generated)]


def _advantages(settings: RunSpec, siblings: list[PlainSample]) -> None:
    algorithm = settings.algorithm
    penalties = []
    for sample in siblings:
        penalised = algorithm.kl_in == "reward" and sample.ref is not None
        ref = sample.ref.tolist() if penalised and sample.ref is not None else sample.rollout
        beta = algorithm.kl_beta
        penalties.append([beta * (made - fixed) for made, fixed in zip(sample.rollout, ref, strict=True)])
    if algorithm.advantage in ("gae", "reinforce_pp"):
        for sample, penalty in zip(siblings, penalties, strict=True):
            rewards = [-each for each in penalty]
            of_turns = sample.turn_rewards([0.0] * sample.length)
            for end, reward in zip(accumulate(sample.turn_lengths), of_turns, strict=True):
                rewards[end - 1] += reward
            _over_time(settings, sample, rewards)
        return
    totals = [sample.reward - sum(penalty) for sample, penalty in zip(siblings, penalties, strict=True)]
    if algorithm.credit != "outcome":
        rewards_by_turn = [sample.turn_rewards(penalty) for sample, penalty in zip(siblings, penalties, strict=True)]
        advantages = _by_turn(settings, [sample.trajectory for sample in siblings], rewards_by_turn)
        for sample, row in zip(siblings, advantages, strict=True):
            sample.advantages = [a for a, n in zip(row, sample.turn_lengths, strict=True) for _ in range(n)]
        return
    for sample, advantage in zip(siblings, _relative(algorithm.advantage, totals), strict=True):
        sample.advantages = [advantage] * sample.length


def _relative(advantage: str, rewards: list[float], floor: float = 1e-4) -> list[float]:
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    n, mean = len(rewards), fmean(rewards)
    if advantage == "grpo":
        return [(reward - mean) / (stdev(rewards) + floor) for reward in rewards]
    if advantage == "rloo":
        return [reward - (sum(rewards) - reward) / (n - 1) for reward in rewards]
    return [reward - mean for reward in rewards]


def _by_turn(settings: RunSpec, samples: list[Trajectory], rewards: list[list[float]]) -> list[list[float]]:
    """One advantage per turn of every sample."""
    algorithm = settings.algorithm
    returns = [
        [sum(algorithm.turn_gamma ** (k - t) * row[k] for k in range(t, len(row))) for t in range(len(row))]
        for row in rewards
    ]
    steps = [(s, t) for s, row in enumerate(rewards) for t in range(len(row))]
    kind = algorithm.advantage
    if algorithm.credit == "turn_returns":
        key = {(s, t): str(t) for s, t in steps}
        kind = kind if kind == "grpo" else "dr_grpo"
    else:
        key = {(s, t): samples[s].turns[t].state_key for s, t in steps}
    found = [[0.0] * len(row) for row in rewards]
    for value in set(key.values()):
        members = [step for step in steps if key[step] == value]
        for (s, t), advantage in zip(members, _relative(kind, [returns[s][t] for s, t in members], 1e-6), strict=True):
            found[s][t] = advantage
    if algorithm.credit == "gigpo":
        episodes = _relative(kind, [sum(row) for row in rewards], 1e-6)
        found = [
            [whole + algorithm.step_weight * step for step in row] for whole, row in zip(episodes, found, strict=True)
        ]
    return found


def _over_time(settings: RunSpec, sample: PlainSample, rewards: list[float]) -> None:
    algorithm, t = settings.algorithm, sample.trajectory
    values = [0.0] * (sample.length + 1)
    lam = 1.0
    if algorithm.advantage == "gae":
        passes, lam = _passes(t), algorithm.lam
        values = [fixed_value(ids[at - 1], at - 1) for ids, start in passes for at in range(start, len(ids))]
        final = passes[-1][0]
        bootstrapped = t.truncated and algorithm.bootstrap_truncated
        values.append(fixed_value(final[-1], len(final) - 1) if bootstrapped else 0.0)
    advantage = 0.0
    for at in reversed(range(sample.length)):
        error = rewards[at] + algorithm.gamma * values[at + 1] - values[at]
        advantage = error + algorithm.gamma * lam * advantage
        sample.advantages.insert(0, advantage)
    if algorithm.advantage == "gae":
        sample.returns = [advantage + value for advantage, value in zip(sample.advantages, values[:-1], strict=True)]


def _whiten(samples: list[PlainSample]) -> None:
    every = [advantage for sample in samples for advantage in sample.advantages]
    mean = sum(every) / len(every)
    variance = sum((each - mean) ** 2 for each in every) / (len(every) - 1)
    for sample in samples:
        sample.advantages = [(each - mean) / math.sqrt(variance + 1e-8) for each in sample.advantages]


def _proximal(settings: RunSpec, sample: PlainSample) -> list[float]:
    return sample.rollout if settings.algorithm.proximal == "rollout" else sample.logprobs.tolist()


def _correction(settings: RunSpec, sample: PlainSample, proximal: list[float]) -> list[float]:
    config = settings.algorithm.correction
    low, high = config.low or 0.0, config.high or math.inf
    logs = [after - before for after, before in zip(proximal, sample.rollout, strict=True)]
    ratios = [math.exp(log) for log in logs]
    if config.kind == "none":
        return [1.0] * len(ratios)
    if config.kind == "icepop":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    if config.kind == "sequence_tis":
        return [min(math.exp(sum(logs)), high)] * len(ratios)
    if config.kind == "geometric":
        return [float(low <= math.exp(sum(logs) / len(logs)) <= high)] * len(ratios)
    if config.kind == "mu_step":
        published = [unpack_logprobs(buffer) for buffer in sample.trajectory.publish_logprobs]
        chain = [sample.rollout, *published, proximal]
        weights = [1.0] * len(ratios)
        for before, after in pairwise(chain):
            factors = [min(math.exp(a - b), high) for a, b in zip(after, before, strict=True)]
            weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        return weights
    return [min(max(ratio, low), high) for ratio in ratios]


def _loss(settings: RunSpec, sample: PlainSample, proximal: list[float]) -> Tensor:
    """[T] of one sample."""
    algorithm = settings.algorithm
    advantages = torch.tensor(sample.advantages)
    ratio = (sample.logprobs - torch.tensor(proximal)).exp()
    if algorithm.loss == "gspo":
        of_all = math.exp((sample.logprobs.detach() - torch.tensor(proximal)).mean().item())
        bound = min(max(of_all, 1 - algorithm.clip_low), 1 + algorithm.clip_high) * advantages
        each = of_all * (1 + sample.logprobs - sample.logprobs.detach())  # value s, gradient s ∇log π_t
        loss = -torch.where(bound < of_all * advantages, bound, each * advantages)
    elif algorithm.loss == "cispo":
        loss = -ratio.detach().clamp(max=algorithm.clip_high) * advantages * sample.logprobs
    else:
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        if algorithm.dual_clip is not None:
            floor = torch.maximum(objective, algorithm.dual_clip * advantages)
            objective = torch.where(advantages < 0, floor, objective)
        loss = -objective
    weights = torch.tensor(_correction(settings, sample, proximal))
    loss = loss * weights
    if sample.ref is not None and algorithm.kl_in == "loss":
        difference = sample.ref - sample.logprobs
        estimate = difference.exp() - difference - 1
        loss = loss + algorithm.kl_beta * estimate * (ratio * weights if algorithm.kl_ratio else 1.0)
    return loss - algorithm.entropy_bonus * sample.entropy
