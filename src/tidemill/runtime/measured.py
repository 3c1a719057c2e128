"""What an evaluation found, and the figures of it: of one model, and of two on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tidemill.controller.evaluation import Evaluation, correct
from tidemill.core.buffers import unpack_tokens
from tidemill.core.records import Group, Prompt, Reward, Trajectory
from tidemill.telemetry.statistics import (
    bootstrap_mean,
    distinct_n,
    length_figures,
    mean_pass_at_k,
    paired,
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
    def right(self) -> list[float]:
        """1 or 0 of each greedy completion."""
        return [float(correct(sample)) for sample in self.greedy.samples]

    @property
    def shares_right(self) -> list[float]:
        """Of each prompt's drawn samples."""
        return [fmean(correct(sample) for sample in group.trajectories) for group in self.drawn]


def figures(measured: Measured, *, ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one model, its greedy completions among them; intervals are of 95 %.

    Args:
        ks: of pass@k, where samples were drawn.
    """
    result, samples = measured.greedy.result, measured.greedy.samples
    found: dict[str, Any] = {
        "greedy_accuracy": result.greedy_accuracy,
        "greedy_accuracy_interval": list(share_interval(measured.right)[1:]),
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
        {"prompt": prompt.text, "completion": sample.text, "answer": prompt.answer, "correct": correct(sample)}
        for prompt, sample in zip(measured.prompts, samples, strict=True)
    ]
    return found


def comparison(other: Measured, this: Measured) -> dict[str, Any]:
    """`this` against `other` on the same prompts: means, their difference, and what chance would make of it."""
    pairs: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "greedy_accuracy": (other.right, this.right),
        "completion_tokens": (_lengths(other), _lengths(this)),
    }
    if this.drawn:
        pairs["drawn_accuracy"] = (other.shares_right, this.shares_right)
    for name, rewards in this.scores.items():
        pairs[name] = _both_valid(other.scores[name], rewards)
    return {
        "model": other.model,
        "weights_digest": other.greedy.result.version.digest,
        "figures": {name: _paired(*values) for name, values in pairs.items() if values[0]},
        "samples": [
            {"prompt": prompt.text, "completion": sample.text, "correct": correct(sample)}
            for prompt, sample in zip(other.prompts, other.greedy.samples, strict=True)
        ],
    }


def _drawn(measured: Measured, ks: Sequence[int]) -> dict[str, Any]:
    samples = [sample for group in measured.drawn for sample in group.trajectories]
    counts = [(len(group.trajectories), sum(map(correct, group.trajectories))) for group in measured.drawn]
    within = [_distinct(group.trajectories) for group in measured.drawn]
    return {
        "samples_per_prompt": len(measured.drawn[0].trajectories),
        "pass_at": {str(k): mean_pass_at_k(counts, k)._asdict() for k in ks},
        "invalid": sum(sample.reward is None or not sample.reward.valid for sample in samples),
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


def _both_valid(one: Sequence[Reward], other: Sequence[Reward]) -> tuple[list[float], list[float]]:
    both = [(a.value, b.value) for a, b in zip(one, other, strict=True) if a.valid and b.valid]
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
