"""Shards of worlds: `Simulation.run` computes chunks, each of them a pure function of weights, state and key.

State of a shard, by name (N worlds, A actions, D observations of a group):

    physics, sensors      float64 [N, ...], of the engine          memory/NAME    float64 [N, ...], of the task
    actions               float64 [N, Q, A], newest last           held           int64 [N]: steps in a row of success
    steps, episode, seeds int64 [N]: control steps, and the number and the seed of the current episode
    parameters            float64 [N, 5], of `engine.PARAMETERS`   history/GROUP  float32 [N, H, D], newest last
    totals                float64 [N, terms + figures + 2]: also steps, of which a first episode has fewer, and rewards

Experience of T steps, by name:

    obs/GROUP             float32 [N, T + 1, H * D], the last one of the state after the chunk
    actions, means        float32 [N, T, A]; stds float32 [A]      logprobs       float32 [N, T, policies]
                          (means and stds in the order of policies, actions in that of the task's joints)
    rewards               float32 [N, T]                           terminated, truncated   bool [N, T]
    final_at              int64 [K, 2]: world and step of truncated episodes, whose last observations are final/GROUP
    invalid               int64 []: worlds that were reset, once or more often, because their physics was not finite
    episode/NAME          [E] of the episodes that ended: world, number, seed, length, return, success, fell, term/TERM,
                          figure/NAME, parameter/NAME
    poses                 float32 [N, T, nq], if they were asked for
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tidemill.config.robot import RandomiseConfig
from tidemill.core.chunks import ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.core.errors import UserError, exception_text
from tidemill.robots.engine import PARAMETERS, Engine, actuator_of, known_name
from tidemill.robots.experience import Experience
from tidemill.robots.policy_arrays import Singles, Weights, mean_action, pack, unpack
from tidemill.robots.step_random import StepRandom
from tidemill.robots.task import Bools, EpisodeRandom, Floats, Integers, Task, Worlds

State = dict[str, npt.NDArray[Any]]
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
LARGEST_SPEED = 1e3  # of a joint, rad/s or m/s; more is diverged physics
NO_RANDOMISATION = RandomiseConfig()
NOMINAL: Floats = np.array([1.0, 1.0, 1.0, 1.0, 0.0])  # values of `PARAMETERS`
DELAY = PARAMETERS.index("delay_s")
ALL = slice(None)  # rows of all worlds
LAYOUT = ChunkKey(seed=0, purpose="layout", shard=0, iteration=0)


def seed_of(*key: object) -> int:
    """A number of 63 bits that is a function of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def random_of(*key: object) -> np.random.Generator:
    """Random numbers that are a function of the key."""
    return _generator(seed_of(*key))


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


class Simulation:
    """The worlds of some shards, which are computed together: that is faster, and changes no bit of an answer.

    Args:
        worlds: of all shards.
        shards: how many, always the same.
        history: H, observations that policies read.
        activation: of the policies' hidden layers.
        obs_groups: the groups that each policy and the critic read; default: those of the task.

    Raises:
        UserError: the task does not fit its model or the groups, or one of its methods fails.
    """

    def __init__(
        self,
        task: Task,
        engine: Engine,
        *,
        worlds: int,
        shards: int = 1,
        randomise: RandomiseConfig = NO_RANDOMISATION,
        history: int = 1,
        activation: str = "elu",
        obs_groups: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.task, self.engine, self.worlds, self.shards = task, engine, worlds, shards
        self._size = worlds // shards
        self.randomise, self.history, self.activation = randomise, history, activation
        self.obs_groups = dict(obs_groups or task.obs_groups)
        self.policies = task.named_policies()
        self.columns = {  # of each policy's actions among those of the task
            name: np.array([task.joints.index(joint) for joint in joints]) for name, joints in self.policies.items()
        }
        self.read_groups = tuple(dict.fromkeys(group for groups in self.obs_groups.values() for group in groups))
        self.substeps = round(task.control_s / engine.model.opt.timestep)
        self.limit = task.steps_per_episode()
        self._actuators = np.array([actuator_of(engine.model, joint) for joint in task.joints])
        # Groups that only the critic reads are exact.
        self._noisy = {group for name in self.policies for group in self.obs_groups[name]}
        try:
            self._layout, self._names = self._examine()
        except UserError:
            raise
        except Exception as error:
            what = f"{type(task).__name__} fails: {exception_text(error)}"
            raise UserError(what, where="robot.task", hint="correct the task") from error

    def _examine(self) -> tuple[dict[str, tuple[tuple[str, int], ...]], list[str]]:
        """Terms and widths of each group, and the names of the columns of `totals`."""
        state = self._blank()
        self._restart(state, np.arange(self.worlds), [LAYOUT] * self.shards)
        worlds = self.view(state)
        self.task.advance(worlds)
        observed = {group: dict(terms) for group, terms in self.task.observe(worlds).items()}
        for group in self.read_groups:
            known_name(group, observed, "group of observations")
        known = {name for terms in observed.values() for name in terms}
        for name in self.task.noise:
            known_name(name, known, "term of observations")
        if self.randomise.observation_noise and not self.task.noise:
            where, hint = "robot.randomise.observation_noise", "name standard deviations by term in the task's `noise`"
            raise UserError("the task names no noise of its observations", where=where, hint=hint)
        for group, terms in observed.items():
            _expect_shapes(terms, f"observe()[{group!r}]", self.worlds, axes=2)
        rewards, figures = self.task.rewards(worlds), self.task.figures(worlds)
        _expect_shapes(rewards, "rewards()", self.worlds)
        _expect_shapes(figures, "figures()", self.worlds)
        _expect_shapes({"": self.task.terminated(worlds)}, "terminated()", self.worlds)
        _expect_shapes({"": self.task.succeeding(worlds)}, "succeeding()", self.worlds)
        actions = np.zeros((self.worlds, len(self.task.joints)))
        controls = np.shape(self.task.controls(actions))
        if controls != actions.shape:
            what = f"controls() returns an array of the shape {list(controls)} for actions {list(actions.shape)}"
            raise UserError(what, where="robot.task", hint="return one target or force for each of the task's joints")
        layout = {
            group: tuple((name, values.shape[1]) for name, values in terms.items()) for group, terms in observed.items()
        }
        return layout, [*(f"term/{name}" for name in rewards), *(f"figure/{name}" for name in figures)]

    def layout(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Terms and widths of every group of observations, in order."""
        return self._layout

    def run(self, weights: Weights, request: ChunkRequest, *, version: int = 0) -> ChunkAnswer:
        """Compute a chunk; see `run_together`."""
        return self.run_together(weights, [request], version=version)[0]

    def run_together(
        self, weights: Weights, requests: Sequence[ChunkRequest], *, version: int = 0
    ) -> list[ChunkAnswer]:
        """Compute a chunk of every shard. Requests differ in keys and states only, and all or none have a state.

        Args:
            weights: of all actors.
            version: of the weights, for the answers.
        """
        started_s = time.process_time()
        keys = [request.key for request in requests]
        if requests[0].state:
            states = [unpack(request.state) for request in requests]
            state = {name: np.concatenate([each[name] for each in states]) for name in states[0]}
        else:
            state = self.start(*keys)
        self._set_parameters(state, np.arange(self.worlds))
        experience = self._steps(weights, state, keys, requests[0])
        parts = [slice(at * self._size, (at + 1) * self._size) for at in range(self.shards)]
        ends = [{name: each[part] for name, each in state.items()} for part in parts]
        packed = [(pack(seen), pack(end)) for seen, end in zip(experience, ends, strict=True)]
        cpu_s = (time.process_time() - started_s) / self.shards
        return [
            ChunkAnswer(key=key, version=version, experience=seen, state=end, cpu_s=cpu_s)
            for key, (seen, end) in zip(keys, packed, strict=True)
        ]

    # The state.

    def start(self, *keys: ChunkKey) -> State:
        """The state of shards before their first chunks."""
        state, rows = self._blank(), np.arange(self.worlds)
        random = self._restart(state, rows, keys)
        if keys[0].purpose == "train":  # otherwise all worlds would reach the time limit together
            firsts = [random_of(key.seed, key.purpose, key.shard, "first steps") for key in keys]
            state["steps"] = np.concatenate([each.integers(0, self.limit, self._size) for each in firsts])
        for group, values in self._observe(self.view(state), random, rows).items():
            state[f"history/{group}"] = np.repeat(values[:, None], self.history, axis=1)
        state["totals"] = np.zeros((self.worlds, len(self._names) + 2))
        return state

    def _blank(self) -> State:
        n = self.worlds
        physics = self.engine.start(n)
        delayed = math.ceil(self.randomise.delay_s[1] / self.task.control_s)
        return {
            "physics": physics,
            "sensors": np.zeros((n, self.engine.model.nsensordata)),
            "actions": np.zeros((n, 2 + delayed, len(self.task.joints))),
            "steps": np.zeros(n, dtype=np.int64),
            "episode": np.zeros(n, dtype=np.int64),
            "seeds": np.zeros(n, dtype=np.int64),
            "held": np.zeros(n, dtype=np.int64),
            "parameters": np.tile(NOMINAL, (n, 1)),
        }

    def _restart(self, state: State, rows: Integers, keys: Sequence[ChunkKey]) -> EpisodeRandom:
        """Start the next episode of some worlds; returns their random numbers."""
        places = [divmod(row, self._size) for row in rows.tolist()]
        seeds = [
            seed_of(keys[at].seed, keys[at].purpose, keys[at].shard, row, episode)
            for (at, row), episode in zip(places, state["episode"][rows].tolist(), strict=True)
        ]
        state["seeds"][rows] = seeds
        random = EpisodeRandom(list(map(_generator, seeds)))
        low, high = np.array([getattr(self.randomise, name) for name in PARAMETERS]).T
        state["parameters"][rows] = random.uniform(low, high, len(PARAMETERS))
        self._set_parameters(state, rows)
        state["physics"][rows] = self.engine.start(len(rows))
        for name in ("actions", "steps", "held"):
            state[name][rows] = 0
        worlds = self.view(state)
        self.task.start(worlds, rows, random)
        _keep_memory(state, worlds)
        state["sensors"][rows] = self.engine.sensors(state["physics"], rows)
        return random

    def _set_parameters(self, state: State, rows: Integers) -> None:
        values = state["parameters"][rows]
        self.engine.set_parameters(rows, {name: values[:, at] for at, name in enumerate(PARAMETERS)})

    def view(self, state: State) -> Worlds:
        """The state as a task sees it."""
        model, physics = self.engine.model, state["physics"]
        prefix = "memory/"
        return Worlds(
            model=model,
            qpos=physics[:, 1 : 1 + model.nq],
            qvel=physics[:, 1 + model.nq : 1 + model.nq + model.nv],
            sensors=state["sensors"],
            actions=state["actions"][:, -1],
            previous_actions=state["actions"][:, -2],
            steps=state["steps"],
            memory={name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)},
        )

    # Steps.

    def _steps(
        self, weights: Weights, state: State, keys: Sequence[ChunkKey], request: ChunkRequest
    ) -> list[dict[str, npt.NDArray[Any]]]:
        """The experience of each shard; changes `state`."""
        generators = [random_of(key.seed, key.purpose, key.shard, "chunk", key.iteration) for key in keys]
        exploration = None if request.deterministic else EpisodeRandom(generators, self._size)
        stds = {name: np.exp(np.asarray(weights[f"{name}.log_std"], dtype=np.float32)) for name in self.policies}
        experience, invalid = Experience(self.shards), np.zeros(self.worlds, dtype=bool)
        for step in range(request.steps):
            experience.add(self._observations(state))
            actions = self._act(weights, stds, state, exploration, experience)
            random = StepRandom(state["seeds"], state["steps"])
            bad = self._advance(state, actions.astype(np.float64), random)
            invalid |= bad
            worlds = self.view(state)
            ended, terminated = self._judge(state, worlds, bad, experience)
            if request.record:
                experience.add({"poses": worlds.qpos.astype(np.float32)})
            self._remember(state, self._observe(worlds, random))
            if ended.any():
                self._end(state, np.flatnonzero(ended), terminated, step, experience)
                self._next_episodes(state, np.flatnonzero(ended), keys)
        experience.add(self._observations(state))
        same = {"stds": np.concatenate(list(stds.values()))}
        counts = invalid.reshape(self.shards, -1).sum(1)
        return [arrays | same | {"invalid": count} for arrays, count in zip(experience.arrays(), counts, strict=True)]

    def _observe(
        self, worlds: Worlds, random: EpisodeRandom | StepRandom, rows: Integers | slice = ALL
    ) -> dict[str, Singles]:
        """[rows, D] of the groups that are read, with noise where a policy reads them."""
        observed, scale = {}, self.randomise.observation_noise
        groups = self.task.observe(worlds)
        for group in self.read_groups:
            values = {name: each[rows] for name, each in groups[group].items()}
            if scale and group in self._noisy:
                for name, spread in self.task.noise.items():
                    if name in values:
                        noise = random.normal(values[name].shape[1])
                        values[name] = values[name] + scale * spread * noise
            observed[group] = np.concatenate(list(values.values()), axis=1).astype(np.float32)
        return observed

    def _observations(self, state: State) -> State:
        """[N, H * D] of the groups that are read."""
        return {f"obs/{group}": state[f"history/{group}"].reshape(self.worlds, -1) for group in self.read_groups}

    def _act(
        self,
        weights: Weights,
        stds: Mapping[str, Singles],
        state: State,
        random: EpisodeRandom | None,
        experience: Experience,
    ) -> Singles:
        """Actions [N, A]; the means without `random`."""
        actions = np.zeros((self.worlds, len(self.task.joints)), dtype=np.float32)
        means, logprobs = [], []
        observations = self._observations(state)
        for name, std in stds.items():
            inputs = np.concatenate([observations[f"obs/{group}"] for group in self.obs_groups[name]], axis=1)
            by_shard = inputs.reshape(self.shards, -1, inputs.shape[1])
            mean = mean_action(weights, name, by_shard, self.activation).reshape(self.worlds, -1)
            noise = np.zeros_like(mean) if random is None else random.normal(mean.shape[1]).astype(np.float32)
            action = mean + std * noise
            scaled = (action - mean) / std
            logprobs.append((-0.5 * scaled**2 - np.log(std) - np.float32(LOG_SQRT_2PI)).sum(1))
            means.append(mean)
            actions[:, self.columns[name]] = action
        experience.add(
            {"actions": actions, "means": np.concatenate(means, axis=1), "logprobs": np.stack(logprobs, axis=1)}
        )
        return actions

    def _advance(self, state: State, actions: Floats, random: StepRandom) -> Bools:
        """One control step of the physics; returns where it is not finite, [N]."""
        state["actions"] = np.concatenate([state["actions"][:, 1:], actions[:, None]], axis=1)
        controls = self._controls(state)
        self._push(state, random)
        physics = self.engine.step(state["physics"], controls)
        model = self.engine.model
        speeds = physics[:, 1 + model.nq : 1 + model.nq + model.nv]
        bad = ~np.isfinite(physics).all(axis=1) | (np.abs(speeds) > LARGEST_SPEED).any(axis=1)
        if bad.any():
            physics[bad] = self.engine.start(int(bad.sum()))
            state["actions"][bad] = 0
        state["physics"] = physics
        state["sensors"] = self.engine.sensors(physics, ALL)
        state["steps"] = state["steps"] + 1
        worlds = self.view(state)
        self.task.advance(worlds)
        _keep_memory(state, worlds)
        return np.asarray(bad)

    def _controls(self, state: State) -> Floats:
        """[N, substeps, nu]: each substep has the newest action that is at least as old as the delay of its world."""
        actions, model = state["actions"], self.engine.model
        delays = np.round(state["parameters"][:, DELAY] / model.opt.timestep).astype(np.int64)  # in substeps
        ages = -((np.arange(self.substeps) - delays[:, None]) // self.substeps)  # [N, substeps], in control steps
        delayed = actions[np.arange(self.worlds)[:, None], actions.shape[1] - 1 - ages]  # [N, substeps, A]
        controls = np.zeros((self.worlds, self.substeps, model.nu))
        flat = delayed.reshape(-1, actions.shape[2])
        controls[:, :, self._actuators] = self.task.controls(flat).reshape(delayed.shape)
        return controls

    def _push(self, state: State, random: StepRandom) -> None:
        """Change the velocity of some worlds: of the free body in the plane, else of the first joint."""
        if not self.randomise.push_interval_s:
            return
        pushed = random.uniform(0, 1, 1) < self.task.control_s / self.randomise.push_interval_s
        change = random.uniform(-1, 1, 2) * self.randomise.push_speed
        model = self.engine.model
        width = 2 if model.jnt_type[0] == 0 else 1
        first = 1 + model.nq
        state["physics"][:, first : first + width] += pushed * change[:, :width]

    def _judge(self, state: State, worlds: Worlds, bad: Bools, experience: Experience) -> tuple[Bools, Bools]:
        """Reward a step; returns the episodes that end, and those that terminated, [N]."""
        terms = [np.where(bad, 0.0, self.task.control_s * each) for each in self.task.rewards(worlds).values()]
        figures = [np.where(bad, 0.0, each) for each in self.task.figures(worlds).values()]
        rewards = np.sum(terms, axis=0)
        terminated = bad | self.task.terminated(worlds)
        truncated = ~terminated & (state["steps"] >= self.limit)
        state["held"] = np.where(self.task.succeeding(worlds) & ~bad, state["held"] + 1, 0)
        state["totals"] += np.stack([*terms, *figures, np.ones_like(rewards), rewards], axis=1)
        experience.add({"rewards": rewards.astype(np.float32), "terminated": terminated, "truncated": truncated})
        return terminated | truncated, terminated

    def _remember(self, state: State, observed: Mapping[str, Singles]) -> None:
        for group, values in observed.items():
            state[f"history/{group}"] = np.concatenate([state[f"history/{group}"][:, 1:], values[:, None]], axis=1)

    def _end(self, state: State, rows: Integers, terminated: Bools, step: int, experience: Experience) -> None:
        """Record the final observations of truncated episodes, and the figures of all that end."""
        cut = rows[~terminated[rows]]
        if cut.size:
            final = {f"final/{group}": self._observations(state)[f"obs/{group}"][cut] for group in self.read_groups}
            places = np.stack([cut % self._size, np.full_like(cut, step)], axis=1)
            experience.add_rows(cut, {"final_at": places} | final)
        totals = state["totals"][rows]
        lengths = totals[:, -2].astype(np.int64)
        second = min(round(1 / self.task.control_s), self.limit)
        figures: State = {
            "world": rows % self._size,
            "number": state["episode"][rows],
            "seed": state["seeds"][rows],
            "length": lengths,
            "return": totals[:, -1],
            "fell": terminated[rows],
            # In training, first episodes may have fewer steps than the last second.
            "success": ~terminated[rows] & (state["held"][rows] >= np.minimum(second, lengths)),
        }
        for at, name in enumerate(self._names):
            figures[name] = totals[:, at] / (lengths if name.startswith("figure/") else 1)
        for at, name in enumerate(PARAMETERS):
            figures[f"parameter/{name}"] = state["parameters"][rows, at]
        experience.add_rows(rows, {f"episode/{name}": values for name, values in figures.items()})

    def _next_episodes(self, state: State, rows: Integers, keys: Sequence[ChunkKey]) -> None:
        state["episode"][rows] += 1
        state["totals"][rows] = 0
        random = self._restart(state, rows, keys)
        for group, values in self._observe(self.view(state), random, rows).items():
            state[f"history/{group}"][rows] = values[:, None]


def _keep_memory(state: State, worlds: Worlds) -> None:
    """Store arrays that the task added or replaced."""
    for name, values in worlds.memory.items():
        state[f"memory/{name}"] = values


def _expect_shapes(terms: Mapping[str, Any], source: str, worlds: int, *, axes: int = 1) -> None:
    for name, values in terms.items():
        shape = np.shape(values)
        if len(shape) != axes or shape[0] != worlds:
            wanted = "[worlds, width]" if axes == 2 else "[worlds]"
            what = f"{source} returns {name or 'an array'} of the shape {list(shape)} for {worlds} worlds"
            raise UserError(what, where="robot.task", hint=f"return arrays {wanted}")
