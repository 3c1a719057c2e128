"""The batch size at which throughput flattens, from noisy observations."""

from __future__ import annotations

import random

import pytest

from tidemill.controller import estimates as module
from tidemill.controller.estimates import ThroughputProfile


def saturating(running: int) -> float:
    """Tokens/s of an engine that decodes up to 16 samples at 10 tokens/s each."""
    return 10.0 * min(running, 16)


def make_profile(*sizes: int, times: int = 3) -> ThroughputProfile:
    profile = ThroughputProfile()
    for running in sizes:
        for _ in range(times):
            profile.observe(running, saturating(running))
    return profile


def test_the_plateau_is_the_smallest_size_with_nine_tenths_of_the_best() -> None:
    assert make_profile(1, 2, 4, 8, 12, 14, 16, 24, 32).plateau(64) == 16  # 14 samples: 140 of 160 is 0.875
    assert make_profile(1, 2, 4, 8, 12, 15, 24, 32).plateau(64) == 15  # 150 of 160 is 0.94


def test_with_rising_throughput_the_plateau_is_the_largest_size() -> None:
    assert make_profile(2, 4, 8).plateau(64) == 8


@pytest.mark.parametrize("sizes", [(), (16,), (16, 24)])
def test_a_short_curve_gives_no_plateau(sizes: tuple[int, ...]) -> None:
    assert make_profile(*sizes).plateau(64) == 64


def test_single_observations_give_no_plateau() -> None:
    assert make_profile(1, 4, 16, 32, times=1).plateau(64) == 64
    assert make_profile(1, 4, 16, 32, times=2).plateau(64) == 64  # with age, a weight just below 2


def test_shortened_and_idle_intervals_do_not_change_the_plateau() -> None:
    profile = make_profile(1, 2, 4, 8, 16, 32)
    for running in (8, 16, 32):
        for rate in (4000.0, 0.3, 5.0, 4000.0):
            profile.observe(running, rate)
    for running, rate in ((0, 50.0), (4, 0.0), (64, float("inf")), (64, float("nan"))):
        for _ in range(9):
            profile.observe(running, rate)
    for running in (8, 16, 32):
        for _ in range(3):
            profile.observe(running, saturating(running))

    assert profile.plateau(64) == 16


def test_ten_percent_noise_changes_the_plateau_little() -> None:
    source, profile = random.Random(0), ThroughputProfile()
    for _ in range(600):
        running = source.randint(1, 64)
        profile.observe(running, saturating(running) * source.gauss(1.0, 0.1))

    assert 13 <= profile.plateau(64) <= 19


def test_old_observations_lose_their_weight() -> None:
    profile = make_profile(1, 2, 4, 8, 16, 32, 64, times=module.KEPT)
    for _ in range(8 * module.HALF_LIFE):  # the old sizes now weigh 32 / 2 ** 8 = 0.125 each
        profile.observe(2, 20.0)
        profile.observe(4, 21.0)

    assert profile.plateau(64) == 2  # 20 of 21 is 0.95


def test_memory_is_bounded() -> None:
    profile = ThroughputProfile()
    for running in range(1, 4097):
        for _ in range(3):
            profile.observe(running, 1.0)

    sizes = 4 * 12 + 1  # 4096 is 2 ** 12
    assert len(profile._sizes) <= sizes
    assert max(len(rows) for rows in profile._sizes.values()) == module.KEPT
