from __future__ import annotations

import pytest

from benchmarks.critic_placement import placed_of
from tests.unit.benchmarks.test_overlap import step


def test_figures_are_means_over_steps() -> None:
    lines = [
        step(3, samples=64, time_step_s=3.0, time_train_s=2.0, time_critic_wait_s=0.5, explained_variance=0.1),
        step(4, samples=64, time_step_s=1.0, time_train_s=1.0, time_critic_wait_s=0.0, explained_variance=0.4),
    ]
    found = placed_of(lines, "actor", 0)
    assert (found.samples, found.step_s, found.train_s) == (128, 2.0, 1.5)
    assert (found.critic_wait_s, found.explained_variance) == (0.25, 0.4)


def test_a_critic_in_another_place_fails() -> None:
    values = {"samples": 64, "time_step_s": 3.0, "time_train_s": 2.0, "explained_variance": 0.1}
    placed_of([step(3, **values)], "trainer", 0)
    with pytest.raises(RuntimeError, match="the critic's placement is not actor"):
        placed_of([step(3, **values)], "actor", 0)
    with pytest.raises(RuntimeError, match="the critic's placement is not trainer"):
        placed_of([step(3, time_critic_wait_s=0.5, **values)], "trainer", 0)
