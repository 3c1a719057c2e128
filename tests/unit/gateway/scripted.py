"""A gateway over a model that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.chat_models import chat_codec
from tidemill.config.agent import EnvConfig
from tidemill.config.gateway import GatewayConfig
from tidemill.core.records import SamplingParams, pack_logprobs, pack_tokens
from tidemill.gateway.app import Gateway
from tidemill.gateway.backend import CompletionRequest, TokenChunk
from tidemill.gateway.requests import CompletionParams
from tidemill.gateway.server import listen, serving
from tidemill.jobs.gateway import write_hermes
from tidemill.models.turn_format import turn_format

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEADLINE_S = 10.0
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CALL = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Scripted:
    """Implements `gateway.backend.Served`: says `answer` to everything, `step` tokens at a time."""

    name, chat, context_tokens = "scripted", True, 500

    def __init__(self, answer: str = "Hello you.", *, step: int = 3) -> None:
        self.codec = chat_codec(TEMPLATE)
        self.format = turn_format(self.codec, EnvConfig(), chat_template=True)
        self.answer, self.step, self.ready = answer, step, True
        self.requested: list[CompletionRequest] = []
        self.closed = 0
        self.error: Exception | None = None
        self.go_on = asyncio.Event()  # the second chunk waits for it
        self.go_on.set()

    @property
    def defaults(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=0, stop_token_ids=self.codec.stop_token_ids)

    @property
    def figures(self) -> Mapping[str, float]:
        return {"workers": 2.0}

    @property
    def vocabulary(self) -> int:
        return self.codec.token_count

    @property
    def longest_token(self) -> int:
        return self.codec.longest_token

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def refuse(self, params: CompletionParams, key: str) -> None:
        """Nothing."""

    async def generate(self, requested: CompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requested.append(requested)
        ids = self.codec.encode_completion(self.answer)[: requested.sampling.max_new_tokens]
        cut = len(ids) == requested.sampling.max_new_tokens
        try:
            for start in range(0, len(ids), self.step):
                if start:
                    await self.go_on.wait()
                    if self.error is not None:
                        raise self.error
                part = ids[start : start + self.step]
                finish = ("length" if cut else "stop") if start + self.step >= len(ids) else None
                for index in range(requested.params.n):
                    yield TokenChunk(
                        index=index,
                        token_ids=pack_tokens(part),
                        logprobs=pack_logprobs([-0.5] * len(part)),
                        finish=finish,  # type: ignore[arg-type]
                    )
        finally:
            self.closed += 1


@asynccontextmanager
async def gateway(served: Scripted, **config: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a gateway on a free port."""
    settings = GatewayConfig(port=0, **config)
    listener = listen(settings)
    app = Gateway(served, settings, write_calls=write_hermes).app()
    async with (
        serving(app, listener, settings),
        httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=DEADLINE_S, trust_env=False
        ) as client,
    ):
        yield client


def chat(text: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}


def named(name: object, parameters: object = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def until(condition: Callable[[], bool], *, seconds: float = DEADLINE_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
