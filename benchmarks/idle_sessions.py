"""Memory of training sessions that wait for their client's next request."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import torch

from tidemill.config.agent import EnvConfig
from tidemill.config.gateway import GatewayConfig
from tidemill.config.model import ModelConfig
from tidemill.controller.samples import Sample, SampleState
from tidemill.core.records import Call, Prompt, SampleId, SamplingParams, pack_tokens
from tidemill.gateway.app import Gateway
from tidemill.gateway.server import listen, serving
from tidemill.gateway.session import SessionLog
from tidemill.gateway.session_routes import PATH
from tidemill.gateway.sessions import Sessions
from tidemill.jobs.gateway import ServedSessions, write_hermes
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.turn_format import turn_format

PROMPT_TOKENS, DEADLINE_S = 500, 300.0


class NoCalls:
    """Implements `core.protocols.CallLog`."""

    async def started(self, index: int) -> None:
        """Nothing."""

    async def ended(self, index: int, call: Call) -> None:
        """Nothing."""


class NoFleet:
    engine_count = 1


def idle_sessions(count: int) -> dict[str, Any]:
    """Open sessions through their route, in another process; each has a sample whose prompt has 500 tokens, and the
    task in which its environment waits."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, count), daemon=True)
    server.start()
    try:
        port, before = _next(ours)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            found = [client.post(PATH, json={}).json() for _ in range(count)]
        assert len({session["id"] for session in found}) == count, "a session was opened twice"
        ours.send("memory")
        after, attached = _next(ours)
    finally:
        server.kill()
        server.join()
    assert attached == count, f"{attached} of {count} sessions are open"
    return {"sessions": count, "kb_per_session": (after - before) / count / 1e3}


def _next(pipe: Connection) -> Any:
    assert pipe.poll(DEADLINE_S), "the server does not answer"
    return pipe.recv()


def _memory() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _serve(pipe: Connection, count: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(_sessions(pipe, count))


async def _sessions(pipe: Connection, count: int) -> None:
    codec = load_codec(resolve(ModelConfig(source="char"), progress=lambda _: None))
    sampling, config = SamplingParams(max_new_tokens=100), GatewayConfig(port=0)
    turns = turn_format(codec, EnvConfig(), chat_template=False)
    with TemporaryDirectory() as folder:
        sessions = Sessions(
            turns,
            SessionLog(Path(folder) / "sessions.jsonl"),
            secret=b"secret",
            sampling=sampling,
            idle_s=600.0,
            turns=4,
            write_calls=write_hermes,
        )
        served = ServedSessions("run", codec, turns, sessions, sampling, NoFleet(), context_tokens=2048)  # type: ignore[arg-type]
        listener = listen(config)
        app = Gateway(served, config, write_calls=write_hermes, sessions=sessions).app()
        async with serving(app, listener, config):
            before = _memory()
            samples = [_sample(index) for index in range(count)]
            acting = [asyncio.create_task(sessions.act(one.episode(codec.decode), NoCalls())) for one in samples]
            pipe.send((listener.getsockname()[1], before))
            await asyncio.to_thread(pipe.recv)
            pipe.send((_memory(), sessions.take_counts()["sessions"]))
            await asyncio.wait(acting, timeout=DEADLINE_S)


def _sample(index: int) -> Sample:
    text = "1+1=" * (PROMPT_TOKENS // 4)
    return Sample(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id=f"{index:032x}", epoch=0, index=0),
        ordinal=index,
        prompt=Prompt(prompt_id=f"{index:032x}", token_ids=pack_tokens([1] * PROMPT_TOKENS), text=text, answer="2"),
        opens=True,
        state=SampleState.ACTING,
    )
