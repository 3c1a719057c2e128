"""Seconds by hand, on a GPU with round numbers."""

from __future__ import annotations

import pytest

from tidemill.core.errors import UserError
from tidemill.hardware.engine_profile import EngineEfficiency, EngineProfile, cache_bytes, engine_profile
from tidemill.hardware.gpu_catalog import Gpu
from tidemill.hardware.model_shape import ModelShape

GPU = Gpu(
    name="round",
    title="Round",
    memory_bytes=20e9,
    bandwidth_bytes_per_s=1e12,
    flops_per_s={"bf16": 1e14},
    interconnect="link",
    link_bytes_per_s=1e11,
    gpus_per_machine=8,
    source="made up",
)
PERFECT = EngineEfficiency(bandwidth=1, compute=1, link=1, reduction_s=1e-5, step_s=1e-3, memory=1)
# keys and values of a token: 10 layers * 2 * 2 heads * 50 * 2 bytes = 4000
SHAPE = ModelShape(
    parameters=1e9, layers=10, hidden=100, heads=4, kv_heads=2, head_dim=50, intermediate=300, vocab=1000, tied=True
)
EXPERTS = ModelShape(
    parameters=1e9,
    layers=10,
    hidden=100,
    heads=4,
    kv_heads=2,
    head_dim=50,
    intermediate=300,
    vocab=1000,
    tied=True,
    experts=8,
    experts_per_token=2,
    expert_parameters=8e8,
)
PLAIN = EngineProfile(
    slots=100,
    cache_tokens=1000,
    step_s=0.001,
    weights_s=0.01,
    cached_token_s=1e-6,
    sample_s=1e-4,
    attended_token_s=1e-8,
    prefill_token_s=1e-5,
    prefill_pair_s=1e-9,
)


def test_one_gpu() -> None:
    profile = engine_profile(SHAPE, GPU, efficiency=PERFECT)
    # 2 GB of weights at 1 TB/s: 2 ms; 4000 bytes a cached token: 4 ns; 2e9 FLOPs a token at 1e14: 20 µs
    assert profile.weights_s == pytest.approx(2e-3)
    assert profile.cached_token_s == pytest.approx(4e-9)
    assert profile.sample_s == pytest.approx(2e-5)
    # attention: 4 * 10 layers * 200 wide = 8000 FLOPs a cached token
    assert profile.attended_token_s == pytest.approx(8e-11)
    # one sample of 1000 tokens: 1 ms + max(2 ms + 4 µs, 20 µs); 400 of them: computing, 8 ms + 32 µs, is longer
    assert profile.decode_step_s(1, 1000) == pytest.approx(1e-3 + 2.004e-3)
    assert profile.decode_step_s(400, 400_000) == pytest.approx(1e-3 + 8.032e-3)
    # 20 GB less 2 GB of workspace and 2 GB of weights: 16 GB / 4000
    assert profile.cache_tokens == pytest.approx(4e6)


def test_two_gpus_halve_the_work_and_reduce() -> None:
    one, two = engine_profile(SHAPE, GPU, efficiency=PERFECT), engine_profile(SHAPE, GPU, gpus=2, efficiency=PERFECT)
    assert two.weights_s == one.weights_s / 2
    # 20 reductions of at least 10 µs a step; each token is 200 bytes, of which a ring of two sends 2 * 1/2: 2 ns
    assert two.step_s == pytest.approx(1e-3 + 20 * 1e-5)
    assert two.sample_s == pytest.approx(1e-5 + 20 * 2e-9)
    # 2 * (20 - 2) - 2 GB
    assert two.cache_tokens == pytest.approx(34e9 / 4000)


def test_experts_read_depend_on_the_batch() -> None:
    profile = engine_profile(EXPERTS, GPU, efficiency=PERFECT)
    # 0.4 GB of others and 1.6 GB of experts; one token reads 2 of 8, two 1 - (6/8)² = 7/16
    assert profile.weights_s == pytest.approx(0.4e-3)
    assert profile.decode_step_s(1, 0) == pytest.approx(1e-3 + 0.4e-3 + 1.6e-3 / 4)
    assert profile.decode_step_s(2, 0) == pytest.approx(1e-3 + 0.4e-3 + 1.6e-3 * 7 / 16)
    # FLOPs only of the experts used: 2 * (0.2e9 + 0.8e9 / 4)
    assert profile.sample_s == pytest.approx(8e8 / 1e14)


def test_prefill_attends_to_cached_tokens() -> None:
    # 100 tokens: 100 * (1e-5 + 1e-9 * 50); after 200 others 100 * (1e-5 + 1e-9 * 250)
    assert PLAIN.prefill_s(100) == pytest.approx(100 * (1e-5 + 5e-8))
    assert PLAIN.prefill_s(100, before=200) == pytest.approx(100 * (1e-5 + 2.5e-7))
    assert PLAIN.prefill_s(0) == 0


def test_chunked_prefill_costs_the_same() -> None:
    assert PLAIN.prefill_s(60) + PLAIN.prefill_s(40, before=60) == pytest.approx(PLAIN.prefill_s(100))


def test_cache_and_slots_limit_running_samples() -> None:
    assert PLAIN.most_running(5) == 100  # slots
    assert PLAIN.most_running(300) == 3  # cache
    assert PLAIN.most_running(1001) == 0


def test_the_plateau_reaches_nine_tenths_of_the_best_rate() -> None:
    # contexts of 1: a step of b samples takes 11 ms + b µs until computing is longer, at b = 100 or so: the best rate
    # is 100 / 11.1 ms = 9009 a second; 8108 need b / (11 ms + b µs): b = 89.91
    assert PLAIN.plateau(1) == 90
    rates = [PLAIN.tokens_per_s(running, 1) for running in range(1, 101)]
    assert next(at for at, rate in enumerate(rates, 1) if rate >= 0.9 * rates[-1]) == 90


def test_a_model_that_does_not_fit_has_no_cache() -> None:
    large = ModelShape(
        parameters=10e9, layers=10, hidden=100, heads=4, kv_heads=2, head_dim=50, intermediate=300, vocab=1000
    )
    assert cache_bytes(large, GPU, gpus=1, efficiency=PERFECT) == pytest.approx(-2e9)
    assert engine_profile(large, GPU, efficiency=PERFECT).most_running(1) == 0


def test_an_unsupported_dtype() -> None:
    with pytest.raises(UserError, match="no fp8 FLOP/s"):
        engine_profile(SHAPE, GPU, dtype="fp8")
