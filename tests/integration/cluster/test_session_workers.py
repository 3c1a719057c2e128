"""Streams of training sessions whose workers are killed, two at a time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

import tidemill as tm
from tests.char_task import char_task
from tests.forked import Forked
from tests.integration.cluster.test_train import _events, start
from tests.integration.test_sessions import free_port
from tests.processes import command_lines, processes_below
from tidemill.gateway.client import sessions as follow

pytestmark = pytest.mark.xdist_group("ray")

WORKERS, PROMPTS, SIZE, BEGINNING, DEADLINE_S = 2, 5, 8, 8, 600.0
PRINTABLE = json.dumps("\n" + "".join(map(chr, range(32, 127))))
"""So many characters that an answer of an untrained model has about a hundred before it ends."""
RECIPE = (
    char_task(layers=4, hidden_size=128).replace('"0123456789+=\\n"', PRINTABLE)
    + f"""\
[sampling]
max_new_tokens = 240
stop = ["no such string"]
[scoring]
rewards = [{{ kind = "length", target_tokens = 100 }}]
[engine]
slots = 16
context_tokens = 256  # the shape of the engine's products: equal in both runs, whatever sessions may add
batch_invariant = true
[pool]
kind = "static"
workers = {WORKERS}
[fleet]
seed_window_s = 0.1
[batch]
prompts = {PROMPTS}
group_size = {SIZE}
[trainer]
steps = 1
threads = 1
[eval]
every_steps = 0
prompts = 2
[checkpoint]
every_steps = 0
"""
)
ON_RAY = ("--runtime=ray", "--gateway.sessions=true", "--gateway.name=agents")


class Streams:
    """Agents of one turn, which stream their answer.

    Attributes:
        allowed: answers that may begin.
    """

    def __init__(self, url: str) -> None:
        self.url, self.allowed = url, threading.Semaphore(0)
        self.ids: list[tuple[str, tuple[int, ...]]] = []  # prompt and ids of every stream

    def agent(self) -> None:
        for session in follow(self.url, start_s=60):
            body = {"model": "agents", "prompt": session.task["prompt"], "stream": True, "return_token_ids": True}
            headers = {"authorization": f"Bearer {session.key}"}
            ids, ended = list[int](), False
            with (
                session,
                httpx2.Client(base_url=session.base_url, headers=headers, timeout=120, trust_env=False) as http,
            ):
                assert self.allowed.acquire(timeout=DEADLINE_S)
                with http.stream("POST", "/completions", json=body) as stream:
                    assert stream.status_code == 200, stream.read()
                    for line in stream.iter_lines():
                        ended = ended or line == "data: [DONE]"
                        if line.startswith("data: {"):
                            chunk = json.loads(line.removeprefix("data: "))
                            ids += chunk["choices"][0]["token_ids"]
                assert ended
                about: dict[str, Any] = http.get(f"/tidemill/sessions/{session.id}").json()
                assert about["turns"][0]["answers"][0]["token_ids"] == ids
                assert about["token_ids"][-len(ids) :] == ids
                self.ids.append((session.task["prompt"], tuple(ids)))

    async def run(self, agents: int) -> None:
        with ThreadPoolExecutor(agents) as threads:
            await asyncio.gather(*(asyncio.wrap_future(threads.submit(self.agent)) for _ in range(agents)))


async def kill_workers(process: Forked, run: Path, kills: int, streams: Streams) -> None:
    """Whenever all workers serve, let some streams begin, and kill all workers."""
    killed, until = set[int](), time.monotonic() + DEADLINE_S
    while len(killed) < kills:
        assert time.monotonic() < until, f"{len(killed)} workers were killed"
        assert process.poll() is None, f"the run ended after {len(killed)} kills"
        if sum(line["event"] == "join" for line in _events(run)) == len(killed) + WORKERS:
            streams.allowed.release(BEGINNING)
            await asyncio.sleep(0.5)  # now they are in the middle
            names = command_lines(processes_below(process.pid))
            workers = {pid for pid, name in names.items() if "RolloutActor" in name} - killed
            assert len(workers) == WORKERS
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            killed |= workers
        await asyncio.sleep(0.1)
    streams.allowed.release(1000)


def sampled(run: Path) -> Counter[tuple[str, tuple[int, ...]]]:
    """Prompts and token ids of all samples that were trained on."""
    found = tm.Run(run).samples(training=True)
    return Counter((sample.prompt, tuple(sample.token_ids)) for sample in found)


@pytest.mark.slow  # test_sessions.py evicts the workers of sessions, and test_workers.py kills workers on Ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        pytest.param(0, 2, id="short"),
        *(pytest.param(seed, 10, id=f"long-{seed}") for seed in range(1, 6)),
    ],
)
async def test_every_stream_is_completed_though_workers_are_killed(tmp_path: Path, seed: int, kills: int) -> None:
    """The long forms are 200 sessions and 50 kills. A place whose workers keep dying is leased later each time."""
    recipe, port = tmp_path / "recipe.toml", free_port()
    recipe.write_text(RECIPE)
    native = start(recipe, tmp_path / "native", f"--run.seed={seed}", "--pool.workers=0")
    expected = json.loads(native.communicate(timeout=DEADLINE_S)[0])
    run = tmp_path / "run"
    process = start(recipe, run, f"--run.seed={seed}", *ON_RAY, f"--gateway.port={port}")
    streams = Streams(f"http://127.0.0.1:{port}")
    running = asyncio.create_task(streams.run(agents=PROMPTS * SIZE))
    killing = asyncio.create_task(kill_workers(process, run, kills, streams))
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(running, killing)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err

    assert len(streams.ids) == PROMPTS * SIZE
    evictions = [line for line in _events(run) if line["event"] == "eviction"]
    assert len(evictions) >= kills
    assert sum(int(str(line["samples"])) for line in evictions) > kills  # streams lost their workers
    assert Counter(streams.ids) == sampled(run) == sampled(tmp_path / "native")
    assert json.loads(out)["weights_digest"] == expected["weights_digest"]
