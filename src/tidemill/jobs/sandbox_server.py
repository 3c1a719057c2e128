"""`tidemill sandbox serve`: sandboxes of this machine for other machines, by the protocol of docs/how-to/sandbox.md."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tidemill.config.gateway import GatewayConfig
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.gateway.access import LOG, Keys, body_of, discard_body, logged_to, refuse_repeated
from tidemill.gateway.errors import RATE, ApiError, invalid
from tidemill.gateway.server import address, listen, serving
from tidemill.sandbox.local import LocalSandbox, launcher
from tidemill.sandbox.open_sandbox import WHERE, check_sandbox, limits_of
from tidemill.sandbox.records import Limits, SandboxError, SandboxLostError, Snapshot
from tidemill.sandbox.remote import LEFT_OUT

T = TypeVar("T")

JSON_BYTES = 32 << 20
"""Largest command with its standard input."""
TAR_BYTES = 2048
"""Of a file in a snapshot, besides its content."""


class OpenBody(Record, forbid_unknown_fields=True):
    """Of `POST /v1/sandboxes`."""

    limits: Limits = Limits()
    network: tuple[str, ...] = ()


class RunBody(Record, forbid_unknown_fields=True):
    """Of `POST /v1/sandboxes/ID/run`."""

    argv: tuple[str, ...]
    stdin: bytes = b""  # base64
    env: dict[str, str] = {}
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


@dataclass
class OpenSandbox:
    sandbox: LocalSandbox
    limits: Limits
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # a sandbox answers one request at a time
    requests: int = 0  # answered now or waiting
    expiry: asyncio.TimerHandle | None = None


class SandboxServer:
    """Serves sandboxes of this machine.

    Args:
        config: back-end, and the limits and network that no client may exceed.
        most: sandboxes at a time; a further one is refused with status 503.
        idle_s: a sandbox without a request for so long is closed.

    Raises:
        UserError: the tokens cannot be used.
    """

    def __init__(self, config: SandboxConfig, place: GatewayConfig, *, most: int, idle_s: float) -> None:
        assert config.backend != "http"
        self._backend, self._limits, self._body_s = config.backend, limits_of(config), place.body_s
        self._network = frozenset(config.network if config.network != "none" else ())
        self._keys, self._most, self._idle_s = Keys(place.token_file, where="--token-file"), most, idle_s
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="sandbox")
        self._sandboxes: dict[str, OpenSandbox] = {}
        self._opening, self._stopped = 0, False
        self.opened = 0

    def app(self) -> Starlette:
        """The application for a server."""
        one, call = "/v1/sandboxes/{id}", self._answering(self._with_sandbox)
        app = Starlette(
            routes=[
                Route("/health", lambda _: PlainTextResponse("ok\n")),
                Route("/v1/sandboxes", self._answering(self._open), methods=["POST"]),
                Route(one, self._answering(self._delete), methods=["DELETE"]),
                Route(f"{one}/run", call, methods=["POST"]),
                Route(f"{one}/files/{{path:path}}", call, methods=["GET", "PUT"]),
                Route(f"{one}/snapshot", call, methods=["GET", "PUT"]),
            ]
        )
        app.router.redirect_slashes = False
        return app

    def close(self) -> None:
        """End all sandboxes and their commands, and open no more."""
        self._stopped = True
        for name in list(self._sandboxes):
            self._end(name)
        launcher(self._backend).close()
        self._threads.shutdown(wait=False)

    async def _open(self, request: Request) -> Response:
        body = await self._json(request, OpenBody)
        for name, most in msgspec.structs.asdict(self._limits).items():
            if not 0 < (value := getattr(body.limits, name)) <= most:
                raise invalid(f"limits.{name} is {value:g}; this server allows up to {most:g}")
        if beyond := sorted(set(body.network) - self._network):
            raise invalid(f"network: this server does not allow {beyond[0]!r}")
        if self._stopped or len(self._sandboxes) + self._opening >= self._most:
            why = "the server stops" if self._stopped else f"{self._most} sandboxes are open; this server has no more"
            raise ApiError(503, why, kind=RATE)
        self._opening += 1
        try:
            sandbox = await self._on_thread(
                lambda: LocalSandbox(launcher(self._backend).address, body.limits, body.network)
            )
        finally:
            self._opening -= 1
        name = secrets.token_hex(16)
        self._sandboxes[name] = OpenSandbox(sandbox, body.limits)
        self._expire_later(name)
        self.opened += 1
        return Response(msgspec.json.encode({"id": name}), media_type="application/json")

    async def _delete(self, request: Request) -> Response:
        self._end(request.path_params["id"])
        return Response()

    async def _with_sandbox(self, request: Request) -> Response:
        name = request.path_params["id"]
        if (opened := self._sandboxes.get(name)) is None:
            raise ApiError(410, f"there is no such sandbox; one without a request for {self._idle_s:g} s is closed")
        opened.requests += 1
        self._expire_later(name)
        try:
            async with opened.lock:
                return await self._call(request, opened.sandbox, opened.limits)
        except SandboxLostError:
            self._end(name)
            raise
        finally:
            opened.requests -= 1
            self._expire_later(name)

    async def _call(self, request: Request, sandbox: LocalSandbox, limits: Limits) -> Response:
        """Call the method of a sandbox that a request names."""
        path: str = request.path_params.get("path", "")
        if request.method == "POST":
            run = await self._json(request, RunBody)
            finished = await self._on_thread(
                lambda: sandbox.run(run.argv, stdin=run.stdin, env=run.env, timeout_s=run.timeout_s)
            )
            return Response(msgspec.json.encode(finished), media_type="application/json")
        is_file, limit = "path" in request.path_params, limits.scratch_bytes
        if request.method == "PUT" and is_file:
            data = await body_of(request, most_bytes=limit, timeout_s=self._body_s)
            await self._on_thread(lambda: sandbox.write(path, data))
        elif request.method == "PUT":
            limit += TAR_BYTES * (limits.scratch_files + 1)
            data = await body_of(request, most_bytes=limit, timeout_s=self._body_s)
            await self._on_thread(lambda: sandbox.restore(Snapshot(data=data)))
        elif is_file:
            return Response(await self._on_thread(lambda: sandbox.read(path)), media_type="application/octet-stream")
        else:
            snapshot = await self._on_thread(sandbox.snapshot)
            return Response(snapshot.data, headers={LEFT_OUT: str(snapshot.left_out)}, media_type="application/x-tar")
        return Response()

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        """The handler for clients with a token; errors are answered in plain text."""

        async def answering(request: Request) -> Response:
            try:
                refuse_repeated(request)
                self._keys.check(request)
                return await handler(request)
            except ApiError as error:
                await discard_body(request)
                headers = {**error.headers, "connection": "close"}  # more of its body may follow
                return PlainTextResponse(error.message, error.status, headers)
            except SandboxError as error:
                return PlainTextResponse(str(error), 410 if isinstance(error, SandboxLostError) else 409)
            except Exception:  # noqa: BLE001 - one request's failure ends no other
                LOG.exception("%s failed", request.method)
                return PlainTextResponse("the server failed; its log says why", 500)

        return answering

    def _expire_later(self, name: str) -> None:
        """Restart the idle time of a sandbox; it has none while a request is answered."""
        if (opened := self._sandboxes.get(name)) is not None:
            if opened.expiry is not None:
                opened.expiry.cancel()
            later = asyncio.get_running_loop().call_later
            opened.expiry = None if opened.requests else later(self._idle_s, self._end, name)

    def _end(self, name: str) -> None:
        if (opened := self._sandboxes.pop(name, None)) is not None:
            if opened.expiry is not None:
                opened.expiry.cancel()
            opened.sandbox.close()

    async def _json(self, request: Request, kind: type[T]) -> T:
        raw = await body_of(request, most_bytes=JSON_BYTES, timeout_s=self._body_s)
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not as expected: {error}") from error

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@asynccontextmanager
async def serving_sandboxes(
    config: SandboxConfig, place: GatewayConfig, *, most: int, idle_s: float
) -> AsyncIterator[tuple[SandboxServer, str]]:
    """A server and its URL while the block runs; then every sandbox is closed.

    Raises:
        UserError: the back-end does not work here, or the address or the tokens cannot be used.
    """
    if config.backend == "http":
        raise UserError("a server has sandboxes of its own machine", where=WHERE, hint='set it to "bwrap" or "runsc"')
    await asyncio.to_thread(check_sandbox, config)
    server = SandboxServer(config, place, most=most, idle_s=idle_s)
    listener = listen(place, keys=("--host", "--port"))
    async with serving(server.app(), listener, place):
        try:
            yield server, address(listener)
        finally:
            server.close()  # before the listener, which waits for open answers


async def run_sandbox_server(
    config: SandboxConfig, place: GatewayConfig, *, most: int, idle_s: float, show: Callable[[str], None]
) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM; `show` is called with the URL. Raises UserError: see `serving_sandboxes`."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
            stack.callback(loop.remove_signal_handler, number)
        stack.enter_context(logged_to(logging.StreamHandler()))
        server, url = await stack.enter_async_context(serving_sandboxes(config, place, most=most, idle_s=idle_s))
        show(url)
        await ended.wait()
    return {"opened": server.opened}
