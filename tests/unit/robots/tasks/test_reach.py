from __future__ import annotations

import numpy as np

from tests.slider import linear_weights, played, simulate
from tidemill.robots.tasks.reach import TOLERANCE_M, Reach


def test_the_error_leads_from_the_tip_to_the_target() -> None:
    experience = played(simulate(Reach()), linear_weights(np.zeros((4, 14)), np.zeros(4)), 2)
    yaw, shoulder, elbow, wrist, *target = experience["poses"][0, 0].astype(np.float64)
    angles = np.cumsum([shoulder, elbow, wrist])
    away, height = np.array([0.3, 0.25, 0.1]) @ np.sin(angles), 0.2 + np.array([0.3, 0.25, 0.1]) @ np.cos(angles)
    tip = np.array([away * np.cos(yaw), away * np.sin(yaw), height])
    np.testing.assert_allclose(experience["obs/policy"][0, 1, -3:], target - tip, atol=1e-5)
    distance = np.linalg.norm(target - tip)
    assert not experience["episode/success"].any() if "episode/success" in experience else distance > TOLERANCE_M


def test_targets_stay_where_they_are() -> None:
    targets = played(simulate(Reach()), linear_weights(np.zeros((4, 14)), np.zeros(4)), 99)["poses"][..., 4:]
    assert np.abs(targets - targets[:, :1]).max() < 1e-3
    assert np.ptp(targets[:, 0], axis=0).min() > 0.05
