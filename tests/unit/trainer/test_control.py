from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict
from torch import Tensor, nn

from tidemill.config.robot import ControlConfig
from tidemill.models.actor import EPSILON, arrays_of
from tidemill.robots.policy_arrays import mean_action
from tidemill.robots.policy_folder import PolicyDescription
from tidemill.robots.simulation import State
from tidemill.trainer.control import (
    CENTRAL,
    ControlLearner,
    ControlNetworks,
    adapted_rate,
    collect,
    targets,
    whitened,
)

WORLDS, STEPS = 4, 6
ONE = PolicyDescription(
    task="t",
    engine="mujoco",
    control_s=0.02,
    joints=("a", "b", "c"),
    policies={"policy": ("a", "b", "c")},
    obs_groups={"policy": ("seen",), "critic": ("seen", "hidden")},
    layout={"seen": (("x", 3),), "hidden": (("y", 2),)},
    history=1,
    activation="elu",
)
TWO = PolicyDescription(
    task="t",
    engine="mujoco",
    control_s=0.02,
    joints=("a", "b", "c"),
    policies={"left": ("c", "a"), "right": ("b",)},
    obs_groups={"left": ("seen",), "right": ("hidden",), "critic": ("seen", "hidden")},
    layout=ONE.layout,
    history=1,
    activation="elu",
)
SMALL: dict[str, Any] = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,), "num_learning_epochs": 1}


def experience(networks: ControlNetworks, description: PolicyDescription, *, seed: int, worlds: int = WORLDS) -> State:
    """Made-up experience of the networks' policies, with the arithmetic of the simulation."""
    random = np.random.default_rng(seed)
    chunk: State = {
        "obs/seen": random.normal(size=(worlds, STEPS + 1, 3)).astype(np.float32),
        "obs/hidden": random.normal(size=(worlds, STEPS + 1, 2)).astype(np.float32),
        "rewards": random.normal(size=(worlds, STEPS)).astype(np.float32),
        "terminated": np.zeros((worlds, STEPS), dtype=bool),
        "truncated": np.zeros((worlds, STEPS), dtype=bool),
        "invalid": np.array(0),
    }
    chunk["terminated"][0, 2] = chunk["truncated"][1, 3] = True
    chunk["final_at"] = np.array([[1, 3]])
    chunk["final/seen"] = random.normal(size=(1, 3)).astype(np.float32)
    chunk["final/hidden"] = random.normal(size=(1, 2)).astype(np.float32)
    weights = arrays_of(networks.actors)
    actions = np.zeros((worlds, STEPS, len(description.joints)), dtype=np.float32)
    means, logprobs, stds = [], [], []
    for name, joints in description.policies.items():
        (group,) = description.obs_groups[name]
        mean = mean_action(weights, name, chunk[f"obs/{group}"][:, :-1].reshape(worlds * STEPS, -1), "elu")
        noise = random.normal(size=mean.shape).astype(np.float32)
        log_std = weights[f"{name}.log_std"]
        columns = [description.joints.index(joint) for joint in joints]
        actions[:, :, columns] = (mean + np.exp(log_std) * noise).reshape(worlds, STEPS, -1)
        means.append(mean.reshape(worlds, STEPS, -1))
        logprob = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
        logprobs.append(logprob.reshape(worlds, STEPS).astype(np.float32))
        stds.append(np.exp(log_std))
    chunk |= {"actions": actions, "means": np.concatenate(means, 2), "logprobs": np.stack(logprobs, 2)}
    return chunk | {"stds": np.concatenate(stds)}


def learner_of(description: PolicyDescription, **settings: Any) -> ControlLearner:
    config = ControlConfig(**SMALL | settings)
    networks = ControlNetworks(description, config, seed=3)
    return ControlLearner(networks, config, description, seed=3)


# Parity with rsl_rl.


def rsl_rl_ppo(learner: ControlLearner, **settings: Any) -> PPO:
    """rsl_rl's PPO with the same weights, without normalisation of inputs: its epsilon is another one."""
    for _, network in learner.networks.by_name():
        network.normaliser.variance.fill_(1 - EPSILON)  # so that ours changes nothing
    observed = TensorDict({"seen": torch.zeros(WORLDS, 3), "hidden": torch.zeros(WORLDS, 2)}, batch_size=[WORLDS])
    groups = {"actor": ["seen"], "critic": ["seen", "hidden"]}
    std = {"class_name": "rsl_rl.modules.distribution.GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    actor = MLPModel(observed, groups, "actor", 3, hidden_dims=[8], activation="elu", distribution_cfg=std)
    critic = MLPModel(observed, groups, "critic", 1, hidden_dims=[8], activation="elu")
    storage = RolloutStorage("rl", WORLDS, STEPS, observed, [3])
    copy_layers(learner, actor, critic)
    return PPO(actor, critic, storage, num_learning_epochs=1, num_mini_batches=1, **settings)


def linear(layers: Iterable[nn.Module]) -> list[nn.Linear]:
    return [each for each in layers if isinstance(each, nn.Linear)]


def copy_layers(learner: ControlLearner, actor: MLPModel, critic: MLPModel) -> None:
    networks = learner.networks
    for theirs, ours in ((actor, networks.actors["policy"]), (critic, networks.critics[CENTRAL])):
        for layer, own in zip(linear(theirs.mlp), linear(ours.layers), strict=True):
            layer.load_state_dict(own.state_dict())


def fill(ppo: PPO, chunk: State) -> None:
    """Give it the experience. At time limits rsl_rl adds γ V(obs_t)."""
    seen, hidden = torch.from_numpy(chunk["obs/seen"]), torch.from_numpy(chunk["obs/hidden"])
    for at in range(STEPS):
        observed = TensorDict({"seen": seen[:, at], "hidden": hidden[:, at]}, batch_size=[WORLDS])
        ppo.act(observed)
        ppo.transition.actions = torch.from_numpy(chunk["actions"][:, at])
        ppo.transition.actions_log_prob = torch.from_numpy(chunk["logprobs"][:, at, 0])
        ended = torch.from_numpy(chunk["terminated"][:, at] | chunk["truncated"][:, at])
        time_outs = torch.from_numpy(chunk["truncated"][:, at])
        ppo.process_env_step(observed, torch.from_numpy(chunk["rewards"][:, at]), ended, {"time_outs": time_outs})
    last = TensorDict({"seen": seen[:, -1], "hidden": hidden[:, -1]}, batch_size=[WORLDS])
    ppo.compute_returns(last)


@pytest.mark.parametrize("per_mini_batch", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_returns_losses_and_gradients_are_those_of_rsl_rl(per_mini_batch: bool, clipped: bool) -> None:
    settings: dict[str, Any] = {
        "normalize_advantage_per_mini_batch": per_mini_batch,
        "use_clipped_value_loss": clipped,
        "entropy_coef": 0.02,
        "value_loss_coef": 0.7,
        "gamma": 0.97,
        "lam": 0.9,
    }
    learner = learner_of(ONE, **settings)
    chunk = experience(learner.networks, ONE, seed=1)
    del chunk["final_at"], chunk["final/seen"], chunk["final/hidden"]  # rsl_rl's environments have none
    ppo = rsl_rl_ppo(learner, **settings)
    fill(ppo, chunk)
    data = collect([chunk], ONE)
    found = targets(learner.networks.critics[CENTRAL], data, CENTRAL, learner.config)
    stored = ppo.storage
    torch.testing.assert_close(found.returns, stored.returns[..., 0].T, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.values, stored.values[..., 0].T, atol=1e-6, rtol=0)
    rows = learner._rows(data, {CENTRAL: found})
    with torch.no_grad():  # away from the policy that acted: ratios are not 1, and values move beyond the clip range
        for layer in linear(learner.networks.actors["policy"].layers):
            layer.weight.mul_(1.3)
        for layer in linear(learner.networks.critics[CENTRAL].layers):
            layer.weight.mul_(3.0)
    copy_layers(learner, ppo.actor, ppo.critic)
    loss, figures = learner.loss(rows, data.log_stds)
    loss.backward()
    ppo.max_grad_norm = 1e9
    theirs = {f"actor.{name}": each for name, each in ppo.actor.named_parameters()}
    theirs |= {f"critic.{name}": each for name, each in ppo.critic.named_parameters()}
    gradients: dict[str, Tensor] = {}
    ppo.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: parameter.grad.clone() for name, parameter in theirs.items()})
    )
    reported = ppo.update()
    value, entropy = float(figures["value_loss"]), float(figures["entropy"])
    assert value == pytest.approx(reported["value"], abs=1e-6)
    assert entropy == pytest.approx(reported["entropy"], abs=1e-6)
    surrogate = float(loss.detach()) - 0.7 * value + 0.02 * entropy
    assert surrogate == pytest.approx(reported["surrogate"], abs=1e-6)
    actor, critic = learner.networks.actors["policy"], learner.networks.critics[CENTRAL]
    assert float(figures["clip_fraction"]) > 0
    assert clipped == (float(figures["value_clip_fraction"]) > 0)
    ours = {f"actor.mlp.{2 * at}.weight": layer.weight for at, layer in enumerate(linear(actor.layers))}
    ours |= {f"critic.mlp.{2 * at}.weight": layer.weight for at, layer in enumerate(linear(critic.layers))}
    ours |= {"actor.distribution.log_std_param": actor.log_std}
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=0)
    assert ppo.learning_rate == adapted_rate(1e-3, float(figures["approx_kl"]), 0.01)


# Formulas.


def test_a_time_limit_continues_with_the_value_of_the_last_observation() -> None:
    """A reward of 1 in every step and a critic that knows the value 1 / (1 - γ) of an endless episode: no advantage,
    whether the episode is cut or not; and -γ V where it terminates."""
    gamma = 0.9
    learner = learner_of(ONE, gamma=gamma)
    chunk = experience(learner.networks, ONE, seed=2)
    chunk["rewards"] = np.ones((WORLDS, STEPS), dtype=np.float32)
    critic = learner.networks.critics[CENTRAL]
    with torch.no_grad():
        last = linear(critic.layers)[-1]
        last.weight.zero_()
        last.bias.fill_(1 / (1 - gamma))
    found = targets(critic, collect([chunk], ONE), CENTRAL, learner.config)
    advantages = found.advantages.numpy()
    np.testing.assert_allclose(advantages[1:], 0, atol=1e-6)
    assert advantages[0, 2] == pytest.approx(-gamma / (1 - gamma), abs=1e-5)


@pytest.mark.parametrize(("known", "expected"), [(True, 1 + 0.9 * 7.0), (False, 1 + 0.9 * 3.0)])
def test_the_value_that_stands_in_at_a_time_limit(known: bool, expected: float) -> None:
    """Values are the first input: 3 in the episode, 7 at its last observation, 100 in the episode that follows."""
    learner = learner_of(ONE, gamma=0.9)
    chunk = experience(learner.networks, ONE, seed=2)
    chunk["rewards"][:], chunk["obs/seen"][:] = 1.0, 3.0
    chunk["obs/seen"][1, 4:], chunk["final/seen"][:] = 100.0, 7.0
    if not known:
        del chunk["final_at"], chunk["final/seen"], chunk["final/hidden"]
    found = targets(FirstInput(), collect([chunk], ONE), CENTRAL, learner.config)
    assert float(found.returns[1, 3]) == pytest.approx(expected, abs=1e-5)


class FirstInput(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[..., :1]


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.021, 1e-3 / 1.5),  # above twice the desired one
        (0.019, 1e-3),
        (0.006, 1e-3),
        (0.004, 1.5e-3),  # below half of it
        (0.0, 1e-3),  # the policy has not changed yet
        (float("nan"), 1e-3),
    ],
)
def test_adaptive_learning_rate(kl: float, expected: float) -> None:
    assert adapted_rate(1e-3, kl, 0.01) == pytest.approx(expected)
    assert adapted_rate(1e-5, 1.0, 0.01) == 1e-5
    assert adapted_rate(1e-2, 1e-4, 0.01) == 1e-2


def test_whitened_advantages() -> None:
    # 1, 2, 3: mean 2, standard deviation (ddof 1) 1.
    torch.testing.assert_close(whitened(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))


# Updates.


def test_importance_ratios_start_at_1_after_the_normaliser_has_moved() -> None:
    learner = learner_of(ONE, num_mini_batches=1)
    for iteration in range(3):
        chunk = experience(learner.networks, ONE, seed=iteration)
        data = collect([chunk], ONE)
        actor = learner.networks.actors["policy"]
        now = actor.logprobs(actor(data.inputs["policy"][:, :-1]), data.actions["policy"])
        torch.testing.assert_close(now, data.logprobs["policy"], atol=2e-5, rtol=0)
        values = learner.update([chunk], iteration)
        assert values["approx_kl"] < 1e-6  # of the one step, before it
        assert float(actor.normaliser.count) == pytest.approx(WORLDS * STEPS * (iteration + 1), rel=1e-3)


@pytest.mark.parametrize("critic", ["central", "separate"])
def test_several_policies(critic: str) -> None:
    """Each policy has its own actions and ratio; a critic of all of them shares its advantages."""
    learner = learner_of(TWO, critic=critic, num_mini_batches=1)
    networks = learner.networks
    chunk = experience(networks, TWO, seed=5)
    data = collect([chunk], TWO)
    np.testing.assert_array_equal(data.actions["left"], chunk["actions"][..., [2, 0]])
    np.testing.assert_array_equal(data.means["right"], chunk["means"][..., 2:])
    assert list(networks.critics) == ([CENTRAL] if critic == "central" else ["left", "right"])
    found = {name: targets(each, data, name, learner.config) for name, each in networks.critics.items()}
    rows = learner._rows(data, found)
    total = learner.loss(rows, data.log_stds)[0]
    # At ratios of 1 the policy loss is minus the mean of whitened advantages, which is 0; the critics' losses remain.
    errors = [(each.values - each.returns).square().mean() for each in found.values()]
    assert float(total.detach()) == pytest.approx(float(sum(errors)), rel=1e-4)
    before = arrays_of(networks)
    learner.update([chunk], 0)
    after = arrays_of(networks)
    assert all((before[name] != after[name]).any() for name in before)


def test_the_order_of_minibatches_depends_on_seed_and_iteration_only() -> None:
    learners = [learner_of(ONE), learner_of(ONE), learner_of(ONE)]
    chunk = experience(learners[0].networks, ONE, seed=0)
    for learner, iteration in zip(learners, (4, 4, 5), strict=True):
        torch.rand(iteration)  # other random numbers of the process do not matter
        learner.update([chunk], iteration)
    first, again, other = (arrays_of(each.networks)["actors.policy.layers.0.weight"] for each in learners)
    assert first.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize("name", ["rewards", "obs/seen"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    learner = learner_of(ONE)
    chunk = experience(learner.networks, ONE, seed=0)
    chunk[name][0, 0] = np.nan
    before = arrays_of(learner.networks)
    values = learner.update([chunk], 0)
    assert values["optimizer_steps_skipped"] == learner.config.num_mini_batches
    assert all(each.tobytes() == before[key].tobytes() for key, each in arrays_of(learner.networks).items())


def test_at_a_lag_the_rate_follows_the_change_by_the_update() -> None:
    learner = learner_of(ONE, num_mini_batches=1)
    chunk = experience(learner.networks, ONE, seed=0)
    with torch.no_grad():
        linear(learner.networks.actors["policy"].layers)[-1].bias.add_(1.0)  # another version
    assert learner.update([chunk], 0, lag=1)["approx_kl"] < 1e-6


def test_shards_are_joined_in_order() -> None:
    learner = learner_of(ONE)
    chunks = [experience(learner.networks, ONE, seed=seed) for seed in (0, 1)]
    data = collect(chunks, ONE)
    assert data.final_at.tolist() == [[1, 3], [WORLDS + 1, 3]]
    np.testing.assert_array_equal(data.rewards[WORLDS:], chunks[1]["rewards"])
    assert data.inputs[CENTRAL].shape == (2 * WORLDS, STEPS + 1, 5)
