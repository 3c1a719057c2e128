"""A sample of a run whose environment is a client, and what a client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.unit.gateway.scripted import Scripted
from tidemill.config.gateway import GatewayConfig
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.turns import AgentLimits
from tidemill.core.records import (
    Observation,
    PolicyVersion,
    Prompt,
    SampleId,
    SamplingParams,
    Trajectory,
    pack_logprobs,
    pack_tokens,
    unpack_tokens,
)
from tidemill.gateway.app import Gateway
from tidemill.gateway.server import listen, serving
from tidemill.gateway.session import SessionLog
from tidemill.gateway.sessions import Sessions
from tidemill.jobs.gateway import ServedSessions, write_hermes

OPEN = "/v1/tidemill/sessions"

SAMPLING = SamplingParams(max_new_tokens=40)

LIMITS = AgentLimits(context_tokens=400, opens=True)

VERSION = PolicyVersion(number=0, digest="")

SCRIPT = Scripted()


class NoCalls:
    """Implements `core.protocols.CallLog`."""

    async def started(self, index: int) -> None: ...

    async def ended(self, index: int, call: Any) -> None: ...


class Fleet:
    engine_count = 1


class Agent:
    """A sample as the controller keeps it: it asks the environment, and generates what a test says."""

    def __init__(self, sessions: Sessions, index: int = 0, prompt: str = "1+1=", epoch: int = 0) -> None:
        self.sessions = sessions
        self.prompt_ids = SCRIPT.codec.encode(prompt)
        self.sample = Sample(
            sample_id=SampleId(run_seed=0, purpose="train", prompt_id=prompt, epoch=epoch, index=index),
            ordinal=index,
            prompt=Prompt(prompt_id=prompt, token_ids=pack_tokens(self.prompt_ids), text=prompt, answer=""),
            opens=True,
            state=SampleState.ACTING,
        )

    @property
    def context(self) -> list[int]:
        return unpack_tokens(self.sample.episode(SCRIPT.codec.decode).token_ids)

    @property
    def completion(self) -> list[int]:
        return unpack_tokens(bytes(self.sample.token_ids))

    @property
    def trajectory(self) -> Trajectory:
        return self.sample.trajectory(SCRIPT.codec.decode)

    async def observe(self) -> Observation:
        async with asyncio.timeout(10):
            answer = await self.sessions.act(self.sample.episode(SCRIPT.codec.decode), NoCalls())
        self.sample.observe(answer, SAMPLING, LIMITS)
        return answer

    def generate(self, text: str, *, report: bool = True) -> None:
        sample, ids = self.sample, SCRIPT.codec.encode_completion(text)
        sample.assign("lease", 0)
        sample.extend(pack_tokens(ids), pack_logprobs([-float(sample.length)] * len(ids)), VERSION)
        if report:
            sent = bytes(sample.token_ids), bytes(sample.logprobs)
            self.sessions.receive(sample.sample_id, sample.turns.start, *sent, sample.length)
        sample.end_attempt("stop", "", SAMPLING, LIMITS)


def new_sessions(folder: Path, *, idle_s: float = 60.0, turns: int = 4) -> Sessions:
    return Sessions(
        SCRIPT.format,
        SessionLog(folder / "sessions.jsonl"),
        secret=b"secret",
        sampling=SAMPLING,
        idle_s=idle_s,
        turns=turns,
        write_calls=write_hermes,
    )


@asynccontextmanager
async def client_of(sessions: Sessions) -> AsyncIterator[httpx2.AsyncClient]:
    fleet: Any = Fleet()
    served = ServedSessions("scripted", SCRIPT.codec, SCRIPT.format, sessions, SAMPLING, fleet, context_tokens=400)
    config = GatewayConfig(port=0)
    listener = listen(config)
    app = Gateway(served, config, write_calls=write_hermes, sessions=sessions).app()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(app, listener, config), httpx2.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        yield http
    await sessions.close()
    sessions._log.close()


async def opened(http: httpx2.AsyncClient, **body: Any) -> tuple[str, dict[str, str]]:
    """(path of a new session, its headers)."""
    found = (await http.post(OPEN, json=body)).json()
    return f"{OPEN}/{found['id']}", {"authorization": f"Bearer {found['key']}"}


def asking(http: httpx2.AsyncClient, headers: dict[str, str], messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    body = {"model": "scripted", "messages": list(messages), "return_token_ids": True, **more}
    return asyncio.create_task(http.post("/v1/chat/completions", json=body, headers=headers))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def text_of(observation: Observation) -> str:
    return SCRIPT.codec.decode_whole(unpack_tokens(observation.token_ids))


async def answered(http: httpx2.AsyncClient, agent: Agent, headers: dict[str, str], texts: Sequence[str]) -> Any:
    """What the client gets for "Hi" with `n` answers, and the environment's last wait."""
    waiting = asyncio.create_task(agent.observe())
    asked = asking(http, headers, [user("Hi")], n=len(texts))
    for text in texts:
        await waiting
        agent.generate(text)
        waiting = asyncio.create_task(agent.observe())
    return (await asked).json(), waiting
