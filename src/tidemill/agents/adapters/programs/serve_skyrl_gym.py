"""Environments of skyrl-gym, with the rows of a task: `prompt` and `answer`, or `reward_spec`."""

from __future__ import annotations

import json
from typing import Any

import skyrl_gym
from adapter_program import EnvironmentAdapter, serve
from omegaconf import OmegaConf


class SkyRLGymAdapter(EnvironmentAdapter):
    def __init__(self, id: str, config: str = "{}", extras: str = "{}") -> None:  # noqa: A002 -- skyrl_gym's name
        self._id, self._config, self._extras = id, OmegaConf.create(json.loads(config)), json.loads(extras)
        self._episodes: dict[int, Any] = {}

    def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        extras = {"reward_spec": {"method": "rule", "ground_truth": task.get("answer")}, "extra_info": {}}
        given = {key: task[key] for key in ("reward_spec", "extra_info", "max_turns", "data") if key in task}
        made = skyrl_gym.make(self._id, env_config=self._config, extras={**extras, **given, **self._extras})
        self._episodes[episode] = made
        messages, _ = made.init([{"role": "user", "content": task["prompt"]}])
        return _joined(messages)

    def step(self, episode: int, action: str) -> tuple[str, float, bool]:
        made = self._episodes[episode].step(action)
        return _joined(made["observations"]), float(made["reward"]), bool(made["done"])

    def close(self, episode: int) -> None:
        self._episodes.pop(episode).close()


def _joined(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)


if __name__ == "__main__":
    serve(SkyRLGymAdapter)
