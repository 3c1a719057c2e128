"""Environments of OpenEnv, by their WebSocket. The server is started here, or runs elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
from typing import Any

from adapter_program import EnvironmentAdapter, serve
from openenv.core import GenericEnvClient

START_S = 120.0
MOST_SEED = 2**31


class OpenEnvAdapter(EnvironmentAdapter):
    def __init__(self, url: str = "", command: str = "", action: str = "message", observation: str = "") -> None:
        self._url, self._command = url, command
        self._action, self._observation = action, observation
        self._episodes: dict[int, GenericEnvClient] = {}

    async def start(self) -> None:
        if not self._command:
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [each.replace("{port}", str(port)) for each in shlex.split(self._command)]
        server = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, env=dict(os.environ))
        self._url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(START_S):
            while True:
                if server.returncode is not None:
                    raise RuntimeError(f"the server ended with exit code {server.returncode}: {self._command}")
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.1)
                    continue
                writer.close()
                return

    async def reset(self, episode: int, task: dict[str, Any], seed: int) -> str:
        client = self._episodes[episode] = GenericEnvClient(base_url=self._url)
        await client.connect()
        return self._shown((await client.reset(seed=seed % MOST_SEED)).observation)

    async def step(self, episode: int, action: str) -> tuple[str, float, bool]:
        content = json.loads(action) if not self._action else {self._action: action}
        result = await self._episodes[episode].step(content)
        return self._shown(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self, episode: int) -> None:
        await self._episodes.pop(episode).disconnect()

    def _shown(self, observation: Any) -> str:
        if self._observation:
            return str(observation[self._observation])
        return json.dumps(observation, sort_keys=True, default=str)


if __name__ == "__main__":
    serve(OpenEnvAdapter)
