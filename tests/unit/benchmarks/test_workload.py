"""What the generation benchmark asks of both sides."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.additions import addition_prompts, unrelated_prompts
from benchmarks.workload import demo_shape, geometric_lengths, long_tail, random_prompts


def test_geometric_lengths_have_the_mean_of_a_cut_geometric_distribution() -> None:
    lengths = geometric_lengths(20_000, mean=48, cut=256)

    # The mean of min(X, c), X geometric with success 1/m, is m (1 - (1 - 1/m)^c) = 48 (1 - (47/48)^256) = 47.78.
    assert statistics.mean(lengths) == pytest.approx(47.78, rel=0.02)
    # P(X = 1) = 1/48, and P(X > 256) = (47/48)^256 = 0.0046 are all cut to 256 (and P(X = 256) adds almost nothing).
    assert lengths.count(1) / len(lengths) == pytest.approx(1 / 48, rel=0.15)
    assert lengths.count(256) / len(lengths) == pytest.approx(0.0046, rel=0.4)
    assert (min(lengths), max(lengths)) == (1, 256)


def test_the_demo_shape_has_prompts_six_times_as_long_as_completions() -> None:
    workload = demo_shape(rounds=1)

    assert {len(text) for text in workload.texts} == {18}
    assert set(workload.lengths) == {3}
    assert len(set(workload.texts)) == 8
    assert workload.samples == 64


def test_the_long_tail_has_a_prompt_for_every_group() -> None:
    workload = long_tail(samples=256, group_size=8, slots=32, vocabulary=1000, rounds=1)

    assert len(workload.prompts) * workload.group_size == workload.samples == 256
    work = workload.work([list(prompt) for prompt in workload.prompts])
    assert work.prompt_tokens == 256 * 32
    assert work.completion_tokens == sum(workload.lengths)


def test_prompts_with_nothing_in_common_differ_from_the_first_token_on() -> None:
    assert len({prompt[0] for prompt in random_prompts(32, 4, 49152)}) == 32
    assert len({prompt[:2] for prompt in unrelated_prompts(8)}) == 8
    assert len(unrelated_prompts(1)[0]) == len(addition_prompts(1)[0])
