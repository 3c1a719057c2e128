"""A shard of worlds: `Simulation.run` computes one chunk, a pure function of weights, state and key.

State of a shard, by name (N worlds, A actions, D observations of a group):

    physics, sensors      float64 [N, ...], of the engine          memory/NAME    float64 [N, ...], of the task
    actions, previous     float64 [N, A]                           queue          float64 [N, Q, A], newest last
    steps, episode        int64 [N]: control steps, and the number of the current episode
    parameters            float64 [N, 5], of `engine.PARAMETERS`   history/GROUP  float32 [N, H, D], newest last
    totals                float64 [N, terms + figures + 1]         held           int64 [N]: steps in a row of success

Experience of T steps, by name:

    obs/GROUP             float32 [N, T + 1, H * D], the last one of the state after the chunk
    actions, means        float32 [N, T, A]; stds float32 [A]      logprobs       float32 [N, T, policies]
    rewards               float32 [N, T]                           terminated, truncated   bool [N, T]
    final_at              int64 [K, 2]: world and step of truncated episodes, whose last observations are final/GROUP
    invalid               int64 []: worlds that were reset because their physics was not finite
    episode/NAME          [E] of the episodes that ended: world, number, length, return, success, fell, term/TERM,
                          figure/NAME, parameter/NAME
    poses                 float32 [N, T, nq], if they were asked for
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.config.robot import RandomiseConfig
from tidemill.core.chunks import ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.robots.engine import PARAMETERS, Engine
from tidemill.robots.policy_arrays import Singles, Weights, mean_action, pack, unpack
from tidemill.robots.task import EpisodeRandom, Floats, Integers, Task, Worlds

State = dict[str, npt.NDArray[Any]]
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LARGEST_SPEED = 1e3  # of a joint, rad/s or m/s; more is diverged physics
NO_RANDOMISATION = RandomiseConfig()
NOMINAL: Floats = np.array([1.0, 1.0, 1.0, 1.0, 0.0])  # values of `PARAMETERS`


def random_of(*key: object) -> np.random.Generator:
    """Random numbers that are a function of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


class Simulation:
    """The worlds of one shard.

    Args:
        worlds: N, always the same.
        history: H, observations that policies read.
        activation: of the policies' hidden layers.
        obs_groups: the groups that each policy and the critic read; default: those of the task.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        *,
        worlds: int,
        randomise: RandomiseConfig = NO_RANDOMISATION,
        history: int = 1,
        activation: str = "elu",
        obs_groups: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.task, self.engine, self.worlds = task, engine, worlds
        self.randomise, self.history, self.activation = randomise, history, activation
        self.obs_groups = dict(obs_groups or task.obs_groups)
        self.policies = task.named_policies()
        self._columns = {  # of each policy's actions among those of the task
            name: np.array([task.joints.index(joint) for joint in joints]) for name, joints in self.policies.items()
        }
        self.substeps = round(task.control_s / engine.model.opt.timestep)
        self._actuators = np.array([actuator_of(engine.model, joint) for joint in task.joints])
        self._limit = task.steps_per_episode()
        self._longest_delay = max(randomise.delay_s[1], 0.0)
        read = {group for name in self.policies for group in self.obs_groups[name]}
        self._noisy = read  # groups that only the critic reads are exact
        self.read_groups = tuple(dict.fromkeys(group for groups in self.obs_groups.values() for group in groups))

    def run(self, weights: Weights, request: ChunkRequest, *, version: int = 0) -> ChunkAnswer:
        """Compute a chunk.

        Args:
            weights: of all actors.
            version: of the weights, for the answer.
        """
        started_s = time.process_time()
        key = request.key
        state = unpack(request.state) if request.state else self._start(key)
        self.engine.set_parameters(np.arange(self.worlds), self._factors(state["parameters"]))
        experience = self._steps(weights, state, request)
        return ChunkAnswer(
            key=key,
            version=version,
            experience=pack(experience),
            state=pack(state),
            cpu_s=time.process_time() - started_s,
        )

    def layout(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Terms and widths of every group of observations, in order."""
        state = self._start(ChunkKey(seed=0, purpose="layout", shard=0, iteration=0))
        observed = self.task.observe(self.view(state))
        return {
            group: tuple((name, values.shape[1]) for name, values in terms.items()) for group, terms in observed.items()
        }

    # The state.

    def _start(self, key: ChunkKey) -> State:
        n, actions = self.worlds, len(self.task.joints)
        nominal = np.tile(NOMINAL, (n, 1))
        self.engine.set_parameters(np.arange(n), self._factors(nominal))
        physics = self.engine.start(n)
        depth = 2 + math.ceil(self._longest_delay / self.task.control_s)
        state: State = {
            "physics": physics,
            "sensors": self.engine.sensors(physics),
            "actions": np.zeros((n, actions)),
            "previous": np.zeros((n, actions)),
            "queue": np.zeros((n, depth, actions)),
            "steps": np.zeros(n, dtype=np.int64),
            "episode": np.zeros(n, dtype=np.int64),
            "held": np.zeros(n, dtype=np.int64),
            "parameters": nominal,
        }
        self._restart(state, np.arange(n), key)
        if key.purpose == "train":  # otherwise all worlds would reach the time limit together
            state["steps"] = random_of(key.seed, key.purpose, key.shard, "first steps").integers(0, self._limit, n)
        state["totals"] = np.zeros((n, len(self._names(state)) + 1))
        random = random_of(key.seed, key.purpose, key.shard, "first observation")
        for group, values in self._observe(state, random).items():
            state[f"history/{group}"] = np.repeat(values[:, None], self.history, axis=1)
        return state

    def _restart(self, state: State, rows: Integers, key: ChunkKey) -> None:
        """Start the next episode of some worlds."""
        generators = [random_of(key.seed, key.purpose, key.shard, row, state["episode"][row]) for row in rows]
        ranges = [getattr(self.randomise, name) for name in PARAMETERS]
        low, high = np.array(ranges).T
        state["parameters"][rows] = EpisodeRandom(generators).uniform(low, high, len(PARAMETERS))
        factors = self._factors(state["parameters"][rows])
        self.engine.set_parameters(rows, factors)
        state["physics"][rows] = self.engine.start(len(rows))
        worlds = self.view(state)
        self.task.start(worlds, rows, EpisodeRandom(generators))
        for name, values in worlds.memory.items():
            state[f"memory/{name}"] = values
        state["sensors"][rows] = self.engine.sensors(state["physics"])[rows]
        for name in ("actions", "previous", "queue", "steps", "held"):
            state[name][rows] = 0

    def _factors(self, parameters: Floats) -> dict[str, Floats]:
        return {name: parameters[:, at] for at, name in enumerate(PARAMETERS)}

    def view(self, state: State) -> Worlds:
        """The state as a task sees it."""
        model, physics = self.engine.model, state["physics"]
        return Worlds(
            model=model,
            qpos=physics[:, 1 : 1 + model.nq],
            qvel=physics[:, 1 + model.nq : 1 + model.nq + model.nv],
            sensors=state["sensors"],
            actions=state["actions"],
            previous_actions=state["previous"],
            steps=state["steps"],
            memory={name.removeprefix("memory/"): each for name, each in state.items() if name.startswith("memory/")},
        )

    def _names(self, state: State) -> list[str]:
        worlds = self.view(state)
        terms = [f"term/{name}" for name in self.task.rewards(worlds)]
        return [*terms, *(f"figure/{name}" for name in self.task.figures(worlds))]

    # Steps.

    def _observe(self, state: State, random: np.random.Generator) -> dict[str, Singles]:
        """[N, D] by group, with noise where a policy reads it."""
        observed, scale = {}, self.randomise.observation_noise
        for group, terms in self.task.observe(self.view(state)).items():
            values = dict[str, Floats](terms)
            if scale and group in self._noisy:
                for name, spread in self.task.noise.items():
                    if name in values:
                        noise = random.standard_normal(values[name].shape)
                        values[name] = values[name] + scale * spread * noise
            observed[group] = np.concatenate(list(values.values()), axis=1).astype(np.float32)
        return observed

    def _inputs(self, state: State, name: str) -> Singles:
        """What a policy or the critic reads, [N, sum of H * D]."""
        parts = [state[f"history/{group}"].reshape(self.worlds, -1) for group in self.obs_groups[name]]
        return np.concatenate(parts, axis=1)

    def _steps(self, weights: Weights, state: State, request: ChunkRequest) -> State:
        key, steps = request.key, request.steps
        random = random_of(key.seed, key.purpose, key.shard, "chunk", key.iteration)
        columns: dict[str, list[Any]] = {name: [] for name in ("actions", "means", "logprobs", "rewards")}
        columns |= {name: [] for name in ("terminated", "truncated", *(f"obs/{group}" for group in self.read_groups))}
        finals: dict[str, list[Any]] = {name: [] for name in ("final_at", *(f"final/{g}" for g in self.read_groups))}
        ended: list[dict[str, npt.NDArray[Any]]] = []
        poses, invalid = [], 0
        stds = np.concatenate([np.exp(weights[f"{name}.log_std"]) for name in self.policies]).astype(np.float32)
        for at in range(steps):
            for group in self.read_groups:
                columns[f"obs/{group}"].append(state[f"history/{group}"].reshape(self.worlds, -1).copy())
            means = {
                name: mean_action(weights, name, self._inputs(state, name), self.activation) for name in self.policies
            }
            actions = np.zeros((self.worlds, len(self.task.joints)), dtype=np.float32)
            logprobs = []
            for name, mean in means.items():
                log_std = np.asarray(weights[f"{name}.log_std"], dtype=np.float32)
                noise = random.standard_normal(mean.shape).astype(np.float32)
                action = mean if request.deterministic else mean + np.exp(log_std) * noise
                actions[:, self._columns[name]] = action
                scaled = (action - mean) / np.exp(log_std)
                logprobs.append((-0.5 * scaled**2 - log_std - np.float32(LOG_SQRT_2PI)).sum(1))
            columns["actions"].append(actions)
            columns["means"].append(np.concatenate(list(means.values()), axis=1))
            columns["logprobs"].append(np.stack(logprobs, axis=1))
            bad = self._advance(state, actions.astype(np.float64), random)
            invalid += int(bad.sum())
            worlds = self.view(state)
            terms = self.task.rewards(worlds)
            rewards = np.where(bad, 0.0, self.task.control_s * np.sum(list(terms.values()), axis=0))
            terminated = bad | self.task.terminated(worlds)
            truncated = ~terminated & (state["steps"] >= self._limit)
            state["held"] = np.where(self.task.succeeding(worlds) & ~bad, state["held"] + 1, 0)
            rates = [np.where(bad, 0.0, self.task.control_s * each) for each in terms.values()]
            figures = [np.where(bad, 0.0, each) for each in self.task.figures(worlds).values()]
            state["totals"] += np.stack([*rates, *figures, rewards], axis=1)
            columns["rewards"].append(rewards.astype(np.float32))
            columns["terminated"].append(terminated)
            columns["truncated"].append(truncated)
            if request.record:
                poses.append(worlds.qpos.astype(np.float32))
            self._remember(state, self._observe(state, random))
            if (rows := np.flatnonzero(truncated)).size:
                finals["final_at"].append(np.stack([rows, np.full_like(rows, at)], axis=1))
                for group in self.read_groups:
                    finals[f"final/{group}"].append(state[f"history/{group}"].reshape(self.worlds, -1)[rows])
            if (rows := np.flatnonzero(terminated | truncated)).size:
                ended.append(self._ended(state, rows, terminated))
                state["episode"][rows] += 1
                state["totals"][rows] = 0
                self._restart(state, rows, key)
                for group, values in self._observe(state, random).items():
                    state[f"history/{group}"][rows] = values[rows, None]
        for group in self.read_groups:
            columns[f"obs/{group}"].append(state[f"history/{group}"].reshape(self.worlds, -1).copy())
        experience: State = {name: np.stack(values, axis=1) for name, values in columns.items()}
        experience |= {"stds": stds, "invalid": np.array(invalid)}
        experience |= {name: np.concatenate(values) for name, values in finals.items() if values}
        for name in ended[0] if ended else ():
            experience[f"episode/{name}"] = np.concatenate([each[name] for each in ended])
        if poses:
            experience["poses"] = np.stack(poses, axis=1)
        return experience

    def _advance(self, state: State, actions: Floats, random: np.random.Generator) -> npt.NDArray[np.bool_]:
        """One control step of the physics; returns where it is not finite, [N]."""
        state["previous"], state["actions"] = state["actions"], actions
        state["queue"] = np.concatenate([state["queue"][:, 1:], actions[:, None]], axis=1)
        timestep = self.engine.model.opt.timestep
        delays = np.round(state["parameters"][:, PARAMETERS.index("delay_s")] / timestep).astype(np.int64)
        ages = -((np.arange(self.substeps) - delays[:, None]) // self.substeps)  # [N, substeps], in control steps
        newest = state["queue"].shape[1] - 1
        delayed = state["queue"][np.arange(self.worlds)[:, None], newest - np.maximum(ages, 0)]  # [N, substeps, A]
        controls = np.zeros((self.worlds, self.substeps, self.engine.model.nu))
        flat = delayed.reshape(-1, actions.shape[1])
        controls[:, :, self._actuators] = self.task.controls(flat).reshape(delayed.shape)
        self._push(state, random)
        physics = self.engine.step(state["physics"], controls)
        model = self.engine.model
        speeds = physics[:, 1 + model.nq : 1 + model.nq + model.nv]
        bad = ~np.isfinite(physics).all(axis=1) | (np.abs(speeds) > LARGEST_SPEED).any(axis=1)
        if bad.any():
            physics[bad] = self.engine.start(int(bad.sum()))
        state["physics"] = physics
        state["sensors"] = self.engine.sensors(physics)
        state["steps"] = state["steps"] + 1
        worlds = self.view(state)
        self.task.advance(worlds)
        for name, values in worlds.memory.items():
            state[f"memory/{name}"] = values
        return np.asarray(bad)

    def _push(self, state: State, random: np.random.Generator) -> None:
        """Change the velocity of some worlds: of the free body in the plane, else of the first joint."""
        if not self.randomise.push_interval_s:
            return
        pushed = random.random(self.worlds) < self.task.control_s / self.randomise.push_interval_s
        change = random.uniform(-1, 1, (self.worlds, 2)) * self.randomise.push_speed
        model = self.engine.model
        width = 2 if model.jnt_type[0] == 0 else 1
        first = 1 + model.nq
        state["physics"][:, first : first + width] += pushed[:, None] * change[:, :width]

    def _remember(self, state: State, observed: Mapping[str, Singles]) -> None:
        for group, values in observed.items():
            state[f"history/{group}"] = np.concatenate([state[f"history/{group}"][:, 1:], values[:, None]], axis=1)

    def _ended(self, state: State, rows: Integers, terminated: npt.NDArray[np.bool_]) -> dict[str, npt.NDArray[Any]]:
        """Figures of the episodes that end."""
        totals, lengths = state["totals"][rows], state["steps"][rows]
        second = round(1 / self.task.control_s)
        found: dict[str, npt.NDArray[Any]] = {
            "world": rows,
            "number": state["episode"][rows],
            "length": lengths,
            "return": totals[:, -1],
            "fell": terminated[rows],
            "success": ~terminated[rows] & (state["held"][rows] >= second),
        }
        for at, name in enumerate(self._names(state)):
            found[name] = totals[:, at] / (lengths if name.startswith("figure/") else 1)
        for at, name in enumerate(PARAMETERS):
            found[f"parameter/{name}"] = state["parameters"][rows, at]
        return found


def actuator_of(model: Any, joint: str) -> int:
    """The actuator that moves a joint; -1 without one."""
    joint_id = model.joint(joint).id
    found = [
        at for at in range(model.nu) if model.actuator_trntype[at] == 0 and model.actuator_trnid[at, 0] == joint_id
    ]
    return found[0] if found else -1
