"""What an evaluation found, and the figures of it: of one model, and of two on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tidemill.controller.evaluation import Evaluation, correct, rewards_of, right_or_wrong
from tidemill.core.buffers import unpack_tokens
from tidemill.core.records import Group, Prompt, Reward, Trajectory
from tidemill.telemetry.statistics import (
    bootstrap_mean,
    distinct_n,
    length_figures,
    mean_pass_at_k,
    paired,
    reward_interval,
    share_interval,
)

NGRAMS = (1, 2)
"""Diversity is told of single tokens and of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything one model answered, in the order of the prompts."""

    model: str
    prompts: tuple[Prompt, ...]
    greedy: Evaluation
    drawn: tuple[Group, ...] = ()  # none where no samples were asked for
    scores: Mapping[str, tuple[Reward, ...]]  # of the greedy completions, by the name of an additional scorer

    @property
    def right(self) -> list[bool] | None:
        """Whether each greedy completion is; None where rewards are graded."""
        return right_or_wrong(self.greedy.samples)

    @property
    def drawn_samples(self) -> list[Trajectory]:
        return [sample for group in self.drawn for sample in group.trajectories]

    @property
    def counts_right(self) -> list[tuple[int, int]] | None:
        """(samples, right ones) of each prompt's drawn ones; None where rewards are graded."""
        if right_or_wrong(self.drawn_samples) is None:
            return None
        return [(len(group.trajectories), sum(map(correct, group.trajectories))) for group in self.drawn]

    @property
    def drawn_rewards(self) -> list[float | None]:
        """Mean over each prompt's drawn samples with a valid reward; None without any."""
        rewards = [rewards_of(group.trajectories) for group in self.drawn]
        return [fmean(each) if each else None for each in rewards]


def figures(measured: Measured, *, ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one model, its greedy completions among them; intervals are of 95 %.

    Args:
        ks: of pass@k, where samples were drawn.
    """
    result, samples = measured.greedy.result, measured.greedy.samples
    found: dict[str, Any] = {}
    if rewards := rewards_of(samples):
        found |= {"reward_mean": result.reward_mean, "reward_mean_interval": list(reward_interval(rewards)[1:])}
    if right := measured.right:
        found |= {
            "greedy_accuracy": result.greedy_accuracy,
            "greedy_accuracy_interval": list(share_interval([float(each) for each in right])[1:]),
        }
    found |= {
        "n": result.n,
        "invalid": result.invalid,
        "truncated_fraction": result.truncated_fraction,
        "completion_tokens_mean": result.completion_tokens_mean,
        "duration_s": result.duration_s,
        "model": measured.model,
        "weights_digest": result.version.digest,
        "completion_tokens": length_figures([sample.completion_length for sample in samples]),
        **_distinct(samples),
    }
    if measured.scores:
        found["scores"] = {name: _score(rewards) for name, rewards in measured.scores.items()}
    if measured.drawn:
        found["drawn"] = _drawn(measured, ks)
    found["samples"] = [
        {"prompt": prompt.text, "completion": sample.text, "answer": prompt.answer, **judgement}
        for prompt, sample, judgement in zip(measured.prompts, samples, _judgements(measured), strict=True)
    ]
    return found


def comparison(other: Measured, this: Measured) -> dict[str, Any]:
    """`this` against `other` on the same prompts: means, their difference, and what chance would make of it."""
    pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "reward_mean": _both_known(_rewards(other.greedy.samples), _rewards(this.greedy.samples))
    }
    if (before := other.right) and (after := this.right):
        pairs["greedy_accuracy"] = (before, after)
    pairs["completion_tokens"] = (_lengths(other), _lengths(this))
    if this.drawn:
        pairs["drawn_reward_mean"] = _both_known(other.drawn_rewards, this.drawn_rewards)
    if (earlier := other.counts_right) and (later := this.counts_right):
        pairs["drawn_accuracy"] = ([c / n for n, c in earlier], [c / n for n, c in later])
    for name, rewards in this.scores.items():
        pairs[name] = _both_known([_value(each) for each in other.scores[name]], [_value(each) for each in rewards])
    return {
        "model": other.model,
        "weights_digest": other.greedy.result.version.digest,
        "figures": {name: _paired(*values) for name, values in pairs.items() if values[0]},
        "samples": [
            {"prompt": prompt.text, "completion": sample.text, **judgement}
            for prompt, sample, judgement in zip(other.prompts, other.greedy.samples, _judgements(other), strict=True)
        ],
    }


def _drawn(measured: Measured, ks: Sequence[int]) -> dict[str, Any]:
    samples, counts = measured.drawn_samples, measured.counts_right
    rewards = [each for each in measured.drawn_rewards if each is not None]
    within = [_distinct(group.trajectories) for group in measured.drawn]
    return {
        "samples_per_prompt": len(measured.drawn[0].trajectories),
        **({"reward_mean": reward_interval(rewards)._asdict()} if rewards else {}),
        "pass_at": {str(k): mean_pass_at_k(counts, k)._asdict() for k in ks} if counts else {},
        "invalid": len(samples) - len(rewards_of(samples)),
        "truncated_fraction": fmean(sample.truncated for sample in samples),
        "completion_tokens": length_figures([sample.completion_length for sample in samples]),
        **_distinct(samples),
        **{f"{name}_in_prompt": _mean([each[name] for each in within]) for name in within[0]},
    }


def _distinct(samples: Sequence[Trajectory]) -> dict[str, float]:
    completions = [unpack_tokens(sample.completion_ids) for sample in samples]
    return {f"distinct_{n}": distinct_n(completions, n) for n in NGRAMS}


def _score(rewards: Sequence[Reward]) -> dict[str, float]:
    values = [reward.value for reward in rewards if reward.valid]
    return {**bootstrap_mean(values)._asdict(), "invalid": len(rewards) - len(values)}


def _value(reward: Reward | None) -> float | None:
    return reward.value if reward is not None and reward.valid else None


def _rewards(samples: Sequence[Trajectory]) -> list[float | None]:
    return [_value(sample.reward) for sample in samples]


def _judgements(measured: Measured) -> list[dict[str, Any]]:
    """Of each greedy completion; `correct` is None where rewards are graded, `reward` without a valid one."""
    rewards = _rewards(measured.greedy.samples)
    right: Sequence[bool | None] = measured.right or [None] * len(rewards)
    return [{"reward": reward, "correct": correct} for reward, correct in zip(rewards, right, strict=True)]


def _both_known(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[list[float], list[float]]:
    both = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return [a for a, _ in both], [b for _, b in both]


def _paired(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    found = paired(before, after)
    return {
        "n": found.n,
        "other": found.before,
        "this": found.after,
        "difference": found.difference._asdict(),
        "higher": found.better,
        "lower": found.worse,
        "p_value": found.p_value,
    }


def _lengths(measured: Measured) -> list[float]:
    return [float(sample.completion_length) for sample in measured.greedy.samples]


def _mean(values: Sequence[float]) -> float:
    """Over what is a number; NaN where nothing is."""
    numbers = [value for value in values if not math.isnan(value)]
    return fmean(numbers) if numbers else math.nan
