"""Seconds by hand, on a GPU with round numbers."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.hardware.test_engine_profile import GPU, SHAPE
from tidemill.hardware.gpu_catalog import Link, all_reduce_s, gather_s
from tidemill.hardware.trainer_profile import TrainerEfficiency, learning_passes, trainer_profile, updating_s

PERFECT = TrainerEfficiency(compute=1, link=1, hidden=1, bandwidth=1, launch_s=0, step_s=0)


def test_one_gpu() -> None:
    profile = trainer_profile(SHAPE, GPU, gpus=1, efficiency=PERFECT)
    # 2e9 FLOPs a token and pass at 1e14: 20 µs; 8000 FLOPs a pair; 1000 tokens in sequences of 100:
    # 4 passes with recomputation and 1 of the reference: 5 * (20 ms + 1000 * 50 pairs * 80 ps = 4 µs)
    step_s = profile.step_s(1000, 100, passes=learning_passes(recompute=True) + 1, microbatch=1000)
    # the update reads and writes 16 bytes of 1e9 parameters: 32 GB at 1 TB/s
    assert step_s == pytest.approx(5 * (20e-3 + 4e-6) + 32e-3)
    without = profile.step_s(1000, 100, passes=learning_passes(recompute=False), microbatch=1000)
    assert without == pytest.approx(3 * (20e-3 + 4e-6) + 32e-3)


def test_launches_bound_a_small_model() -> None:
    # 10 layers of 1 ms each: 10 ms a pass of a microbatch, and 0.5 s an update beside the 32 GB it moves in 32 ms.
    slow = msgspec.structs.replace(PERFECT, launch_s=1e-3, step_s=0.5)
    profile = trainer_profile(SHAPE, GPU, gpus=1, efficiency=slow)
    # 100 tokens compute for 2 ms, 1000 for 20 ms: then launches hide behind computing.
    assert profile.pass_s(100, 0, passes=4) == pytest.approx(4 * 10e-3)
    assert profile.pass_s(1000, 0, passes=4) == pytest.approx(4 * 20e-3)
    assert profile.pass_s(1000, 0, passes=4, microbatches=3) == pytest.approx(4 * 30e-3)
    assert profile.step_s(100, 0, passes=4, microbatch=100) == pytest.approx(4 * 10e-3 + 0.5 + 32e-3)


def test_gathering_is_partly_hidden() -> None:
    profile = trainer_profile(SHAPE, GPU, gpus=2, efficiency=PERFECT)
    # each of 2 ranks receives half of 2 GB at 100 GB/s: 10 ms a pass; computing 10,000 tokens takes 100 ms a pass
    assert profile.gather_s == pytest.approx(10e-3)
    assert profile.pass_s(10_000, 0, passes=1) == pytest.approx(0.1)
    # 100 tokens take 1 ms to compute: 9 ms show
    assert profile.pass_s(100, 0, passes=1) == pytest.approx(10e-3)
    # every microbatch gathers anew
    assert profile.pass_s(100, 0, passes=1, microbatches=10) == pytest.approx(100e-3)


def test_sharding_over_machines_uses_the_network() -> None:
    profile = trainer_profile(SHAPE, GPU, gpus=16, network=Link(bytes_per_s=1e9), efficiency=PERFECT)
    assert profile.gather_s == pytest.approx(2e9 * 15 / 16 / 1e9)
    own = trainer_profile(SHAPE, GPU, gpus=8, network=Link(bytes_per_s=1e9), efficiency=PERFECT)
    assert own.gather_s == pytest.approx(2e9 * 7 / 8 / 1e11)


def test_network_transfers() -> None:
    link = Link(bytes_per_s=100.0, latency_s=1.0)
    # a ring of 4 sends 2 * 3/4 of 200 bytes, and waits log2(4) times
    assert all_reduce_s(200, members=4, link=link) == 3.0 + 2.0
    assert all_reduce_s(200, members=1, link=link) == 0
    assert gather_s(200, members=4, link=link) == 1.5
    assert gather_s(200, members=1, link=link) == 0


def test_an_adapter_trains_and_updates_faster() -> None:
    # forward, the same again, and gradients of inputs only
    assert learning_passes(recompute=True, adapter=True) == 3
    # 1e6 parameters: 32 MB at 1 TB/s
    assert updating_s(1e6, GPU, gpus=1, efficiency=PERFECT) == pytest.approx(32e-6)
    # moments in 8 bits: 10 bytes a parameter, read and written
    assert updating_s(1e6, GPU, gpus=1, optimizer="adam-8bit", efficiency=PERFECT) == pytest.approx(20e-6)


def test_an_offloaded_optimizer_is_bound_by_pcie_and_host_memory() -> None:
    # 4 bytes of 1e9 parameters over 8 * 25 GB/s, 20 ms; 2 * 12 bytes in 2 * 200 GB/s, 60 ms
    seconds = updating_s(1e9, GPU, gpus=8, machines=2, offload=True, efficiency=PERFECT)
    assert seconds == pytest.approx(0.02 + 0.06)
