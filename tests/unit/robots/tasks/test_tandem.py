from __future__ import annotations

import numpy as np

from tests.slider import linear_weights, played, simulate
from tidemill.robots.tasks.tandem import Tandem


def weights(left: float, right: float) -> dict[str, object]:
    """Both carts drive at a constant speed and do not lift."""
    parts = [
        linear_weights(np.zeros((2, 7)), [speed, -1.0], policy=name)
        for name, speed in (("left", left), ("right", right))
    ]
    return parts[0] | parts[1]


def test_carts_at_rest_hold_the_beam() -> None:
    played_episode = played(simulate(Tandem()), weights(0, 0), 150)
    assert not played_episode["terminated"].any()
    assert played_episode["episode/figure/tilt"].max() < 0.02


def test_carts_that_drive_together_carry_the_beam_and_apart_they_lose_it() -> None:
    together = played(simulate(Tandem()), weights(0.5, 0.5), 30)
    assert not together["terminated"].any()
    beam, cart = together["poses"][:, -1, 4], together["poses"][:, -1, 0]
    np.testing.assert_allclose(beam, cart, atol=0.1)
    assert (cart > 0.4).all()
    assert played(simulate(Tandem()), weights(-0.5, 0.5), 30)["terminated"].any(1).all()


def test_each_policy_moves_its_joints_only() -> None:
    actions = played(simulate(Tandem()), weights(0.25, -0.5), 2)["actions"]
    np.testing.assert_array_equal(actions[0, 0], np.array([0.25, -1, -0.5, -1], dtype=np.float32))
