"""Games of TextArena for one player."""

from __future__ import annotations

import json
from typing import Any

import textarena
from adapter_program import EnvironmentAdapter, serve

MOST_SEED = 2**31


class TextArenaAdapter(EnvironmentAdapter):
    def __init__(self, id: str, arguments: str = "{}") -> None:  # noqa: A002 -- textarena's name
        self._id, self._arguments = id, json.loads(arguments)
        self._episodes: dict[int, Any] = {}
        self._seen: dict[int, str] = {}

    def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        game = self._episodes[episode] = textarena.make(env_id=self._id, **self._arguments)
        game.reset(num_players=1, seed=seed % MOST_SEED)
        self._seen[episode] = str(game.get_observation()[1])
        return self._seen[episode]

    def step(self, episode: int, action: str) -> tuple[str, float, bool]:
        game = self._episodes[episode]
        done, _ = game.step(action)
        if done:
            rewards, info = game.close()
            return str(info[0].get("reason", "")), float((rewards or {}).get(0, 0.0)), True
        before, shown = self._seen[episode], str(game.get_observation()[1])
        self._seen[episode] = shown
        new = shown.removeprefix(before)  # a game shows its whole history again
        return (new.partition(action)[2] if action in new else new).strip("\n") + "\n", 0.0, False

    def close(self, episode: int) -> None:
        del self._episodes[episode], self._seen[episode]


if __name__ == "__main__":
    serve(TextArenaAdapter)
