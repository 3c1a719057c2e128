"""Text environments of gymnasium: observations that are text, or that it renders as text."""

from __future__ import annotations

import json
import re
from typing import Any

import gymnasium
import numpy as np
from adapter_program import AgentMistakeError, EnvironmentAdapter, serve

COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m")
MOST_SEED = 2**31


class GymnasiumAdapter(EnvironmentAdapter):
    def __init__(self, id: str, arguments: str = "{}", actions: str = "") -> None:  # noqa: A002 -- gymnasium's name
        self._id, self._arguments = id, json.loads(arguments)
        self._names = [each.strip().lower() for each in actions.split(",") if each.strip()]
        with gymnasium.make(id, **self._arguments) as first:
            if "ansi" in first.metadata.get("render_modes", ()):
                self._arguments.setdefault("render_mode", "ansi")
            if self._names and len(self._names) != getattr(first.action_space, "n", 0):
                raise ValueError(f"actions has {len(self._names)} names; {id} has {first.action_space}")
        self._episodes: dict[int, gymnasium.Env[Any, Any]] = {}

    def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        made = self._episodes[episode] = gymnasium.make(self._id, **self._arguments)
        observation, _ = made.reset(seed=seed % MOST_SEED)
        made.action_space.seed(seed % MOST_SEED)
        actions = f"Actions: {', '.join(self._names)}\n" if self._names else ""
        return self._shown(made, observation) + actions

    def step(self, episode: int, action: str) -> tuple[str, float, bool]:
        made = self._episodes[episode]
        observation, reward, terminated, truncated, _ = made.step(self._action(made.action_space, action))
        return self._shown(made, observation), float(reward), bool(terminated or truncated)

    def close(self, episode: int) -> None:
        self._episodes.pop(episode).close()

    def _action(self, space: gymnasium.Space[Any], text: str) -> Any:
        """Raises AgentMistakeError: the text is no action."""
        if isinstance(space, gymnasium.spaces.Text):
            action: Any = text
        elif isinstance(space, gymnasium.spaces.Discrete):
            named = [name for name in self._names if re.search(rf"\b{re.escape(name)}\b", text.lower())]
            numbers = re.findall(r"-?\d+", text)
            if len(named) == 1:
                action = int(space.start) + self._names.index(named[0])
            elif numbers and not self._names:
                action = int(numbers[0])
            else:
                raise AgentMistakeError(
                    f"write one of: {', '.join(self._names)}" if self._names else f"write one of {space}"
                )
        else:
            action = np.asarray(json.loads(text), dtype=space.dtype)
        if not space.contains(action):
            raise AgentMistakeError(f"{text.strip()[:80]!r} is not in {space}")
        return action

    @staticmethod
    def _shown(made: gymnasium.Env[Any, Any], observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if made.render_mode == "ansi":
            return COLOURED.sub(r"[\1]", str(made.render())).strip("\n") + "\n"
        return json.dumps(observation, default=lambda value: np.asarray(value).tolist()) + "\n"


if __name__ == "__main__":
    serve(GymnasiumAdapter)
