from __future__ import annotations

import math

import pytest

from tests.unit.hardware.test_engine_profile import PLAIN
from tidemill.hardware.completion_lengths import LogNormalLengths, lengths_of, quantiles
from tidemill.hardware.engine_profile import EngineProfile, Rollout, generation_s, rollout_of, steady_tokens_per_s

# a step takes 10 ms whatever runs; nothing else costs anything
EVEN = EngineProfile(
    slots=4,
    cache_tokens=1e9,
    step_s=0.01,
    weights_s=0.0,
    cached_token_s=0.0,
    sample_s=0.0,
    attended_token_s=0.0,
    prefill_token_s=0.0,
)


def rollout(*lengths: int, samples: int = 4, prompt: float = 0.0) -> Rollout:
    return Rollout(samples=samples, group_size=2, prompt_tokens=prompt, lengths=quantiles(lengths_of(lengths), 4))


def test_samples_that_fit_take_the_longest_time() -> None:
    assert generation_s(EVEN, rollout(100), 4) == pytest.approx(1.0)
    assert generation_s(EVEN, rollout(10, 10, 10, 100), 4) == pytest.approx(1.0)
    assert generation_s(EVEN, rollout(100), 0) == 0


def test_more_samples_than_slots_refill_free_slots() -> None:
    # 12 samples of 100 tokens in 4 slots: 3 rounds of 1 s
    assert generation_s(EVEN, rollout(100), 12) == pytest.approx(3.0)
    # half of 10 and half of 100, 8 samples: 4 * 55 tokens at 400 a second are 0.55 s, then a drain of 1 s
    assert generation_s(EVEN, rollout(10, 100), 8) == pytest.approx(1.55)


def test_prompts_are_computed_once_per_group() -> None:
    # 4 samples are 2 prompts of 100 tokens: 2 * 100 * (1e-5 + 1e-9 * 50)
    dear, free = rollout(10, prompt=100), rollout(10)
    without = PLAIN.decode_step_s(4, 4 * 105) * 10
    assert generation_s(PLAIN, dear, 4) == pytest.approx(2 * PLAIN.prefill_s(100) + without)
    assert generation_s(PLAIN, free, 4) < generation_s(PLAIN, dear, 4)


def test_a_sample_larger_than_the_cache_takes_infinite_time() -> None:
    assert generation_s(PLAIN, rollout(10, 1000, prompt=100), 1) == math.inf
    assert steady_tokens_per_s(PLAIN, rollout(10, 1000, prompt=100)) == 0


def test_steady_rate_keeps_slots_full() -> None:
    # 4 tokens every 10 ms; with two samples in flight 2
    assert steady_tokens_per_s(EVEN, rollout(10, 100)) == pytest.approx(400)
    assert steady_tokens_per_s(EVEN, rollout(10, 100), 2) == pytest.approx(200)
    fixed = rollout_of(LogNormalLengths(median=7, sigma=0.0, limit=7), samples=4, group_size=2, prompt_tokens=0)
    assert (fixed.mean, fixed.tokens) == (7, 28)


def test_running_context_weights_long_samples() -> None:
    # of 10 and 100 tokens: 110 tokens in all, 10 of them in the short one: (10² + 100²) / (2 * 110) = 45.9
    assert rollout(10, 100, prompt=5).running_context == pytest.approx(5 + 10_100 / 220)
