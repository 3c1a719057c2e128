"""The routes of the gateway."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from math import ceil
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.config.gateway import GatewayConfig
from tidemill.core.errors import UserError
from tidemill.core.records import SamplingParams, count, pack_tokens, unpack_tokens
from tidemill.gateway.access import LOG, Keys, Limits, bearer, body_of, discard_body, refuse_repeated, unless_left
from tidemill.gateway.answers import Answer
from tidemill.gateway.backend import CompletionRequest, Served, TokenChunk
from tidemill.gateway.errors import SERVER, ApiError, invalid, unsupported
from tidemill.gateway.requests import (
    Call,
    CompletionParams,
    as_messages,
    chat_params,
    completion_params,
    read_body,
    refuse_overflow,
    response_params,
)
from tidemill.gateway.responses import ResponseAnswer
from tidemill.gateway.session_routes import session_routes
from tidemill.gateway.sessions import Sessions
from tidemill.gateway.texts import ChoiceDelta, ChoiceText
from tidemill.telemetry.openmetrics import MEDIA_TYPE, Figure, exposition

T = TypeVar("T")
Handler = Callable[[Request, str], Awaitable[Response]]
Events = AsyncGenerator[dict[str, Any] | None, None]

OFF_LOOP_BYTES = 256 << 10
"""Larger bodies are read on a thread, so that other requests do not wait."""
QUIET_S = 10.0
"""A stream without news for so long sends a comment, because its worker is being replaced."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
VLLM_GAUGES = {"num_requests_waiting": "samples_waiting", "num_requests_running": "samples_assigned"}
"""Gauges by their names in vLLM, from which llm-d's endpoint picker chooses a replica."""
SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Gateway:
    """Serves one model.

    Args:
        write_calls: tool calls in a message of the assistant, as the model writes them.
        sessions: of a run that is trained; None if the model is only served.

    Raises:
        UserError: the keys cannot be used.
    """

    def __init__(
        self,
        served: Served,
        config: GatewayConfig,
        *,
        write_calls: Callable[[Sequence[Call]], str],
        sessions: Sessions | None = None,
    ) -> None:
        self._served, self._config, self._write_calls, self._sessions = served, config, write_calls, sessions
        self._keys, self._limits = Keys(config.token_file), Limits(config.concurrency)
        self._created, self._statuses = int(time.time()), Counter[int]()
        self._tokens: Counter[str] = Counter()

    def app(self) -> Starlette:
        """The application for a server."""

        def post(path: str, handler: Handler) -> Route:
            return Route(path, self._guarded(handler), methods=["POST"])

        read = partial(self._read, read=dict[str, Any])
        routes = [] if self._sessions is None else session_routes(self._sessions, read, self._guarded)
        return Starlette(
            routes=[
                *routes,
                post("/v1/chat/completions", self._chat),
                post("/v1/completions", self._completions),
                post("/v1/responses", self._responses),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._model)),
                Route("/health", lambda _: PlainTextResponse("ok\n")),
                Route("/ready", self._ready),
                Route("/metrics", self._guarded(self._metrics)),
            ],
            exception_handlers={404: _no_route, 405: _no_route},
        )

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return self._statuses.total()

    # Routes.

    async def _chat(self, request: Request, key: str) -> Response:
        params = await self._params(request, chat_params)
        requested = self._completion_request(params, await self._prompt_ids(params, self._rendered), key)
        return await self._answered(request, [requested], chat=True)

    async def _completions(self, request: Request, key: str) -> Response:
        params = await self._params(request, completion_params)
        prompts = await self._prompt_ids(params, lambda params: list(map(self._encoded, params.prompts)))
        requested = [self._completion_request(params, ids, key) for ids in prompts]
        if len(requested) > 1 and params.stream:
            raise invalid("a stream answers one prompt", "prompt")
        return await self._answered(request, requested, chat=False)

    async def _responses(self, request: Request, key: str) -> Response:
        params = await self._params(request, response_params)
        requested = self._completion_request(params, await self._prompt_ids(params, self._rendered), key)
        events = self._response_events(requested)
        if params.stream:
            return Stream(events, named=True)

        async def whole() -> Any:
            async with aclosing(events):
                async for event in events:
                    last = event
            return last["response"]

        return JSONResponse(await unless_left(request, whole()))

    async def _models(self, request: Request, key: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request, key: str) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_object())

    async def _ready(self, request: Request) -> Response:
        ready = self._served.ready
        return PlainTextResponse("ready\n" if ready else "no worker serves\n", status_code=200 if ready else 503)

    async def _metrics(self, request: Request, key: str) -> Response:
        figures = [Figure("requests", n, {"status": str(status)}, "counter") for status, n in self._statuses.items()]
        figures += [Figure("tokens", n, {"kind": kind}, "counter") for kind, n in self._tokens.items()]
        gauges = {"requests_open": float(self._limits.open - 1), **self._served.figures}
        figures += [Figure(name, value) for name, value in gauges.items()]
        about = {"model_name": self._served.name}
        alike = {name: gauges[ours] for name, ours in VLLM_GAUGES.items() if ours in gauges}
        figures += [Figure(name, value, about, prefix="vllm:") for name, value in alike.items()]
        return Response(exposition(figures), media_type=MEDIA_TYPE)

    # What they share.

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
            began_s, leave = time.monotonic(), None
            try:
                refuse_repeated(request)
                key = self._key(request)
                leave = self._limits.enter(key)
                response = await handler(request, key)
                if isinstance(response, Stream):
                    response.ended, leave = leave, None
            except ApiError as error:
                response = JSONResponse(error.content, status_code=error.status, headers=error.headers)
            except Exception:  # noqa: BLE001 - one request's failure ends no other
                LOG.exception("request %s failed", request_id)
                response = JSONResponse(internal().content, status_code=500)
            finally:
                if leave is not None:
                    leave()
            response.headers["x-request-id"] = request_id
            if request.method == "POST" and not getattr(request.state, "read", False):
                await discard_body(request)
                response.headers["connection"] = "close"  # more of its body may follow
            self._statuses[response.status_code] += 1
            took_ms = (time.monotonic() - began_s) * 1000
            LOG.info("%s %s %s %s %.0f ms", request_id, request.method, request.url.path, response.status_code, took_ms)
            return response

        return guarded

    def _key(self, request: Request) -> str:
        """The key of a session or of a client. Raises ApiError: it is neither."""
        given = bearer(request)
        if self._sessions is not None and self._sessions.find(given) is not None:
            return given
        return self._keys.check(request)

    async def _params(
        self, request: Request, read: Callable[[Mapping[str, Any]], CompletionParams]
    ) -> CompletionParams:
        retry_key = request.headers.get("idempotency-key")
        if retry_key is not None and (self._sessions is None or self._sessions.find(bearer(request)) is None):
            why = "answers are kept in training sessions only; equal requests with a `seed` get equal answers"
            raise unsupported("Idempotency-Key", why)
        params = await self._read(request, read)
        return msgspec.structs.replace(params, retry_key=retry_key) if retry_key else params

    async def _read(self, request: Request, read: Callable[[Mapping[str, Any]], T]) -> T:
        most = int(self._config.body_mb * 1e6)
        raw = await body_of(request, most_bytes=most, timeout_s=self._config.body_s)

        def parsed() -> T:
            body = read_body(raw) if raw else {}
            if isinstance(name := body.get("model"), str):
                self._check_model(name)
            return read(body)

        return parsed() if len(raw) <= OFF_LOOP_BYTES else await asyncio.to_thread(parsed)

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"there is no model {name[:100]!r}; this gateway serves {self._served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _model_object(self) -> dict[str, Any]:
        served = self._served
        about = {"id": served.name, "object": "model", "created": self._created, "owned_by": "tidemill"}
        return {**about, "max_model_len": served.context_tokens}

    async def _prompt_ids(self, params: CompletionParams, encode: Callable[[CompletionParams], T]) -> T:
        """Encode a prompt, a long one on a thread. Raises ApiError: it is too long for the context in any case."""
        served, characters, tools = self._served, params.characters, len(msgspec.json.encode(params.tools))
        # A template may leave out a part of the tools, but not of so many.
        rendered = characters + (tools if tools > OFF_LOOP_BYTES else 0)
        if rendered > served.context_tokens * served.longest_token:
            refuse_overflow(ceil(rendered / served.longest_token), params, served.context_tokens)
        small = characters + tools <= OFF_LOOP_BYTES
        return encode(params) if small else await asyncio.to_thread(encode, params)

    def _rendered(self, params: CompletionParams) -> list[int]:
        """Raises ApiError: the model's template refuses the messages or tools."""
        messages = as_messages(params.messages, self._write_calls)
        try:
            _, ids = self._served.format.prompt(messages, tools=params.tools)
            return ids
        except UserError as error:
            raise invalid(error.what, "messages") from error

    def _encoded(self, prompt: str | tuple[int, ...]) -> list[int]:
        try:
            ids = self._served.encode(prompt) if isinstance(prompt, str) else list(prompt)
        except UserError as error:
            raise invalid(error.what, "prompt") from error
        if max(ids) >= self._served.vocabulary:
            raise invalid(f"{max(ids)} is no token id: the model has {self._served.vocabulary}", "prompt")
        return ids

    def _completion_request(self, params: CompletionParams, prompt_ids: list[int], key: str) -> CompletionRequest:
        """Raises ApiError: prompt and completion do not fit into the context, or the model is not served this way."""
        served, defaults = self._served, self._served.defaults
        served.refuse(params, key)
        refuse_overflow(len(prompt_ids), params, served.context_tokens)
        room = served.context_tokens - len(prompt_ids)
        given: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop_strings": params.stop or None,
        }
        sampling: SamplingParams = msgspec.structs.replace(
            defaults,
            max_new_tokens=params.max_tokens or min(defaults.max_new_tokens or room, room),
            **{name: value for name, value in given.items() if value is not None},
        )
        return CompletionRequest(prompt_ids=pack_tokens(prompt_ids), sampling=sampling, params=params, key=key)

    async def _news(self, requested: CompletionRequest) -> AsyncGenerator[tuple[TokenChunk, ChoiceDelta], None]:
        """The tokens of all choices with what they say; closing it ends them."""
        served, params = self._served, requested.params
        self._tokens["prompt"] += count(requested.prompt_ids)
        prompt_ids, stops = unpack_tokens(requested.prompt_ids), requested.sampling.stop_strings
        texts = [ChoiceText.answering(params, prompt_ids, format=served.format, stops=stops) for _ in range(params.n)]
        async with aclosing(served.generate(requested)) as chunks:
            async for chunk in chunks:
                self._tokens["completion"] += count(chunk.token_ids)
                yield chunk, texts[chunk.index].feed(unpack_tokens(chunk.token_ids), chunk.finish)

    async def _answered(self, request: Request, requested: Sequence[CompletionRequest], *, chat: bool) -> Response:
        params = requested[0].params
        answer = Answer(params, self._served.name, self._served.format.token_bytes, chat=chat)
        if params.stream:
            return Stream(self._chunks(requested[0], answer), named=False)

        async def generate(first: int, one: CompletionRequest) -> None:
            async for chunk, said in self._news(one):
                answer.add(first + chunk.index, chunk, said)

        async def whole() -> dict[str, Any]:
            await asyncio.gather(*(generate(place * params.n, one) for place, one in enumerate(requested)))
            return answer.whole([one.prompt_ids for one in requested])

        return JSONResponse(await unless_left(request, whole()))

    async def _chunks(self, requested: CompletionRequest, answer: Answer) -> Events:
        tokens = 0
        async with aclosing(self._news(requested)) as news:
            async for chunk, said in news:
                tokens += count(chunk.token_ids)
                yield answer.chunk(chunk, said)
        if requested.params.usage:
            yield answer.usage_chunk(count(requested.prompt_ids), tokens)
        yield None

    async def _response_events(self, requested: CompletionRequest) -> AsyncGenerator[dict[str, Any], None]:
        answer = ResponseAnswer(requested, self._served.name)
        said, tokens = ChoiceDelta(), 0
        for event in answer.begin():
            yield event
        async with aclosing(self._news(requested)) as news:
            async for chunk, said in news:
                tokens += count(chunk.token_ids)
                for event in answer.news(said):
                    yield event
        for event in answer.end(said, tokens):
            yield event


class Stream(StreamingResponse):
    """Server-sent events; None is the mark of the end."""

    ended: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, events: Events, *, named: bool) -> None:
        super().__init__(_sent(events, named=named), media_type="text/event-stream", headers=SSE_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


def internal() -> ApiError:
    return ApiError(500, "internal error; the server's log has it", kind=SERVER, code="internal_error")


async def _sent(events: Events, *, named: bool) -> AsyncIterator[bytes]:
    try:
        async for event in with_comments(events):
            if event is None:
                yield b"data: [DONE]\n\n"
            elif event:
                yield _line(event, named=named)
            else:
                yield b": the completion goes on\n\n"
    except Exception as error:  # noqa: BLE001 - the status is sent; the client gets an event
        if not isinstance(error, ApiError):
            LOG.exception("a stream failed")
            error = internal()
        failure = {"type": "error", "sequence_number": 0, **error.content["error"]} if named else error.content
        yield _line(failure, named=named)
    finally:
        await events.aclose()


async def with_comments(events: Events, quiet_s: float = QUIET_S) -> AsyncIterator[dict[str, Any] | None]:
    """The events, and an empty one after every `quiet_s` seconds without."""
    while True:
        coming = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait({coming}, timeout=quiet_s))[0]:
                yield {}
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        try:
            yield coming.result()
        except StopAsyncIteration:
            return


def _line(event: Mapping[str, Any], *, named: bool) -> bytes:
    name = f"event: {event['type']}\n".encode() if named else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    code = "method_not_allowed" if status == 405 else "not_found"
    found = ApiError(status, f"there is no {request.method} {request.url.path}", code=code)
    await discard_body(request)
    headers = {**(getattr(error, "headers", None) or {}), "connection": "close"}  # more of its body may follow
    return JSONResponse(found.content, status_code=status, headers=headers)
