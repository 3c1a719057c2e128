from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slider import SLIDER, Slider, linear_weights, played, simulate
from tidemill.config.robot import RandomiseConfig, RobotConfig
from tidemill.core.chunks import Array, ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.core.errors import UserError
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.setup import SimulationSetup, build
from tidemill.robots.simulation import Simulation
from tidemill.robots.task import Floats, Worlds
from tidemill.robots.tasks.quadruped import Quadruped

RANDOMISED = {
    "mass": (0.8, 1.2),
    "inertia": (0.9, 1.1),
    "friction": (0.5, 1.5),
    "gains": (0.9, 1.1),
    "delay_s": (0.0, 0.04),
    "observation_noise": 1.0,
    "push_interval_s": 0.1,
}
ZERO = linear_weights([0, 0], 0)
BY_SCHEDULE = linear_weights([1, 0], 1)  # actions 1, 2, 3, ...


@pytest.mark.parametrize("delay_substeps", [0, 1, 2, 4, 5, 8])
def test_actions_take_effect_after_the_delay(delay_substeps: int) -> None:
    delay_s = delay_substeps * 0.01
    experience = played(simulate(Slider(), delay_s=(delay_s, delay_s)), BY_SCHEDULE, 4)
    # Substep k has the action of the step in which k - delay lies, or none; 1 N for 0.01 s changes 1 kg by 0.01 m/s.
    forces = [0 if k < delay_substeps else (k - delay_substeps) // 4 + 1 for k in range(16)]
    speeds = 0.01 * np.cumsum(forces)[3::4]
    np.testing.assert_allclose(experience["obs/exact"][0, 1:, 0], speeds, rtol=1e-6)


def test_rewards_are_rates_and_figures_are_means() -> None:
    experience = played(simulate(Slider()), linear_weights([0, 0], 1), 30)
    # Speed after step t is 0.04 t, the rate is 2 + 0.04 t, a step lasts 0.04 s.
    np.testing.assert_allclose(experience["rewards"][0, :3], 0.04 * (2 + 0.04 * np.array([1, 2, 3])), rtol=1e-6)
    assert experience["episode/term/constant"] == pytest.approx(np.full(4, 30 * 0.04 * 2))
    assert experience["episode/figure/steps"] == pytest.approx(np.full(4, 15.5))
    assert experience["episode/return"] == pytest.approx(experience["rewards"].sum(1), rel=1e-6)
    assert experience["episode/success"].all()


def test_success_must_hold_for_the_last_second() -> None:
    # Backwards until step 5 of 30, then forwards: 1.2 s are 30 steps, the last second is 25 of them.
    early = played(simulate(Slider()), linear_weights([1, 0], -2), 30)  # forces -2, -1, 0, 1, ...: from step 5 on
    late = played(simulate(Slider()), linear_weights([1, 0], -3), 30)  # from step 7 on
    assert early["episode/success"].all()
    assert not late["episode/success"].any()


def test_training_episodes_that_start_in_the_last_second_are_judged_by_the_steps_they_have() -> None:
    key = ChunkKey(seed=0, purpose="train", shard=0, iteration=0)
    request = ChunkRequest(key=key, steps=29, deterministic=True)
    found = unpack(simulate(Slider(), worlds=64).run(linear_weights([0, 0], 1), request).experience)  # forwards
    assert found["episode/length"].min() < 25
    assert found["episode/success"].all()


def test_truncated_episodes_have_final_observations() -> None:
    experience = played(simulate(Slider()), linear_weights([0, 0], 1), 31)
    assert experience["truncated"].sum(1).tolist() == [1] * 4
    np.testing.assert_array_equal(experience["final_at"], [[world, 29] for world in range(4)])
    np.testing.assert_allclose(experience["final/policy"], [[30, 1.2]] * 4, rtol=1e-6)
    np.testing.assert_array_equal(experience["obs/policy"][:, 30], np.zeros((4, 2)))  # of the next episode


def test_history_is_oldest_first_and_starts_with_the_first_observation() -> None:
    observed = played(simulate(Slider(), history=3), linear_weights([0] * 6, 1), 32)["obs/policy"][0]
    assert observed[[0, 1, 2, 5], 0::2].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 4, 5]]
    assert observed[30, 0::2].tolist() == [0, 0, 0]  # after the time limit


class Exact(Slider):
    noise = {}


def test_noise_of_a_task_that_names_none_is_refused() -> None:
    with pytest.raises(UserError, match="names no noise of its observations"):
        simulate(Exact(), observation_noise=1.0)


def test_only_groups_of_policies_have_noise() -> None:
    experience = played(simulate(Slider(), worlds=64, observation_noise=2.0), ZERO, 30)
    assert experience["obs/policy"][..., 1].std() == pytest.approx(1.0, rel=0.05)  # twice 0.5
    assert not experience["obs/policy"][:, :30, 0].std(0).any()  # the task names no noise of this term
    assert not experience["obs/exact"][..., 0].any()


def test_pushes_change_the_velocity() -> None:
    experience = played(simulate(Slider(), worlds=64, push_interval_s=0.08, push_speed=0.5), ZERO, 29)
    changes = np.diff(experience["obs/exact"][..., 0], axis=1)
    assert np.mean(changes != 0) == pytest.approx(0.5, abs=0.05)
    assert np.abs(changes).max() == pytest.approx(0.5, abs=0.02)


def test_parameters_vary_between_episodes_and_are_recorded() -> None:
    experience = played(simulate(Slider(), mass=(0.5, 2.0), gains=(0.9, 1.1)), linear_weights([0, 0], 1), 60)
    mass, gain = experience["episode/parameter/mass"], experience["episode/parameter/gains"]
    assert len(set(mass)) == 8  # two episodes of four worlds
    assert ((mass >= 0.5) & (mass <= 2)).all()
    speeds = experience["final/exact"][:, 0]  # in the order of the episodes: 1.2 s of gain / mass
    np.testing.assert_allclose(speeds, 1.2 * gain / mass, rtol=1e-6)


def test_a_seed_determines_an_episode() -> None:
    """Where it starts, its parameters, its noise and its pushes: chunks and other worlds have no part in them."""
    settings: dict[str, Any] = RANDOMISED | {"worlds": 8}
    whole = played(simulate(Slider(), **settings), ZERO, 60)
    simulation = simulate(Slider(), **settings)
    seeds = dict(
        zip(zip(whole["episode/world"], whole["episode/number"], strict=True), whole["episode/seed"], strict=True)
    )
    assert len(set(seeds.values())) == len(seeds) == 16
    state: dict[str, Any] = {}
    parts = []
    for iteration, steps in enumerate((7, 23, 30)):
        key = ChunkKey(seed=0, purpose="test", shard=0, iteration=iteration)
        request = ChunkRequest(key=key, steps=steps, state=state, deterministic=True)
        answer = simulation.run(ZERO, request)
        state = answer.state
        parts.append(unpack(answer.experience))
    for group in ("policy", "exact"):
        observed = np.concatenate([part[f"obs/{group}"][:, :-1] for part in parts], axis=1)
        np.testing.assert_array_equal(observed, whole[f"obs/{group}"][:, :60])
    np.testing.assert_array_equal(
        np.concatenate([part.get("episode/seed", []) for part in parts]), whole["episode/seed"]
    )


class Exploding(Slider):
    """The physics of world 1 becomes infinite in step 3."""

    def controls(self, actions: Floats) -> Floats:
        return np.where(actions > 1, np.inf, actions)

    def observe(self, worlds: Worlds) -> Any:
        bad = (worlds.steps == 3) & (np.arange(len(worlds)) == 1)
        return dict(super().observe(worlds)) | {"policy": {"steps": 2.0 * bad[:, None], "speed": worlds.qvel.copy()}}


def test_worlds_that_are_not_finite_are_reset_and_counted(tmp_path: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    experience = played(simulate(Exploding()), linear_weights([1, 0], 0.5), 10)
    assert experience["invalid"] == 1  # a world, which explodes in steps 4 and 8
    assert experience["terminated"][1].nonzero()[0].tolist() == [3, 7]
    assert experience["rewards"][1, 3] == 0
    assert experience["episode/fell"].tolist() == [True, True]
    for name, values in experience.items():
        assert np.isfinite(values).all(), name
    untouched = played(simulate(Slider()), linear_weights([0, 0], 0.5), 10)
    np.testing.assert_array_equal(experience["obs/exact"][2], untouched["obs/exact"][2])
    assert not list(tmp_path.iterdir())  # MuJoCo writes its warnings into the working directory
    assert capfd.readouterr() == ("", "")


class UnknownGroup(Slider):
    obs_groups = {"policy": ("polic",), "critic": ("policy",)}


class UnknownNoise(Slider):
    noise = {"sped": 1.0}


class FlatTerm(Slider):
    def observe(self, worlds: Worlds) -> Any:
        return {"policy": {"speed": worlds.qvel[:, 0]}, "exact": {}}


class Mistake(Slider):
    def rewards(self, worlds: Worlds) -> Any:
        return {"speed": worlds.position("slider")[:, 0]}


class NoControls(Slider):
    def controls(self, actions: Floats) -> Floats:
        return actions[:, :0]


class Accelerometer(Slider):
    model = SLIDER.replace("<motor", '<motor name="motor"').replace(
        "</mujoco>", '<sensor><actuatorfrc name="force" actuator="motor"/></sensor></mujoco>'
    )

    def observe(self, worlds: Worlds) -> Any:
        return {"policy": {"force": worlds.sensor("force")}, "exact": {}}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NoControls, "controls() returns an array of the shape [4, 0] for actions [4, 1]"),
        (Accelerometer, "Accelerometer fails: ValueError: the sensor force measures forces or accelerations"),
        (UnknownGroup, 'there is no group of observations "polic"\n  did you mean policy?'),
        (UnknownNoise, 'there is no term of observations "sped"\n  did you mean speed?'),
        (FlatTerm, "observe()['policy'] returns speed of the shape [4] for 4 worlds\n  return arrays [worlds, width]"),
        (Mistake, "Mistake fails: "),
    ],
)
def test_mistakes_of_a_task_are_named(task: type[Slider], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate(task())
    assert str(caught.value).startswith(f"robot.task: {message}")


# Purity.


def quadruped_weights() -> dict[str, Any]:
    width = sum(columns for _, columns in simulate(Quadruped(), worlds=1).layout()["policy"])
    random = np.random.default_rng(5)
    return linear_weights(0.2 * random.standard_normal((12, 3 * width)), np.zeros(12), std=0.3)


def quadruped() -> Simulation:
    return simulate(Quadruped(), worlds=8, history=3, **RANDOMISED)


def chunk(simulation: Simulation, weights: Any, shard: int, iteration: int, state: dict[str, Array]) -> ChunkAnswer:
    key = ChunkKey(seed=1, purpose="train", shard=shard, iteration=iteration)
    return simulation.run(weights, ChunkRequest(key=key, steps=6, state=state, record=True))


def digest(answers: list[ChunkAnswer]) -> str:
    parts = [msgspec.msgpack.encode((answer.experience, answer.state)) for answer in answers]
    return hashlib.blake2b(b"".join(parts)).hexdigest()


def undisturbed_chunks() -> dict[tuple[int, int], str]:
    weights = quadruped_weights()
    found = {}
    for shard in range(3):
        state: dict[str, Array] = {}
        for iteration in range(2):
            answer = chunk(quadruped(), weights, shard, iteration, state)
            found[shard, iteration], state = digest([answer]), answer.state
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[int, int], str]:
    return undisturbed_chunks()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_chunk_does_not_depend_on_the_chunks_before_it(seed: int, undisturbed: dict[tuple[int, int], str]) -> None:
    random = np.random.default_rng(seed)
    weights, workers = quadruped_weights(), [quadruped(), quadruped()]
    states: dict[int, dict[str, Array]] = {0: {}, 1: {}, 2: {}}
    done = {0: 0, 1: 0, 2: 0}
    while unfinished := [shard for shard in done if done[shard] < 2]:
        shard = int(random.choice(unfinished))
        answer = chunk(workers[random.integers(2)], weights, shard, done[shard], states[shard])
        assert digest([answer]) == undisturbed[shard, done[shard]]
        if random.random() < 0.7:  # else the answer was lost
            states[shard], done[shard] = answer.state, done[shard] + 1


def test_shards_have_the_same_bits_together() -> None:
    """Episodes fall and start again, with contacts, randomisation, noise and pushes; so do matrices of other sizes."""
    width = 3 * (quadruped_weights()["policy.layers.0.weight"].shape[1] // 3)
    sizes, random = [width, 48, 24, 12], np.random.default_rng(5)
    weights = quadruped_weights()
    for at, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        matrix = random.standard_normal((outputs, inputs)).astype(np.float32)
        weights |= {f"policy.layers.{at}.weight": matrix, f"policy.layers.{at}.bias": matrix[:, 0]}
    setup = SimulationSetup(
        robot=RobotConfig(task="quadruped", history=3, randomise=RandomiseConfig(**RANDOMISED)).model_dump(mode="json"),
        obs_groups=dict(Quadruped.obs_groups),
        activation="elu",
        worlds=16,
    )
    alone, together = build(setup), build(setup, 3)
    requests = [
        ChunkRequest(key=ChunkKey(seed=1, purpose="train", shard=each, iteration=0), steps=20) for each in (4, 0, 2)
    ]
    for iteration in range(2):
        expected = [alone.run(weights, request) for request in requests]
        found = together.run_together(weights, requests)
        assert [digest([each]) for each in found] == [digest([each]) for each in expected]
        requests = [
            msgspec.structs.replace(
                request, state=answer.state, key=msgspec.structs.replace(request.key, iteration=iteration + 1)
            )
            for request, answer in zip(requests, found, strict=True)
        ]
    assert all("episode/fell" in answer.experience for answer in found)


def test_a_chunk_has_the_same_bits_in_another_process(undisturbed: dict[tuple[int, int], str]) -> None:
    program = (
        "import sys; from tests.unit.robots import test_simulation as t; "
        "print(sorted(t.undisturbed_chunks().items()), 'torch' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert finished.stdout.strip() == f"{sorted(undisturbed.items())} False"


def test_the_state_of_a_shard_is_small() -> None:
    key = ChunkKey(seed=0, purpose="train", shard=0, iteration=0)
    answer = simulate(Quadruped(), worlds=64).run(
        linear_weights(np.zeros((12, 45)), np.zeros(12)), ChunkRequest(key=key, steps=1)
    )
    assert sum(len(array.data) for array in answer.state.values()) < 60_000


def test_first_episodes_of_training_have_different_lengths() -> None:
    key = ChunkKey(seed=0, purpose="train", shard=0, iteration=0)
    request = ChunkRequest(key=key, steps=60, deterministic=True)
    experience = unpack(simulate(Slider(), worlds=64).run(linear_weights([0, 0], 1), request).experience)
    first = experience["episode/number"] == 0
    lengths = experience["episode/length"][first]
    assert len(set(lengths.tolist())) > 10
    assert not (experience["episode/length"][~first] - 30).any()
    # A first episode ends at step 30, too: its figure is the mean of 31 - length, ..., 30.
    np.testing.assert_allclose(experience["episode/figure/steps"][first], (61 - lengths) / 2)


def test_exploration_has_the_density_of_its_logprobs() -> None:
    experience = played(simulate(Slider()), linear_weights([0, 0], 0.5, std=0.2), 3, deterministic=False)
    actions, means = experience["actions"][..., 0], experience["means"][..., 0]
    expected = -0.5 * ((actions - means) / 0.2) ** 2 - np.log(0.2) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(experience["logprobs"][..., 0], expected, atol=1e-5)
    np.testing.assert_allclose(experience["stds"], [0.2])
