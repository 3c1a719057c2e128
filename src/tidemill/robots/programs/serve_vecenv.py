"""Serves an environment of another package, rsl_rl's VecEnv or gymnasium's VectorEnv, as arrays by name.

As a program it runs in the Python environment of that package, and imports nothing of Tidemill. Messages of
`multiprocessing.connection` have plain values: a method's name and arguments, answered by "value" or "error". A result
of several arrays is a map of names to (dtype, shape, bytes).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

PR_SET_PDEATHSIG = 1
STEP_S = 0.02  # control step of an environment that does not name its own
EPISODE_STEPS = 1000  # the same of its time limit


class EnvironmentAdapter:
    """N environments that reset themselves, in the step in which an episode ends.

    `step` returns obs/GROUP [N, D], rewards [N], terminated, truncated, ignored [N] (in this step the environment reset
    itself instead of acting), final_rows [K], and final/GROUP [K, D], the last observations of these rows. If the
    environment says so, it also returns success [N] and log/NAME [].
    """

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        inner = getattr(environment, "unwrapped", environment)
        self._holder = environment if hasattr(environment, "get_state") else inner
        self._ended = np.zeros(environment.num_envs, dtype=bool)  # resets itself in the next step

    def describe(self) -> dict[str, Any]:
        """Actions, steps of an episode, seconds of a step; whether states can be moved and last observations known."""
        inner = getattr(self.environment, "unwrapped", self.environment)
        spec = getattr(self.environment, "spec", None)
        limit = getattr(self.environment, "max_episode_length", getattr(spec, "max_episode_steps", None))
        return {
            "actions": self.actions,
            "steps": int(np.max(_array(limit))) if limit is not None else EPISODE_STEPS,
            "control_s": float(getattr(inner, "step_dt", STEP_S)),
            "has_state": hasattr(self._holder, "get_state") and hasattr(self._holder, "set_state"),
            "has_final": self.has_final,
        }

    def get_state(self) -> bytes:
        return pickle.dumps((self._holder.get_state(), self._ended))

    def set_state(self, state: bytes) -> None:
        found, self._ended = pickle.loads(state)
        self._holder.set_state(found)

    def cpu_s(self) -> float:
        """CPU time of another process than the caller's, in seconds."""
        return 0.0

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()

    actions: int
    has_final: bool

    def start(self, seed: int, spread: bool) -> dict[str, Any]:
        """The first observations.

        Args:
            spread: start at different times of the episodes, so that they do not all end together.
        """
        raise NotImplementedError

    def step(self, actions: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _observed(self, observations: Any, prefix: str = "obs", rows: Any = slice(None)) -> dict[str, Any]:
        named = observations.items() if hasattr(observations, "items") else [("policy", observations)]
        return {f"{prefix}/{name}": _flat(_array(each)[rows]) for name, each in named}


class RslRlAdapter(EnvironmentAdapter):
    """Its last observations are unknown, as in rsl_rl's own runner."""

    has_final = False

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._torch: Any = importlib.import_module("torch")  # by name: robots never load it themselves
        self.actions = int(environment.num_actions)

    def start(self, seed: int, spread: bool) -> dict[str, Any]:
        made = self.environment
        if spread and hasattr(made, "episode_length_buf") and hasattr(made, "max_episode_length"):
            steps = np.random.default_rng(seed).integers(0, self.describe()["steps"], made.num_envs)
            made.episode_length_buf = self._torch.from_numpy(steps).to(made.episode_length_buf)
        return self._groups(made.get_observations(), {})

    def step(self, actions: Any) -> dict[str, Any]:
        with self._torch.no_grad():
            given = self._torch.tensor(actions, device=self.environment.device)
            observations, rewards, dones, extras = self.environment.step(given)
        done = _array(dones).astype(bool).reshape(-1)
        over = _array(extras["time_outs"]).astype(bool).reshape(-1) if "time_outs" in extras else np.zeros_like(done)
        return self._groups(observations, extras) | {
            "rewards": _array(rewards).reshape(-1),
            "terminated": done & ~over,
            "truncated": done & over,
            "ignored": np.zeros_like(done),
            "final_rows": np.zeros(0, dtype=np.int64),
            **_success(extras, done),
            **_scalars(extras.get("log") or {}),
        }

    def _groups(self, observations: Any, extras: Any) -> dict[str, Any]:
        """Before rsl_rl 3 observations are a tensor, or a pair of it and of extras, which have further groups."""
        if isinstance(observations, tuple):
            observations, extras = observations
        if not hasattr(observations, "items"):
            observations = {**extras.get("observations", {}), "policy": observations}
        return self._observed(observations)


class GymnasiumAdapter(EnvironmentAdapter):
    """Resets environments at once where gymnasium lets it; else, with next-step autoreset, a step is ignored."""

    has_final = True

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._space = environment.single_action_space
        if not hasattr(self._space, "low"):
            raise TypeError(f"its actions are {self._space}; control needs a Box")
        self.actions = int(np.prod(self._space.shape))
        # Before 1.1 gymnasium names no mode and always resets all environments; before 1.0 it resets in the same step.
        mode = (getattr(environment, "metadata", None) or {}).get("autoreset_mode")
        is_old = getattr(sys.modules.get("gymnasium"), "__version__", "").startswith("0.")
        self._mode = getattr(mode, "value", mode) or ("SameStep" if is_old else "NextStep")
        kinds = {each.__name__ for each in type(environment.unwrapped).__mro__}
        self._resets = self._mode == "Disabled" or (
            self._mode == "NextStep" and mode is not None and bool(kinds & {"SyncVectorEnv", "AsyncVectorEnv"})
        )

    def start(self, seed: int, spread: bool) -> dict[str, Any]:
        return self._observed(self.environment.reset(seed=seed)[0])

    def step(self, actions: Any) -> dict[str, Any]:
        space = self._space
        given = np.clip(actions.reshape(-1, *space.shape), space.low, space.high).astype(space.dtype)
        observations, rewards, terminated, truncated, infos = self.environment.step(given)
        ignored, ended = self._ended, np.asarray(terminated) | np.asarray(truncated)
        rows = np.flatnonzero(np.asarray(truncated) & ~np.asarray(terminated))
        final: dict[str, Any] = {}
        if rows.size and self._mode == "SameStep":
            final = self._last(infos.get("final_obs", infos.get("final_observation")), rows)
        elif rows.size:
            final = self._observed(observations, "final", rows)
        if self._resets and ended.any():
            observations = self.environment.reset(options={"reset_mask": ended})[0]
        self._ended = ended if self._mode == "NextStep" and not self._resets else np.zeros_like(ended)
        found = self._observed(observations) | final
        return found | {
            "rewards": np.where(ignored, 0.0, rewards),
            "terminated": np.asarray(terminated),
            "truncated": np.asarray(truncated) & ~np.asarray(terminated),
            "ignored": ignored,
            "final_rows": rows if final else np.zeros(0, dtype=np.int64),
            **_success(infos, ended),
        }

    def _last(self, observations: Any, rows: Any) -> dict[str, Any]:
        """Of the rows; gymnasium has them in an array of objects, others in one like the observations."""
        if observations is None or hasattr(observations, "items") or observations.dtype != object:
            return self._observed(observations, "final", rows) if observations is not None else {}
        first = [observations[row] for row in rows]
        if not hasattr(first[0], "items"):
            return {"final/policy": _flat(np.stack(first))}
        return {f"final/{name}": _flat(np.stack([each[name] for each in first])) for name in first[0]}


def open_adapter(path: str, num_envs: int, seed: int, arguments: dict[str, Any]) -> EnvironmentAdapter:
    """Call the function at `path/file.py:function` or `package.module:function`."""
    source, _, name = path.rpartition(":")
    if source.endswith(".py"):
        spec = importlib.util.spec_from_file_location("environment_of_user", source)
        if spec is None or spec.loader is None or not Path(source).is_file():
            raise FileNotFoundError(f"no file {source}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    environment = getattr(module, name)(num_envs=num_envs, seed=seed, **arguments)
    if getattr(environment, "num_envs", None) != num_envs:
        has = getattr(environment, "num_envs", "none")
        raise ValueError(f"{path} must return {num_envs} environments (num_envs); it has {has}")
    if hasattr(environment, "get_observations"):
        return RslRlAdapter(environment)
    if hasattr(environment, "single_action_space"):
        return GymnasiumAdapter(environment)
    kind = type(environment).__name__
    raise TypeError(f"{path} returned a {kind}, which is neither rsl_rl's VecEnv nor gymnasium's VectorEnv")


def _success(infos: Any, ended: Any) -> dict[str, Any]:
    """Where this step succeeded, if the environment says so; where an episode ended, `final_info` goes first."""
    found: dict[str, Any] = {}
    last = infos.get("final_info")
    if isinstance(last, np.ndarray):  # a map or None for each environment, before gymnasium 1.0
        names = {name for each in last if each for name in each}
        last = {name: np.array([bool(each) and each.get(name, False) for each in last], object) for name in names}
    for source in (infos, last):
        for name in ("is_success", "success"):
            if hasattr(source, "items") and name in source and np.size(values := _array(source[name])) == len(ended):
                values = values.reshape(-1).astype(bool)
                found["success"] = values if source is infos else np.where(ended, values, found.get("success", False))
    return found


def _scalars(named: Any) -> dict[str, Any]:
    """The finite scalars of rsl_rl's log."""
    values = {name.lstrip("/"): _array(value) for name, value in named.items()}
    return {
        f"log/{name}": value.reshape(()).astype(np.float64)
        for name, value in values.items()
        if value.size == 1 and value.dtype.kind in "biuf" and np.isfinite(value).all()
    }


def _array(value: Any) -> Any:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _flat(value: Any) -> Any:
    return value.reshape(len(value), -1).astype(np.float32)


def _plain(value: Any) -> Any:
    """A result that every version of numpy can read."""
    if not isinstance(value, dict):
        return value
    named = value.items()
    return {
        name: (each.dtype.str, each.shape, each.tobytes()) if isinstance(each, np.ndarray) else each
        for name, each in named
    }


def main() -> None:
    """Answer calls until standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    connection = Connection(os.dup(0))
    os.dup2(2, 1)  # standard output is that of the run
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[0] = str(Path.cwd())
    adapter: Any = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, arguments = connection.recv()
            try:
                if method == "open":
                    adapter = open_adapter(*arguments)
                    value = adapter.describe()
                elif method == "cpu_s":
                    value = time.process_time()
                elif method == "step":
                    value = adapter.step(np.frombuffer(arguments[0], dtype=np.float32).reshape(len(adapter._ended), -1))
                else:
                    value = getattr(adapter, method)(*arguments)
                connection.send(("value", _plain(value)))
            except BaseException as error:  # noqa: BLE001 -- of the package
                place = traceback.extract_tb(error.__traceback__)[-1]
                connection.send(("error", f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"))
    os._exit(0)  # not delayed by threads of the package


if __name__ == "__main__":
    main()
