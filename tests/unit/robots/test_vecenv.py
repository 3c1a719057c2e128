from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.vecenvs import PointEnv, pendulum
from tidemill.config.robot import RobotConfig
from tidemill.core.chunks import HELD, Array, ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.core.errors import UserError
from tidemill.jobs.control import episode_values
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.programs.serve_vecenv import GymnasiumAdapter, RslRlAdapter
from tidemill.robots.vecenv import EnvironmentSimulation, EnvironmentTask, check_environment

POINT = "tests/vecenvs.py:point"
Arrays = Mapping[str, Any]


def weights() -> dict[str, Any]:
    """A linear policy of one observation."""
    one = np.ones(1)
    tensors = {"normaliser.mean": 0 * one, "normaliser.variance": one, "log_std": 0 * one}
    tensors |= {"layers.0.weight": one[:, None], "layers.0.bias": 0 * one}
    return {f"policy.{name}": each.astype(np.float32) for name, each in tensors.items()}


def simulation(worlds: int = 8, environment: str = POINT, **robot: Any) -> EnvironmentSimulation:
    config = RobotConfig(environment=environment, **robot)
    groups = {"policy": ("policy",), "critic": ("critic" if environment == POINT else "policy",)}
    return EnvironmentSimulation(config, worlds=worlds, activation="elu", obs_groups=groups)


def run(
    simulated: EnvironmentSimulation, iteration: int, state: Mapping[str, Array] | None = None, *, steps: int = 8
) -> tuple[ChunkAnswer, Arrays]:
    key = ChunkKey(seed=3, purpose="train", shard=0, iteration=iteration)
    answer = simulated.run(weights(), ChunkRequest(key=key, steps=steps, state=dict(state or {})))
    return answer, unpack(answer.experience)


def test_the_experience_of_an_rsl_rl_environment() -> None:
    """Points that start within [-1, 1], move by at most 0.1, and end after 20 steps."""
    _, found = run(simulation(environment_args={"plain": False}), 0, steps=24)

    assert found["obs/policy"].shape == (8, 25, 1)
    assert found["obs/critic"].shape == (8, 25, 2)
    assert found["actions"].shape == found["means"].shape == (8, 24, 1)
    assert found["logprobs"].shape == (8, 24, 1)
    moved = found["obs/policy"][:, :-1, 0] + 0.1 * np.clip(found["actions"][..., 0], -1, 1)
    going = ~(found["terminated"] | found["truncated"])
    np.testing.assert_allclose(found["obs/policy"][:, 1:, 0][going], moved[going], atol=1e-6)
    np.testing.assert_allclose(found["rewards"], -np.abs(moved), atol=1e-6)
    # log N(a; m, 1) = -(a - m)^2 / 2 - log sqrt(2 pi)
    expected = -0.5 * (found["actions"] - found["means"]) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(found["logprobs"], expected, atol=1e-5)
    assert not going.all(axis=1).any()  # every point reaches 20 steps once; they started at different times
    assert len(set(np.argmax(found["truncated"], axis=1))) > 1
    assert "final_at" not in found
    assert "episode/success" not in found
    assert len(found["episode/return"]) == (found["truncated"] | found["terminated"]).sum()
    assert found["invalid"] == found["restarted"] == 0


class TellingPoint(PointEnv):
    """Says where a step succeeds, and logs; an episode succeeds right of 0."""

    def step(self, actions: Any) -> Any:
        observations, rewards, dones, extras = super().step(actions)
        count = int(self.episode_length_buf[0])
        log = {"/Episode/tracking": torch.tensor([0.5]), "Curriculum/level": count, "odd": np.nan, "text": "no"}
        return observations, rewards, dones, extras | {"success": observations["critic"][:, 1] > 0.25, "log": log}


def telling(num_envs: int, seed: int) -> Any:
    return TellingPoint(num_envs, seed, plain=True)


@pytest.mark.parametrize("python", ["", sys.executable])
def test_success_and_logs_are_those_of_the_rsl_rl_environment(python: str) -> None:
    simulated = simulation(environment=f"{__file__}:telling", python=python)
    _, found = run(simulated, 0, steps=24)
    simulated.close()
    ended = found["terminated"] | found["truncated"]
    succeeded = np.abs(found["obs/policy"][:, 1:, 0]) > 0.5
    assert sorted(found["episode/success"]) == sorted(succeeded[ended])
    assert {name for name in found if name.startswith("log/")} == {"log/Episode/tracking", "log/Curriculum/level"}
    assert found["log/Episode/tracking"].tolist() == [0.5] * 24
    values = episode_values([dict(found), dict(found)])
    assert values["robot/log/Episode/tracking"] == 0.5
    assert values["robot/log/Curriculum/level"] == found["log/Curriculum/level"].mean()


class OldPoint(PointEnv):
    """The interface of rsl_rl 2."""

    def get_observations(self) -> Any:
        groups = super().get_observations()
        return groups["policy"], {"observations": groups}

    def step(self, actions: Any) -> Any:
        (observations, more), rewards, dones, extras = super().step(actions)
        return observations, rewards, dones, extras | more


def test_the_observations_of_an_older_rsl_rl() -> None:
    old, new = RslRlAdapter(OldPoint(4, 0, plain=True)), RslRlAdapter(PointEnv(4, 0, plain=True))
    actions = np.ones((4, 1), np.float32)
    for given, expected in ((old.start(0, True), new.start(0, True)), (old.step(actions), new.step(actions))):
        assert given.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(given[name], values)


def test_chunks_of_an_environment_with_a_state_are_pure() -> None:
    simulated = simulation(environment_args={"saves": True})
    first, _ = run(simulated, 0)
    second, _ = run(simulated, 1, first.state)
    elsewhere, _ = run(simulation(environment_args={"saves": True}), 1, first.state)

    assert second.experience == elsewhere.experience
    assert HELD not in second.state


def test_without_a_state_episodes_restart_elsewhere_and_are_counted() -> None:
    simulated = simulation()
    first, _ = run(simulated, 0)
    elsewhere, restarted = run(simulation(), 1, first.state)
    second, continued = run(simulated, 1, first.state)
    _, again = run(simulated, 1, first.state)  # this environment has gone on since

    assert HELD in first.state
    assert (restarted["restarted"], continued["restarted"], again["restarted"]) == (8, 0, 8)
    assert unpack(elsewhere.state)["episode"].min() >= 1
    np.testing.assert_array_equal(continued["obs/policy"][:, 0, 0], unpack(first.state)["history/policy"][:, -1, 0])
    assert second.state.keys() == first.state.keys()


class Counting(gymnasium.Env[Any, Any]):
    """Observes how often it was stepped in this episode; truncated after `limit` steps."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, limit: int) -> None:
        self.limit, self.steps = limit, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, self.steps == self.limit, {}


class Renamed(gymnasium.vector.VectorWrapper):
    """A vector environment of an unknown class, which cannot reset some of its environments."""

    @property
    def unwrapped(self) -> Any:
        return self


def counting(num_envs: int, seed: int, mode: str = "NextStep", known: bool = True) -> Any:
    made = SyncVectorEnv([lambda: Counting(3)] * num_envs, autoreset_mode=AutoresetMode(mode))
    return made if known else Renamed(made)


class Early(Renamed):
    """Resets a world in the step in which its episode ends, with the infos of gymnasium 0.29."""

    def step(self, actions: Any) -> Any:
        *result, infos = self.env.step(actions)
        if "final_info" in infos:
            ended = infos["_final_info"]
            infos = {"final_observation": infos["final_obs"], "final_info": np.full(len(ended), None)}
            infos["final_info"][ended] = [{"is_success": True} for _ in np.flatnonzero(ended)]
        return *result, infos


def unequal(num_envs: int, seed: int, mode: str) -> Any:
    made = SyncVectorEnv([partial(Counting, 3 + at) for at in range(num_envs)], autoreset_mode=AutoresetMode(mode))
    early = Early(made) if mode == "SameStep" else made
    early.metadata = {}  # names no mode
    return early


@pytest.mark.parametrize(("version", "mode"), [("0.29.1", "SameStep"), ("1.0.0", "NextStep")])
def test_gymnasium_before_its_reset_masks(version: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium, "__version__", version)
    _, found = run(simulation(2, f"{__file__}:unequal", environment_args={"mode": mode}), 0, steps=5)
    # The end of the first world, which is after 3 steps, does not reset the second one.
    reset_in = {
        "SameStep": [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]],
        "NextStep": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 0]],
    }
    assert found["obs/policy"][:, :, 0].tolist() == reset_in[mode]
    assert found["final_at"].tolist() == [[0, 2], [1, 3]]
    assert found["final/policy"][:, 0].tolist() == [3, 4]
    assert "episode/success" not in found if mode == "NextStep" else found["episode/success"].all()


class Judged(Counting):
    def __init__(self, number: int, key: str) -> None:
        super().__init__(3)
        self.succeeds, self.key = number == 1, key

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, truncated, _ = super().step(action)
        return *result, truncated, {self.key: True} if truncated and self.succeeds else {}


def judged(num_envs: int, seed: int, mode: str, key: str) -> Any:
    made = [partial(Judged, number, key) for number in range(num_envs)]
    return SyncVectorEnv(made, autoreset_mode=AutoresetMode(mode))


@pytest.mark.parametrize("key", ["success", "is_success"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_success_is_that_of_the_gymnasium_environment(mode: str, key: str) -> None:
    simulated = simulation(3, f"{__file__}:judged", environment_args={"mode": mode, "key": key})
    _, found = run(simulated, 0, steps=7)
    assert found["episode/success"].tolist() == [False, True, False] * 2


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_autoreset_mode_gives_the_same_experience(mode: str) -> None:
    arguments = {"mode": mode}
    _, found = run(simulation(2, f"{__file__}:counting", environment_args=arguments), 0, steps=7)

    #                                                obs before each of 7 steps; the third ends an episode
    assert found["obs/policy"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert found["truncated"][0].tolist() == [False, False, True, False, False, True, False]
    assert found["final_at"].tolist() == [[0, 2], [1, 2], [0, 5], [1, 5]]
    assert found["final/policy"][:, 0].tolist() == [3, 3, 3, 3]
    assert found["episode/length"].tolist() == [3, 3, 3, 3]
    assert "ignored" not in found


def test_a_step_in_which_an_environment_resets_itself_is_marked() -> None:
    arguments: dict[str, Any] = {"mode": "NextStep", "known": False}
    _, found = run(simulation(2, f"{__file__}:counting", environment_args=arguments), 0, steps=7)

    assert found["obs/policy"][0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert found["ignored"][0].tolist() == [False, False, False, True, False, False, False]
    assert found["truncated"][0].tolist() == [False, False, True, True, False, False, True]
    assert found["rewards"][0].tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert found["episode/length"].tolist() == [3, 3, 3, 3]


def test_an_evaluation_ends_episodes_that_go_on() -> None:
    simulated = simulation(4, f"{__file__}:counting")
    key = ChunkKey(seed=3, purpose="evaluation", shard=0, iteration=0)
    answer = simulated.run(weights(), ChunkRequest(key=key, steps=2))
    found = unpack(answer.experience)
    assert found["episode/length"].tolist() == [2, 2, 2, 2]
    assert not found["episode/fell"].any()


class Diverging(Counting):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, more = super().step(action)
        value = [np.inf, np.nan, -np.inf][self.steps - 1]
        return np.full(1, value, np.float32), reward, terminated, truncated, more


def diverging(num_envs: int, seed: int) -> Any:
    return SyncVectorEnv([lambda: Diverging(3)] * num_envs)


def test_observations_that_are_not_finite_are_counted_and_reach_no_network() -> None:
    _, found = run(simulation(4, f"{__file__}:diverging"), 0, steps=3)
    assert found["invalid"] == 4  # worlds; each has several such observations
    for name in ("obs/policy", "final/policy"):
        assert not found[name].any(), name


def named(num_envs: int, seed: int) -> Any:
    return object()


def test_groups_actions_and_limits_of_a_gymnasium_environment() -> None:
    task = EnvironmentTask(RobotConfig(environment="tests/vecenvs.py:pendulum"))

    assert task.joints == ("action_0",)
    assert task.layout == {"policy": (("policy", 3),)}
    assert task.obs_groups == {"policy": ("policy",), "critic": ("policy",)}
    assert task.steps_per_episode() == 200
    adapter = GymnasiumAdapter(pendulum(2, 0))
    observed = adapter._observed({"policy": np.zeros((2, 3)), "image": np.zeros((2, 4, 4))})
    assert {name: each.shape for name, each in observed.items()} == {"obs/policy": (2, 3), "obs/image": (2, 16)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": "nowhere.py:make"}, "no file nowhere.py"),
        ({"environment": "package.module"}, "names no function"),
        ({"environment": "nosuch.module:make"}, "there is no package nosuch in this Python"),
        ({"environment": "tests/vecenvs.py:points"}, 'no function "points"\n  did you mean point'),
        ({"environment": POINT, "python": "/nowhere/python"}, "robot.python: /nowhere/python does not exist"),
    ],
)
def test_a_missing_environment_is_found_before_the_run(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_environment(RobotConfig(**changes))


def test_the_processor_time_of_another_interpreter_counts() -> None:
    simulated = simulation(environment=f"{__file__}:busy", python=sys.executable)
    key = ChunkKey(seed=0, purpose="train", shard=0, iteration=0)
    answer = simulated.run(weights(), ChunkRequest(key=key, steps=4, state={}))
    simulated.close()
    assert answer.cpu_s >= 4 * 0.05


class BusyPoint(PointEnv):
    """A step takes 50 ms of CPU time."""

    def step(self, actions: Any) -> Any:
        until_s = time.process_time() + 0.05
        while time.process_time() < until_s:
            pass
        return super().step(actions)


def busy(num_envs: int, seed: int) -> BusyPoint:
    return BusyPoint(num_envs, seed, plain=True)


def test_modules_of_another_interpreter_are_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    check_environment(RobotConfig(environment="nosuch.module:make", python="~/python"))
    check_environment(RobotConfig(environment="tests.vecenvs:point"))


class Unready(Counting):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise OSError("no licence")


def unready(num_envs: int, seed: int) -> Any:
    return SyncVectorEnv([lambda: Unready(3)] * num_envs)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("named", "a object, which is neither rsl_rl|must return 64 environments"),
        ("missing", "has no attribute"),
        ("unready", "robot.environment: OSError: no licence"),
    ],
)
def test_a_wrong_function_is_refused(function: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        EnvironmentTask(RobotConfig(environment=f"{__file__}:{function}"))
