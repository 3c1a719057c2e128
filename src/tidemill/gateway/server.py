"""The HTTP server: one listener, with deadlines for headers and idle connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from http import HTTPStatus
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidemill.config.gateway import GatewayConfig
from tidemill.core.errors import UserError
from tidemill.gateway.errors import RATE, ApiError

STOP_S = 30.0
START_S = 10.0
TOO_MANY = ApiError(503, "too many open connections", kind=RATE, code="too_many_connections")
NOT_HTTP = ApiError(400, "the request is not valid HTTP", code="invalid_http")


def listen(config: GatewayConfig, *, keys: tuple[str, str] = ("gateway.host", "gateway.port")) -> socket.socket:
    """Raises UserError: the address cannot be used; it names the settings of host and port, `keys`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=config.connections)
    except OSError as error:
        hint = f"set {keys[0]} to an address of this machine, and {keys[1]} to a free port or 0"
        raise UserError(f"{config.host}:{config.port}: {error.strerror}", where=keys[1], hint=hint) from error


def address(listener: socket.socket) -> str:
    """Its URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Guarded(H11Protocol):
    """Closes a connection beyond the limit, one whose headers do not arrive in time, and one that is not read."""

    limits: ClassVar[GatewayConfig]
    late: asyncio.TimerHandle | None = None
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(TOO_MANY)
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_expecting()
        elif self.late is None and not self.transport.is_closing():
            self._expect_headers()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(NOT_HTTP)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = asyncio.get_running_loop().call_later(self.limits.idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self.unread is not None:
            self.unread.cancel()
        super().resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_expecting()
        if self.unread is not None:
            self.unread.cancel()
        super().connection_lost(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer outside the application, and close."""
        body = json.dumps(error.content).encode()
        headers = {"content-type": "application/json", "connection": "close", "content-length": len(body)}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (headers | error.headers).items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _expect_headers(self) -> None:
        self.late = asyncio.get_running_loop().call_later(self.limits.header_s, self.transport.close)

    def _stop_expecting(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket, config: GatewayConfig) -> AsyncIterator[None]:
    """Serve while the block runs; then no new request is taken, and those that are answered have `STOP_S` seconds."""
    settings = uvicorn.Config(
        app,
        http=type("Protocol", (Guarded,), {"limits": config}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(config.idle_s),
        timeout_graceful_shutdown=int(STOP_S),
    )
    server = uvicorn.Server(settings)
    server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # signals are the caller's
    task = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")
    try:
        async with asyncio.timeout(START_S):
            while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        try:
            async with asyncio.timeout(STOP_S + 5):
                await asyncio.gather(task, return_exceptions=True)
        finally:
            task.cancel()
            listener.close()
