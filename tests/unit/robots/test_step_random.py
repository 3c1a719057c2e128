from __future__ import annotations

import numpy as np

from tidemill.robots.step_random import GAMMA, StepRandom, _mixed


def test_the_sequence_is_that_of_splitmix64() -> None:
    # The first outputs for the seed 1234567, as the reference implementation prints them.
    places = np.uint64(1234567) + GAMMA * np.arange(1, 4, dtype=np.uint64)
    assert _mixed(places).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numbers_are_uniform_normal_and_uncorrelated() -> None:
    """Over neighbouring seeds, steps and columns: 4 standard errors of 40,000 numbers."""
    seeds, steps = (each.ravel() for each in np.meshgrid(np.arange(200), np.arange(20), indexing="ij"))
    drawn = StepRandom(seeds, steps)
    uniform, normal = drawn.uniform(-1.0, 3.0, 10), drawn.normal(10)
    count = uniform.size
    assert ((uniform >= -1) & (uniform < 3)).all()
    shares = np.histogram(uniform, bins=20, range=(-1, 3))[0] / count
    assert np.abs(shares - 0.05).max() < 4 * np.sqrt(0.05 * 0.95 / count)
    assert abs(normal.mean()) < 4 / np.sqrt(count)
    assert abs(normal.var() - 1) < 4 * np.sqrt(2 / count)
    assert abs((normal**4).mean() - 3) < 4 * np.sqrt(96 / count)
    cube = normal.reshape(200, 20, 10)
    for axis in range(3):
        earlier, later = (np.take(cube, range(at, cube.shape[axis] - 1 + at), axis).ravel() for at in (0, 1))
        assert abs(np.corrcoef(earlier, later)[0, 1]) < 4 / np.sqrt(earlier.size)
    assert abs(np.corrcoef(uniform.ravel(), normal.ravel())[0, 1]) < 4 / np.sqrt(count)


def test_a_world_draws_the_same_next_to_any_others() -> None:
    both = StepRandom(np.array([5, 9]), np.array([3, 40]))
    alone = StepRandom(np.array([9]), np.array([40]))
    for _ in range(2):
        np.testing.assert_array_equal(both.normal(4)[1:], alone.normal(4))
