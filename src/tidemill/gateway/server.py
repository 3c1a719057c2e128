"""The HTTP server: one listener, with deadlines for headers and idle connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidemill.config.gateway import GatewayConfig
from tidemill.core.errors import UserError

STOP_S = 30.0
START_S = 10.0


def listen(config: GatewayConfig) -> socket.socket:
    """Raises UserError: the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=config.connections)
    except OSError as error:
        hint = "set gateway.host to an address of this machine, and gateway.port to a free port or 0"
        raise UserError(f"{config.host}:{config.port}: {error.strerror}", where="gateway.port", hint=hint) from error


@asynccontextmanager
async def serving(app: Starlette, listener: socket.socket, config: GatewayConfig) -> AsyncIterator[None]:
    """Serve while the block runs; then no new request is taken, and those that are answered have `STOP_S` seconds."""

    class Protocol(H11Protocol):
        """Closes a connection whose first headers do not arrive in time."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.late = asyncio.get_running_loop().call_later(config.header_s, self._close_if_silent)

        def _close_if_silent(self) -> None:
            cycle: Any = self.cycle  # of a request whose headers have arrived
            if cycle is None:
                self.transport.close()

        def connection_lost(self, error: Exception | None) -> None:
            self.late.cancel()
            super().connection_lost(error)

    settings = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=int(config.idle_s),
        timeout_graceful_shutdown=int(STOP_S),
        limit_concurrency=config.connections,
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
