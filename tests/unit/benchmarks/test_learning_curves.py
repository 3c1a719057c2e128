"""Two kinds of run side by side, evaluation by evaluation."""

from __future__ import annotations

import pytest

from benchmarks.learning_curves import Curve, points


def curve(seed: int, accuracy: dict[int, float]) -> Curve:
    return Curve(recipe="", seed=seed, accuracy=accuracy, n=32, evictions=0, migrations=0, training_s=1.0)


def test_means_spreads_and_noise_at_the_steps_that_all_have() -> None:
    quiet = [curve(0, {0: 0.1, 5: 0.5, 10: 0.8}), curve(1, {0: 0.1, 5: 0.7, 10: 0.8})]
    evicted = [curve(0, {0: 0.1, 5: 0.6}), curve(1, {0: 0.1, 5: 0.9})]
    first, second = points({"quiet": quiet, "evicted": evicted})
    assert (first.step, first.difference, first.noise) == (0, 0.0, 0.0)
    assert second.step == 5
    assert second.means == pytest.approx({"quiet": 0.6, "evicted": 0.75})
    assert second.spreads == {"quiet": (0.5, 0.7), "evicted": (0.6, 0.9)}
    assert second.difference == pytest.approx(0.15)
    # Variances 0.02 and 0.045 over two seeds each: 2 * sqrt(0.01 + 0.0225).
    assert second.noise == pytest.approx(2 * 0.0325**0.5)


def test_one_seed_has_no_noise() -> None:
    (point,) = points({"quiet": [curve(0, {0: 0.1})], "evicted": [curve(0, {0: 0.2})]})
    assert point.noise is None
