from __future__ import annotations

import numpy as np

from tests.slider import linear_weights, played, simulate
from tidemill.robots.tasks.reach import Reach


def test_the_error_leads_from_the_tip_to_the_target() -> None:
    experience = played(simulate(Reach()), linear_weights(np.zeros((4, 11)), np.zeros(4)), 100)
    yaw, shoulder, elbow, wrist, *target = experience["poses"][0, 0].astype(np.float64)
    angles = np.cumsum([shoulder, elbow, wrist])
    away, height = np.array([0.3, 0.25, 0.1]) @ np.sin(angles), 0.2 + np.array([0.3, 0.25, 0.1]) @ np.cos(angles)
    expected = [np.arctan2(target[1], target[0]) - yaw, np.hypot(target[0], target[1]) - away, target[2] - height]
    np.testing.assert_allclose(experience["obs/policy"][0, 1, -3:], expected, atol=1e-5)
    assert (experience["episode/figure/distance"] > 0.05).all()
    assert not experience["episode/success"].any()


def test_targets_stay_where_they_are() -> None:
    targets = played(simulate(Reach()), linear_weights(np.zeros((4, 11)), np.zeros(4)), 99)["poses"][..., 4:]
    assert np.abs(targets - targets[:, :1]).max() < 1e-3
    assert np.ptp(targets[:, 0], axis=0).min() > 0.05


def test_no_action_makes_the_arm_oscillate() -> None:
    weights = linear_weights(np.zeros((4, 11)), np.zeros(4), std=2.0)
    experience = played(simulate(Reach(), worlds=16), weights, 100, deterministic=False)
    assert np.abs(experience["obs/policy"][..., 4:8]).max() < 3.5
