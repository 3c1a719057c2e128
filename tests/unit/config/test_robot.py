from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tidemill.config.issues import ConfigError
from tidemill.config.load import from_toml
from tidemill.config.robot import ControlConfig

OF_RSL_RL: dict[str, Any] = {  # Isaac Lab's settings of rsl_rl 5 for a quadruped
    "class_name": "PPO",
    "value_loss_coef": 1.0,
    "use_clipped_value_loss": True,
    "clip_param": 0.2,
    "entropy_coef": 0.01,
    "num_learning_epochs": 5,
    "num_mini_batches": 4,
    "learning_rate": 1.0e-3,
    "schedule": "adaptive",
    "gamma": 0.99,
    "lam": 0.95,
    "desired_kl": 0.01,
    "max_grad_norm": 1.0,
    "normalize_advantage_per_mini_batch": False,
    "rnd_cfg": None,
    "symmetry_cfg": None,
    "noise_std_type": "log",
    "share_cnn_encoders": False,
    "empirical_normalization": None,
    "actor_obs_normalization": True,
    "critic_obs_normalization": True,
    "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
}


def test_settings_of_rsl_rl_are_accepted() -> None:
    config = ControlConfig.model_validate(OF_RSL_RL)
    assert config.entropy_coef == 0.01
    assert config.obs_groups == {"policy": ("policy",), "critic": ("policy", "privileged")}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rnd_cfg", {"weight": 1.0}),
        ("symmetry_cfg", {"use_mirror_loss": True}),
        ("class_name", "Distillation"),
        ("optimizer", "muon"),
        ("use_mixed_precision", True),
        ("noise_std_type", "scalar"),
        ("actor_obs_normalization", False),
        ("share_cnn_encoders", True),
    ],
)
def test_what_is_not_supported_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{key} = .* is not supported: it is .* here"):
        ControlConfig.model_validate({key: value})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("robot.randomise.delay_s = [-0.02, 0.02]", r"robot.randomise.delay_s\[0\]: needs number >= 0"),
        ("twin.mass = [0.8, -1.0]", r"twin.mass\[1\]: needs number > 0"),
        ("twin.delay_s = [-0.02]", r"twin.delay_s\[0\]: needs number >= 0"),
        ("control.obs_groups.policy = []", "control.obs_groups.policy: is empty"),
        ('robot = { environment = "a:b", randomise.mass = [0.8, 1.2] }', "randomise has no effect on an environment"),
        ('robot = { environment = "a:b", engine = "newton" }', "engine has no effect on an environment"),
    ],
)
def test_settings_without_a_meaning_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_toml(line, source="recipe.toml")


def test_settings_of_rsl_rl_in_a_recipe() -> None:
    text = """
        [control]
        class_name = "PPO"
        rnd_cfg = {}
        entropy_coef = 0.01
        actor_hidden_dims = [128, 64]
        obs_groups = { actor = ["policy"], critic = ["policy"] }
    """
    control = from_toml(text, source="recipe.toml").control
    assert control.actor_hidden_dims == (128, 64)
    assert control.obs_groups == {"policy": ("policy",), "critic": ("policy",)}
    with pytest.raises(ConfigError, match=r"control: rnd_cfg = .* is not supported"):
        from_toml("[control]\nrnd_cfg = { weight = 1.0 }\n", source="recipe.toml")
