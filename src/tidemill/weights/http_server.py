"""Serves published blobs over HTTP: `GET /v1/blobs/NAME`, with a bearer token and, if wanted, a range of bytes."""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
import threading
from collections.abc import AsyncIterator, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.core.errors import UserError
from tidemill.weights.snapshot import Blob, BlobsInMemory

PIECE_BYTES = 1 << 20
STOP_S = 5.0
MOST_CONNECTIONS = 4096
"""A reader opens up to four."""
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class HttpTransport(BlobsInMemory):
    """Implements `weights.snapshot.Transport` for the publisher: blobs in memory, and a server for its readers.

    Args:
        host: address to listen on.
        port: 0: a free one.
        token: what readers must present.

    Raises:
        UserError: the address cannot be used.
    """

    zero_copy = False

    def __init__(self, host: str, port: int, token: str) -> None:
        super().__init__()
        try:
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            hint = "set weights.host to an address of this machine, and weights.port to a free port or 0"
            raise UserError(f"{host}:{port}: {error.strerror}", where="weights.host", hint=hint) from error
        self.port: int = listener.getsockname()[1]
        config = uvicorn.Config(
            blob_app(self.blobs, token),
            log_level="error",
            access_log=False,
            lifespan="off",
            limit_concurrency=MOST_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="weights-http", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop the server; transfers that run end within `STOP_S`."""
        await super().close()
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, STOP_S)
        self._server.force_exit = True

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            asyncio.run(self._server.serve(sockets=[listener]))


def blob_app(blobs: Mapping[str, Blob], token: str) -> Starlette:
    """An application that serves `blobs` to whoever presents the token."""

    async def blob(request: Request) -> Response:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return PlainTextResponse("wrong or missing token\n", status_code=401)
        found = blobs.get(request.path_params["name"])
        if found is None:
            return PlainTextResponse("there is no such blob\n", status_code=404)
        wanted = request.headers.get("range")
        if wanted is None:
            return _answer(found, 0, len(found), 200)
        match = RANGE.fullmatch(wanted)
        start, end = (int(match[1]), min(int(match[2]) + 1, len(found))) if match else (0, 0)
        if start >= end:
            return PlainTextResponse(f"not a range of {len(found)} bytes\n", status_code=416)
        return _answer(found, start, end, 206)

    return Starlette(routes=[Route("/v1/blobs/{name}", blob)])


def _answer(blob: Blob, start: int, end: int, status: int) -> Response:
    headers = {"content-length": str(end - start), "accept-ranges": "bytes"}
    if status == 206:
        headers["content-range"] = f"bytes {start}-{end - 1}/{len(blob)}"
    return StreamingResponse(
        _pieces(blob, start, end), status_code=status, headers=headers, media_type="application/octet-stream"
    )


async def _pieces(blob: Blob, start: int, end: int) -> AsyncIterator[bytes]:
    for at in range(start, end, PIECE_BYTES):
        yield blob[at : min(at + PIECE_BYTES, end)].tobytes()
