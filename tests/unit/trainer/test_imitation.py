from __future__ import annotations

import numpy as np
import pytest
import torch

from tidemill.config.robot import CloneConfig, ControlConfig
from tidemill.models.actor import arrays_of
from tidemill.robots.policy_arrays import mean_action
from tidemill.robots.policy_folder import PolicyDescription, StoredPolicy
from tidemill.trainer.control import ControlNetworks
from tidemill.trainer.imitation import Demonstrations, ImitationLearner, teacher_actions

DESCRIPTION = PolicyDescription(
    task="arm",
    engine="mujoco",
    control_s=0.02,
    joints=("hip", "knee"),
    policies={"policy": ("hip", "knee")},
    obs_groups={"policy": ("own", "hidden"), "critic": ("own",)},
    layout={"own": (("angle", 2),), "hidden": (("speed", 1),)},
    history=1,
    activation="tanh",
)
CONTROL = ControlConfig(actor_hidden_dims=(4,), critic_hidden_dims=(4,), activation="tanh")


def test_the_loss_is_the_mean_squared_error_of_mean_actions() -> None:
    networks = ControlNetworks(DESCRIPTION, CONTROL, seed=0)
    with torch.no_grad():
        for parameter in networks.actors.parameters():
            parameter.zero_()
    learner = ImitationLearner(networks, CloneConfig(), CONTROL, seed=0)
    labels = torch.tensor([[1.0, -2.0], [0.0, 3.0]])
    rows = Demonstrations(inputs={"policy": torch.zeros(2, 3)}, labels={"policy": labels})
    assert learner.loss(rows).item() == pytest.approx((1 + 4 + 0 + 9) / 4)  # the policy's means are 0


def test_a_teacher_reads_the_newest_of_the_recorded_observations() -> None:
    networks = ControlNetworks(DESCRIPTION, CONTROL, seed=0)
    teacher = StoredPolicy(description=DESCRIPTION, weights=arrays_of(networks.actors))
    random = np.random.default_rng(0)
    chunk = {  # 2 worlds, 3 steps and the observation after them, 2 observations in each window
        "obs/own": random.standard_normal((2, 4, 2 * 2)).astype(np.float32),
        "obs/hidden": random.standard_normal((2, 4, 2 * 1)).astype(np.float32),
    }
    labels = teacher_actions([chunk], teacher, history=2)["policy"]
    assert labels.shape == (2 * 3, 2)
    newest = np.concatenate([chunk["obs/own"][1, 2, 2:], chunk["obs/hidden"][1, 2, 1:]])
    expected = mean_action(teacher.weights, "policy", newest[None], "tanh")
    np.testing.assert_allclose(labels[5], expected[0], rtol=1e-5)
