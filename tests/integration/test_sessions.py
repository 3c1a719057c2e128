"""Training sessions over HTTP: agents that only know an address and a key train the run's model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.char_task import char_task
from tests.forked import Forked
from tidemill.telemetry.events import EVICTION, read_events

DEADLINE_S = 120.0
STEPS, PROMPTS, SIZE = 4, 3, 4
RECIPE = (
    char_task()
    + f"""\
[sampling]
max_new_tokens = 12
[scoring]
rewards = [{{ kind = "length", target_tokens = 3 }}]
[engine]
slots = 8
context_tokens = 100  # the shape of the products: equal with and without sessions
batch_invariant = true
tick_s = 0.02
[batch]
prompts = {PROMPTS}
group_size = {SIZE}
[optimizer]
learning_rate = 1e-2
[trainer]
steps = {STEPS}
threads = 1
[eval]
every_steps = 2
prompts = 4
[checkpoint]
every_steps = 1
"""
)
EVICTED = (
    *("--pool.kind", "synthetic", "--pool.workers", "2", "--pool.mean_time_to_eviction_s", "0.3"),
    *("--pool.mean_time_to_return_s", "0.1", "--fleet.seed_window_s", "0.05"),
)


def start(folder: Path, name: str, *more: str) -> Forked:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return Forked("train", f"@{recipe}", "--run.dir", str(folder / name), "--json", *more)


def finished(process: Forked) -> dict[str, Any]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary: dict[str, Any] = json.loads(out)
    return summary


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


class Client:
    """An agent that asks a few times, and ends its session. Calls are repeated until they are answered, as SDKs do."""

    def __init__(self, port: int, process: Callable[[], Forked], *, stream: bool = False, turns: int = 1) -> None:
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=20.0, trust_env=False)
        self.process, self.stream, self.turns = process, stream, turns
        self.seen: dict[str, list[int]] = {}  # token ids that were answered, by session
        self.captured: dict[str, list[int]] = {}  # those that the session has

    async def call(self, method: str, path: str, key: str = "", **body: Any) -> dict[str, Any] | None:
        """None: the run has ended, or the session."""
        until = time.monotonic() + DEADLINE_S
        headers = {"authorization": f"Bearer {key}"} if key else {"idempotency-key": uuid.uuid4().hex}
        while time.monotonic() < until:
            try:
                answer = await self.http.request(method, path, headers=headers, json=body or None)
                if answer.status_code < 400:
                    found: dict[str, Any] = answer.json()
                    return found
                assert answer.status_code in (400, 410, 429, 503), answer.text
                if answer.status_code in (400, 410):
                    assert answer.json()["error"]["code"] in (
                        "run_finished",
                        "session_ended",
                        "context_length_exceeded",
                    )
                    return None
            except httpx2.TransportError:
                if self.process().poll() is not None:
                    return None
            await asyncio.sleep(0.1)
        raise AssertionError(f"{path} was not answered")

    async def run(self) -> None:
        """Sessions one after the other, until the run has ended."""
        while (session := await self.call("POST", "tidemill/sessions")) is not None:
            key, path, prompt = session["key"], f"tidemill/sessions/{session['id']}", session["task"]["prompt"]
            ids = list[int]()
            for _ in range(self.turns):
                body = {"model": "agents", "prompt": prompt, "return_token_ids": True}
                answer = await self.call("POST", "completions", key, **body)
                if answer is None:
                    break
                ids += answer["choices"][0]["token_ids"]
                prompt += answer["choices"][0]["text"] + "1+1="
            self.seen[session["id"]] = ids
            about = await self.call("GET", path, key)
            if about is not None:
                self.captured[session["id"]] = about["token_ids"]
            await self.call("POST", f"{path}/end", key)


async def trained(
    folder: Path, name: str, *more: str, clients: int = 4, turns: int = 1, kill: int = 0
) -> tuple[dict[str, Any], list[Client]]:
    """A run whose samples are sessions of several clients.

    Args:
        kill: SIGKILLs of the run, each followed by the same command.
    """
    port = free_port()
    options = ("--gateway.sessions", "true", "--gateway.port", str(port), "--gateway.name", "agents", *more)
    processes = [start(folder, name, *options)]
    agents = [Client(port, lambda: processes[-1], turns=turns) for _ in range(clients)]
    tasks = [asyncio.create_task(agent.run()) for agent in agents]
    for _ in range(kill):
        goal = sum(len(agent.seen) for agent in agents) + PROMPTS * SIZE
        while sum(len(agent.seen) for agent in agents) < goal and processes[-1].poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        os.kill(processes[-1].pid, signal.SIGKILL)
        processes.append(start(folder, name, *options))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*tasks)
    for agent in agents:
        await agent.http.aclose()
    return finished(processes[-1]), agents


@pytest.mark.timeout(400)
async def test_agents_of_one_turn_train_as_the_run_itself_does(tmp_path: Path) -> None:
    native = finished(start(tmp_path, "native"))
    calm, agents = await trained(tmp_path, "calm")
    evicted, _ = await trained(tmp_path, "evicted", *EVICTED)

    assert calm["weights_digest"] == native["weights_digest"]
    assert evicted["weights_digest"] == native["weights_digest"]
    assert calm["eval"]["after"]["greedy_accuracy"] == native["eval"]["after"]["greedy_accuracy"]
    assert sum(len(agent.seen) for agent in agents) == STEPS * PROMPTS * SIZE
    for agent in agents:
        for name, ids in agent.seen.items():
            assert agent.captured[name][-len(ids) :] == ids
    assert [event for event in read_events(tmp_path / "evicted" / "events.jsonl") if event["event"] == EVICTION]


@pytest.mark.timeout(400)
async def test_sessions_survive_kills_of_the_run(tmp_path: Path) -> None:
    whole, _ = await trained(tmp_path, "whole", turns=2)
    killed, _ = await trained(tmp_path, "killed", turns=2, kill=2)

    assert killed["steps"] == STEPS
    assert killed["weights_digest"] == whole["weights_digest"]
