"""How many groups may be started, and by which step they must be trained on."""

from __future__ import annotations

import pytest

from tidemill.config.learning import ScheduleConfig
from tidemill.controller.batching import latest_step, may_start, overcommitted


@pytest.mark.parametrize(
    ("version", "learned", "in_flight", "overcommit", "number"),
    [
        (0, 0, 0, 0, 8),  # on policy: one batch
        (0, 3, 5, 0, 0),  # the whole batch is started
        (1, 8, 0, 0, 8),  # the next one
        (0, 0, 0, 16, 24),  # two batches ahead
        (5, 40, 16, 16, 8),  # (5 + 1) * 8 + 16 = 64; 56 are trained on or in flight
        (5, 40, 15, 16, 9),  # one was dropped: another may start
        (2, 16, 30, 0, 0),  # above the limit, because the overcommit has shrunk
    ],
)
def test_may_start(version: int, learned: int, in_flight: int, overcommit: int, number: int) -> None:
    assert (
        may_start(version=version, learned=learned, in_flight=in_flight, batch_groups=8, overcommit=overcommit)
        == number
    )


def test_latest_step() -> None:
    assert latest_step(4, 7, 0) == 5  # on policy: step 5 trains version 4
    assert latest_step(4, 7, 2) == 7
    assert latest_step(None, 7, 2) == 10  # version 7 or newer will generate its tokens


def test_overcommit_as_configured() -> None:
    assert overcommitted(ScheduleConfig(), 8, []) == 0
    assert overcommitted(ScheduleConfig(max_policy_lag=2), 8, []) == 16
    assert overcommitted(ScheduleConfig(max_policy_lag=2, overcommit=5), 8, []) == 5


def test_overcommit_of_fresh_fraction() -> None:
    assert overcommitted(ScheduleConfig(max_policy_lag=2, fresh_fraction=0.5), 8, []) == 4  # half old, half new
    assert (
        overcommitted(ScheduleConfig(max_policy_lag=2, fresh_fraction=0.3), 8, []) == 5
    )  # 2.4 new groups, rounded up to 3
    assert overcommitted(ScheduleConfig(max_policy_lag=2, fresh_fraction=1.0), 8, []) == 0
    rising = [0.1 * at for at in range(40)]
    assert overcommitted(ScheduleConfig(max_policy_lag=2, fresh_fraction=0.5, overcommit="adaptive"), 8, rising) == 4


def test_adaptive_overcommit_follows_the_reward() -> None:
    adaptive = ScheduleConfig(max_policy_lag=2, overcommit="adaptive")
    rising, falling = [0.1 * at for at in range(40)], [-0.1 * at for at in range(40)]

    assert overcommitted(adaptive, 8, rising[:7]) == 0  # fewer than 8 batches
    assert overcommitted(adaptive, 8, rising[:8]) == 2  # an eighth of 16
    assert overcommitted(adaptive, 8, rising[:10]) == 6
    assert overcommitted(adaptive, 8, rising) == 16
    assert overcommitted(adaptive, 8, [*rising, *(3.9 for _ in range(60))]) == 0  # the reward no longer rises
    assert overcommitted(adaptive, 8, falling) == 0
