"""A gateway over a model that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.chat_models import chat_codec
from tidemill.config.agent import EnvConfig
from tidemill.config.gateway import GatewayConfig
from tidemill.core.records import SamplingParams, pack_logprobs, pack_tokens
from tidemill.gateway.app import Gateway
from tidemill.gateway.backend import Asked, Piece
from tidemill.gateway.requests import Question
from tidemill.gateway.server import listen, serving
from tidemill.jobs.gateway import write_hermes
from tidemill.models.turn_format import turn_format

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEADLINE_S = 10.0


class Scripted:
    """Implements `gateway.backend.Served`: says `answer` to everything, `step` tokens at a time."""

    name, chat, context_tokens = "scripted", True, 500

    def __init__(self, answer: str = "Hello you.", *, step: int = 3) -> None:
        self.codec = chat_codec(TEMPLATE)
        self.format = turn_format(self.codec, EnvConfig(), chat_template=True)
        self.answer, self.step, self.ready = answer, step, True
        self.asked: list[Asked] = []
        self.closed = 0
        self.error: Exception | None = None
        self.go_on = asyncio.Event()  # the second piece waits for it
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

    def refuse(self, question: Question, key: str) -> None:
        """Nothing."""

    async def generate(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        self.asked.append(asked)
        ids = self.codec.encode_completion(self.answer)[: asked.sampling.max_new_tokens]
        cut = len(ids) == asked.sampling.max_new_tokens
        try:
            for start in range(0, len(ids), self.step):
                if start:
                    await self.go_on.wait()
                    if self.error is not None:
                        raise self.error
                part = ids[start : start + self.step]
                finish = ("length" if cut else "stop") if start + self.step >= len(ids) else None
                for index in range(asked.n):
                    yield Piece(
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
