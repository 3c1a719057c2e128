from __future__ import annotations

import numpy as np

from tests.slider import linear_weights, played, simulate
from tidemill.robots.tasks.swingup import Swingup


def test_the_pole_hangs_at_the_start_and_the_rail_ends() -> None:
    still = played(simulate(Swingup()), linear_weights(np.zeros((1, 5)), [0]), 5)
    assert (still["obs/policy"][:, 0, 1] < -0.9).all()  # cosine
    driven = played(simulate(Swingup()), linear_weights(np.zeros((1, 5)), [1]), 60)
    # 10 N on 1.1 kg: 2.4 m take about 0.75 s, or 37 steps, of 0.02 s.
    first = driven["terminated"].argmax(1)
    assert ((first > 28) & (first < 45)).all()
    terms = driven["episode/term/left_rail"]
    np.testing.assert_allclose(terms, -50 * 0.02)
