"""Environments of other packages as simulations: the same chunks, with the same names, as those of a task.

Their state is what they return from `get_state` (a method of theirs), and then chunks are pure functions as everywhere.
Without it the worker holds the environment, and the state has its mark: a chunk that continues on another worker, or in
another environment, starts new episodes, which its experience counts as `restarted`.

    restarted  int64 []: worlds whose episodes started again because their state was lost
    ignored    bool [N, T], only if there are any: steps without effect, in which an environment reset itself
    log/NAME   float64 [steps], of rsl_rl's extras["log"]: the finite values of those steps that have one

`episode/success` is what the environment says in the last step of an episode, and only there if it says anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tidemill.config.robot import WORLDS_PER_SHARD, RobotConfig
from tidemill.core.chunks import HELD, ChunkAnswer, ChunkKey, ChunkRequest
from tidemill.core.errors import UserError, exception_text
from tidemill.extensions.loading import module_spec
from tidemill.robots.engine import known_name
from tidemill.robots.experience import Experience
from tidemill.robots.policy_arrays import Weights, mean_action, pack, unpack
from tidemill.robots.programs import serve_vecenv
from tidemill.robots.simulation import LOG_SQRT_2PI, State, random_of

POLICY = "policy"
HISTORY = "history/"  # prefix of arrays of a state: [N, H, D], newest last
CALL_S = 600.0
Layout: TypeAlias = dict[str, tuple[tuple[str, int], ...]]
WHERE = "robot.environment"


class EnvironmentProgram:
    """The methods of `serve_vecenv.EnvironmentAdapter`, in a process of another interpreter.

    Raises:
        UserError: the environment failed.
    """

    def __init__(self, python: str, path: str, num_envs: int, seed: int, arguments: Mapping[str, Any]) -> None:
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen([python, serve_vecenv.__file__], stdin=theirs.fileno())
        except OSError as error:
            raise UserError(f"{python}: {error.strerror}", where="robot.python", hint="name an interpreter") from error
        theirs.close()
        try:
            self._description: dict[str, Any] = self._call("open", path, num_envs, seed, dict(arguments))
        except UserError:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        return self._description

    def start(self, seed: int, spread: bool) -> State:
        return _arrays(self._call("start", seed, spread))

    def step(self, actions: Any) -> State:
        return _arrays(self._call("step", np.ascontiguousarray(actions, dtype=np.float32).tobytes()))

    def get_state(self) -> bytes:
        return bytes(self._call("get_state"))

    def set_state(self, state: bytes) -> None:
        self._call("set_state", state)

    def cpu_s(self) -> float:
        return float(self._call("cpu_s"))

    def close(self) -> None:
        with suppress(UserError):
            self._call("close")
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._connection.send((method, arguments))
            if not self._connection.poll(CALL_S):
                raise UserError(f"no answer to `{method}` within {CALL_S:g} s", where=WHERE)
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            hint = "its last lines above say why"
            raise UserError("the environment's process has ended", where=WHERE, hint=hint) from error
        if kind == "error":
            raise UserError(value, where=WHERE)
        return value


Adapter: TypeAlias = serve_vecenv.EnvironmentAdapter | EnvironmentProgram


def _arrays(value: Mapping[str, Any]) -> State:
    return {
        name: np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape) for name, (kind, shape, data) in value.items()
    }


def open_environment(config: RobotConfig, worlds: int, seed: int) -> Adapter:
    """Raises UserError: the environment cannot be made."""
    arguments = dict(config.environment_args)
    if config.python:
        return EnvironmentProgram(config.python, config.environment, worlds, seed, arguments)
    try:
        return serve_vecenv.open_adapter(config.environment, worlds, seed, arguments)
    except Exception as error:
        raise UserError(exception_text(error), where=WHERE, hint="name package.module:function") from error


class EnvironmentTask:
    """Stands for the task of `robots.task` where an environment is one: its actions are not named joints."""

    def __init__(self, config: RobotConfig) -> None:
        self._found, widths = described(config.model_dump_json())
        self.joints = tuple(f"action_{at}" for at in range(self._found["actions"]))
        self.control_s: float = self._found["control_s"]
        self.layout: Layout = {group: ((group, width),) for group, width in widths.items()}
        actor = (POLICY,) if POLICY in widths else tuple(widths)
        self.obs_groups = {POLICY: actor, "critic": ("critic",) if "critic" in widths else actor}

    @property
    def remarks(self) -> list[str]:
        """What a reader of the run's results must know of the environment."""
        texts = {
            "has_final": "it returns no last observations: at time limits, values of the observations before stand in",
            "has_state": "it has no get_state and set_state: episodes restart when their worker is lost",
        }
        return [f"the environment: {text}" for name, text in texts.items() if not self._found[name]]

    def named_policies(self) -> dict[str, tuple[str, ...]]:
        return {POLICY: self.joints}

    def steps_per_episode(self) -> int:
        return int(self._found["steps"])


@cache
def described(robot: str) -> tuple[dict[str, Any], dict[str, int]]:
    """What an environment says of itself, and the widths of its groups of observations.

    Args:
        robot: [robot] as JSON.

    Raises:
        UserError: it cannot be made.
    """
    environment = open_environment(RobotConfig.model_validate_json(robot), WORLDS_PER_SHARD, 0)
    try:
        observed = environment.start(0, False)
        widths = {name.removeprefix("obs/"): each.shape[1] for name, each in observed.items()}
        found = environment.describe()
    except UserError:
        raise
    except Exception as error:
        raise UserError(exception_text(error), where=WHERE, hint="its reset and observations are used first") from error
    environment.close()
    return found, widths


class EnvironmentSimulation:
    """Computes the chunks of an environment, as `simulation.Simulation` those of a task."""

    def __init__(
        self, config: RobotConfig, *, worlds: int, activation: str, obs_groups: Mapping[str, tuple[str, ...]]
    ) -> None:
        self._config, self.worlds, self._activation = config, worlds, activation
        self.obs_groups = dict(obs_groups)
        self._held: dict[tuple[str, int], tuple[bytes, Adapter]] = {}  # by purpose and shard, with its mark
        self._spare: Adapter | None = None  # one whose state can be set

    def run(self, weights: Weights, request: ChunkRequest, *, version: int = 0) -> ChunkAnswer:
        """Compute a chunk."""
        started_s = time.process_time()
        key = request.key
        state = unpack(request.state)
        environment, restarted = self._continue(key, state)
        elsewhere_s = environment.cpu_s()
        experience = self._steps(environment, weights, state, request)
        experience["restarted"] = np.array(restarted)
        elsewhere_s = environment.cpu_s() - elsewhere_s
        if environment.describe()["has_state"]:
            self._spare = environment
            state["environment"] = np.frombuffer(environment.get_state(), dtype=np.uint8)
        elif key.purpose == "train":
            mark = os.urandom(8)
            self._held[key.purpose, key.shard] = (mark, environment)
            state[HELD] = np.frombuffer(mark, dtype=np.uint8)
        else:
            environment.close()
        cpu_s = time.process_time() - started_s + elsewhere_s
        return ChunkAnswer(key=key, version=version, experience=pack(experience), state=pack(state), cpu_s=cpu_s)

    def close(self) -> None:
        """Close all environments."""
        for _, environment in self._held.values():
            environment.close()
        if self._spare is not None:
            self._spare.close()

    def _continue(self, key: ChunkKey, state: State) -> tuple[Adapter, int]:
        """The environment in this state, and how many of its worlds had to start again; writes to the state."""
        if "environment" in state:
            spare = self._spare or open_environment(self._config, self.worlds, 0)
            spare.set_state(state["environment"].tobytes())
            return spare, 0
        mark, environment = self._held.pop((key.purpose, key.shard), (b"", None))
        if environment is not None:
            if HELD in state and state[HELD].tobytes() == mark:
                return environment, 0
            environment.close()
        if self._spare is not None:
            self._spare.close()
        seed = int(random_of(key.seed, key.purpose, key.shard, key.iteration).integers(2**31))
        environment = open_environment(self._config, self.worlds, seed)
        restarted = self.worlds if state else 0
        state["episode"] = state["episode"] + 1 if state else np.zeros(self.worlds, dtype=np.int64)
        state["steps"] = np.zeros(self.worlds, dtype=np.int64)
        state["returns"] = np.zeros(self.worlds)
        for name, values in environment.start(seed, key.purpose == "train").items():
            state[name.replace("obs/", HISTORY)] = np.repeat(values[:, None], self._config.history, axis=1)
        return environment, restarted

    def _steps(self, environment: Adapter, weights: Weights, state: State, request: ChunkRequest) -> State:
        """The experience of a chunk; changes `state`."""
        key = request.key
        random = random_of(key.seed, key.purpose, key.shard, "chunk", key.iteration)
        log_std = np.asarray(weights[f"{POLICY}.log_std"], dtype=np.float32)
        experience, invalid = Experience(), np.zeros(self.worlds, dtype=bool)
        logged, has_success = defaultdict[str, list[Any]](list), False
        for at in range(request.steps):
            observed = self._observations(state)
            inputs = np.concatenate([observed[f"obs/{group}"] for group in self.obs_groups[POLICY]], axis=1)
            mean = mean_action(weights, POLICY, inputs, self._activation)
            noise = random.standard_normal(mean.shape).astype(np.float32)
            action = mean if request.deterministic else mean + np.exp(log_std) * noise
            scaled = (action - mean) / np.exp(log_std)
            logprobs = (-0.5 * scaled**2 - log_std - np.float32(LOG_SQRT_2PI)).sum(1, keepdims=True)
            step = environment.step(action)
            if key.purpose != "train" and at == request.steps - 1:  # an episode may have no time limit of its own
                step["truncated"] = ~step["terminated"]
            numbers = np.column_stack([step["rewards"], *(step[name] for name in observed)])
            bad = ~np.isfinite(numbers).all(axis=1)
            invalid |= bad
            rewards = np.where(bad, 0.0, step["rewards"])
            state["steps"] += ~step["ignored"]
            state["returns"] += rewards
            truncated = step["truncated"] | step["ignored"]  # nothing is learned from the steps after an ignored one
            for name in [name for name in step if name.startswith("log/")]:
                logged[name].append(step[name])
            figures = {"rewards": rewards.astype(np.float32), "terminated": step["terminated"], "truncated": truncated}
            figures |= {"actions": action, "means": mean, "logprobs": logprobs, "ignored": step["ignored"]}
            experience.add(observed | figures)
            final = self._remember(state, step)
            if (rows := step["final_rows"]).size:
                experience.add_rows(rows, final | {"final_at": np.stack([rows, np.full_like(rows, at)], axis=1)})
            if (rows := np.flatnonzero(step["terminated"] | step["truncated"])).size:
                has_success |= "success" in step
                experience.add_rows(rows, _ended_episodes(state, rows, step))
        experience.add(self._observations(state))
        found = experience.arrays()[0] | {"stds": np.exp(log_std), "invalid": invalid.sum()}
        if not found["ignored"].any():
            del found["ignored"]
        if not has_success:
            found.pop("episode/success", None)
        return found | {name: np.array(values) for name, values in logged.items()}

    def _observations(self, state: State) -> State:
        """[N, H * D] of every group."""
        groups = [name.removeprefix(HISTORY) for name in state if name.startswith(HISTORY)]
        return {f"obs/{group}": state[HISTORY + group].reshape(self.worlds, -1) for group in groups}

    def _remember(self, state: State, step: State) -> State:
        """Add a step's observations to the histories; returns the last ones of truncated episodes, [K, H * D]."""
        final, rows = dict[str, Any](), step["final_rows"]
        starts = step["terminated"] | step["truncated"] | step["ignored"]  # there is nothing before these observations
        for name in [name for name in state if name.startswith(HISTORY)]:
            group = name.removeprefix(HISTORY)
            seen = _finite(step[f"obs/{group}"])[:, None]
            earlier = state[name][:, 1:]
            if rows.size:
                last = np.concatenate([earlier[rows], _finite(step[f"final/{group}"])[:, None]], axis=1)
                final[f"final/{group}"] = last.reshape(len(rows), -1)
            state[name] = np.where(starts[:, None, None], seen, np.concatenate([earlier, seen], axis=1))
        return final


def _ended_episodes(state: State, rows: Any, step: State) -> State:
    """Figures of the episodes that have ended in these rows; starts the next ones. An environment may mention only
    successes: an episode without mention is none."""
    figures = {"world": rows, "number": state["episode"][rows], "length": state["steps"][rows]}
    figures |= {"return": state["returns"][rows], "fell": step["terminated"][rows]}
    figures["success"] = step.get("success", np.zeros_like(step["terminated"]))[rows]
    state["episode"][rows] += 1
    state["steps"][rows] = 0
    state["returns"][rows] = 0
    return {f"episode/{name}": values for name, values in figures.items()}


def _finite(values: Any) -> Any:
    return np.nan_to_num(values, posinf=0.0, neginf=0.0)


def check_environment(config: RobotConfig) -> None:
    """Raises UserError: its function or interpreter is missing, as far as that is known without running anything."""
    source, colon, name = config.environment.rpartition(":")
    if not colon or (source.endswith(".py") and not Path(source).is_file()):
        what = f"no file {source}" if colon else f"{config.environment} names no function"
        raise UserError(what, where=WHERE, hint="write package.module:function or path/file.py:function")
    if source.endswith(".py"):
        text = Path(source).read_text(encoding="utf-8", errors="replace")
        if not re.search(rf"\b{re.escape(name)}\b", text) and "import *" not in text:
            known_name(name, re.findall(r"^def (\w+)", text, re.MULTILINE), "function", where=WHERE)
    elif not config.python and module_spec(package := source.partition(".")[0]) is None:
        hint = "install it, or name the interpreter of its installation as robot.python"
        raise UserError(f"there is no package {package} in this Python", where=WHERE, hint=hint)
    if config.python and shutil.which(config.python) is None:
        raise UserError(
            f"{config.python} does not exist",
            where="robot.python",
            hint="give the path of bin/python",
        )
