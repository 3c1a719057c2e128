"""Lengths and rewards as functions of the sample."""

from __future__ import annotations

import math
from statistics import correlation, fmean

import msgspec
import pytest

from tidemill.core.records import SampleId
from tidemill.hardware.completion_lengths import NORMAL, LogNormalLengths
from tidemill.sim.workload import Workload

WIDE = Workload(lengths=LogNormalLengths(median=1000, sigma=1.0, limit=10**9))


def sample(prompt: int, index: int, seed: int = 0) -> SampleId:
    return SampleId(run_seed=seed, purpose="train", prompt_id=f"p{prompt}", epoch=0, index=index)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prompt_correlation_keeps_the_distribution(share: float) -> None:
    law = msgspec.structs.replace(WIDE, prompt_correlation=share)
    pairs = [(law.length(sample(prompt, 0)), law.length(sample(prompt, 1))) for prompt in range(2000)]
    scores = [[NORMAL.inv_cdf(min(max(_below(law, length), 1e-6), 1 - 1e-6)) for length in pair] for pair in pairs]
    first, second = zip(*scores, strict=True)
    # 2,000 pairs: a correlation is known to 0.02, a median's share to 0.011.
    assert correlation(first, second) == pytest.approx(share, abs=0.06)
    assert fmean(length <= 1000 for length, _ in pairs) == pytest.approx(0.5, abs=0.04)


def _below(law: Workload, length: int) -> float:
    """The share of lengths below one, for median 1000 and sigma 1."""
    return NORMAL.cdf(math.log(length / 1000))


def test_samples_depend_only_on_their_id() -> None:
    assert WIDE.length(sample(1, 2)) == WIDE.length(sample(1, 2)) != WIDE.length(sample(1, 2, seed=1))


def test_rewards_have_the_configured_mean() -> None:
    law = msgspec.structs.replace(WIDE, solved=0.2)
    rewards = [law.reward(sample(prompt, index)).value for prompt in range(1000) for index in range(4)]
    assert set(rewards) == {0.0, 1.0}
    assert fmean(rewards) == pytest.approx(0.2, abs=0.03)  # of 4,000: a standard deviation of 0.006


def test_no_sample_is_longer_than_the_longest() -> None:
    assert Workload(lengths=LogNormalLengths(median=7, sigma=0.0, limit=7)).longest == 7
    limited = Workload(lengths=LogNormalLengths(median=1000, sigma=2.0, limit=5000))
    assert limited.longest == 5000 == max(limited.length(sample(prompt, 0)) for prompt in range(200))
