"""`tidemill serve`: a model behind HTTP, also while its workers are evicted, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.forked import Forked
from tidemill.telemetry.events import EVICTION, read_events

START_S, DEADLINE_S = 60.0, 120.0
MODEL = (
    *("--model.source", "char", "--model.char.layers", "2", "--model.char.hidden_size", "32"),
    *("--engine.slots", "8", "--engine.batch_invariant", "true", "--engine.context_tokens", "200"),
    *("--trainer.threads", "1", "--gateway.name", "char", "--engine.tick_s", "0.02"),
)
EVICTED = (
    *("--pool.kind", "synthetic", "--pool.workers", "2", "--pool.mean_time_to_eviction_s", "0.4"),
    *("--pool.mean_time_to_return_s", "0.1", "--fleet.seed_window_s", "0.1"),
)
BODIES = [
    {
        "model": "char",
        "prompt": f"{number}+{number}=",
        "max_tokens": 60 + number,
        "seed": number,
        "return_token_ids": True,
    }
    for number in range(12)
]


@asynccontextmanager
async def serve(folder: Path, *more: str) -> AsyncIterator[httpx2.AsyncClient]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Forked("serve", *MODEL, "--run.dir", str(folder), "--gateway.port", str(port), *more)
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, trust_env=False
        ) as client:
            until = time.monotonic() + START_S
            while not await ready(client):
                assert process.poll() is None, process.communicate(10)
                assert time.monotonic() < until
                await asyncio.sleep(0.1)
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err


async def ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx2.TransportError:
        return False


async def answers(client: httpx2.AsyncClient) -> list[list[int]]:
    """Token ids of all requests, half of them streamed."""

    async def one(number: int, body: dict[str, Any]) -> list[int]:
        if number % 2:
            answer = (await client.post("/v1/completions", json=body)).json()
            return list(answer["choices"][0]["token_ids"])
        ids = list[int]()
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        return ids

    return list(await asyncio.gather(*(one(number, body) for number, body in enumerate(BODIES))))


@pytest.mark.timeout(300)
async def test_evictions_change_no_answer_and_lose_none(tmp_path: Path) -> None:
    async with serve(tmp_path / "calm") as client:
        calm = await answers(client)
        assert await answers(client) == calm  # the same seeds
        other = (await client.post("/v1/completions", json=BODIES[0] | {"seed": 99})).json()
        assert other["choices"][0]["token_ids"] != calm[0]
    async with serve(tmp_path / "evicted", *EVICTED) as client:
        for _ in range(4):
            assert await answers(client) == calm

    evictions = [event for event in read_events(tmp_path / "evicted" / "events.jsonl") if event["event"] == EVICTION]
    assert len(evictions) >= 3
    assert max(map(len, calm)) > 50


@pytest.mark.timeout(120)
async def test_equal_requests_at_the_same_time_are_all_answered(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as client:
        asked = []
        for _ in range(24):
            asked.append(asyncio.create_task(client.post("/v1/completions", json=BODIES[3])))
            await asyncio.sleep(0.02)
        async with asyncio.timeout(60):
            found = [(await one).json()["choices"][0]["token_ids"] for one in asked]

    assert found == [found[0]] * 24


@pytest.mark.timeout(120)
async def test_the_context_is_the_models_if_that_is_short(tmp_path: Path) -> None:
    async with serve(tmp_path / "run", "--engine.context_tokens", "0") as client:
        (model,) = (await client.get("/v1/models")).json()["data"]

    assert model["max_model_len"] == 512


@pytest.mark.timeout(120)
async def test_a_character_that_the_model_lacks_and_a_full_context_are_the_clients_errors(tmp_path: Path) -> None:
    async with serve(tmp_path / "run") as client:
        unknown = await client.post("/v1/completions", json={"model": "char", "prompt": "\N{GRINNING FACE}"})
        full = await client.post("/v1/completions", json={"model": "char", "prompt": "1" * 200})
        fine = await client.post("/v1/completions", json={"model": "char", "prompt": "1+1=", "max_tokens": 3})

    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "prompt")
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert 1 <= fine.json()["usage"]["completion_tokens"] <= 3  # it may end early: no seed is given


def test_bad_settings_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    process = Forked("serve", *MODEL, "--gateway.host", "0.0.0.0")
    _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 2
    assert "open to other machines without keys" in err
