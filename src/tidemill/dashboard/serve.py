"""The server of `tidemill watch`, of notebooks, and of a run's own metrics."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.config.base import is_beyond_loopback
from tidemill.config.gateway import GatewayConfig
from tidemill.config.telemetry import TelemetryConfig
from tidemill.core.errors import DeadlineError, UserError
from tidemill.dashboard.access import Access
from tidemill.dashboard.app import Dashboard
from tidemill.dashboard.runs import WatchedFolder
from tidemill.gateway.server import address, listen, serving
from tidemill.telemetry.openmetrics import MEDIA_TYPE, exposition, run_figures
from tidemill.telemetry.run_reader import RunReader

PORT = 8300
PORTS_TRIED = 50
START_S = 20.0
LIMITS = GatewayConfig()
"""Of connections and deadlines."""


def listen_to_watchers(
    host: str, port: int | None, token_file: Path | None = None, *, keys: tuple[str, str] = ("--host", "--port")
) -> socket.socket:
    """Listen on a port; without one on the first free port from `PORT` on.

    Args:
        keys: names of host and port, for errors.

    Raises:
        UserError: the port or host cannot be used.
    """
    for tried in range(PORT, PORT + PORTS_TRIED) if port is None else ():
        try:
            return listen_to_watchers(host, tried, token_file)
        except UserError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    config = GatewayConfig(host=host, port=port or 0, token_file=token_file)
    return listen(config, keys=keys)


@asynccontextmanager
async def watching(
    folder: WatchedFolder, listener: socket.socket, *, token_file: Path | None, framed: bool = False
) -> AsyncIterator[str]:
    """Serve the pages while the block runs, and close the listener. Yields the URL.

    Raises:
        UserError: the tokens cannot be used.
    """
    dashboard = Dashboard(folder)
    with closing(listener):
        app = Access(dashboard.app(), token_file, where="--token-file", framed=framed)
        async with serving(app, listener, LIMITS):
            try:
                yield address(listener)
            finally:
                dashboard.stream.close()  # the server waits for open answers


async def watch(
    path: Path,
    *,
    host: str,
    port: int | None,
    token_file: Path | None,
    wait: bool,
    show: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        wait: for a run to appear.
        show: called with the URL.

    Raises:
        UserError: there is nothing to watch, or the address or the tokens cannot be used.
    """
    if is_beyond_loopback(host) and token_file is None:
        hint = "write lines `read TOKEN` and `act TOKEN` into a file of mode 600 and name it: --token-file FILE"
        raise UserError(f"{host} is open to other machines without tokens", where="--host", hint=hint)
    folder = WatchedFolder(path, wait=wait)
    listener = listen_to_watchers(host, port, token_file)
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        async with watching(folder, listener, token_file=token_file) as url:
            show(url)
            await ended.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def open_browser(url: str) -> None:
    """Show a page if this machine has a display, without waiting for it."""
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_display and not os.environ.get("SSH_CONNECTION"):
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


class BackgroundServer:
    """A server on a thread with a loop of its own.

    Args:
        serve: serves while its block runs; what it yields is the URL.

    Raises:
        Exception: of `serve`, before it yielded.
        DeadlineError: it did not start in time.
    """

    def __init__(self, serve: AbstractAsyncContextManager[str]) -> None:
        self._ended = asyncio.Event()
        started: Future[tuple[str, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=self._run, args=(serve, started), name="tidemill-server", daemon=True)
        self._thread.start()
        try:
            self.url, self._loop = started.result(START_S)
        except TimeoutError as error:
            raise DeadlineError("a server on this machine", waited_s=START_S, look_at="its load") from error

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(START_S)

    def _run(
        self, serve: AbstractAsyncContextManager[str], started: Future[tuple[str, asyncio.AbstractEventLoop]]
    ) -> None:
        async def life() -> None:
            async with serve as url:
                started.set_result((url, asyncio.get_running_loop()))
                await self._ended.wait()

        try:
            asyncio.run(life())
        except BaseException as error:  # noqa: BLE001 - raised where the server was started
            if not started.done():
                started.set_exception(error)


@asynccontextmanager
async def run_metrics(path: Path, config: TelemetryConfig) -> AsyncIterator[str]:
    """/metrics of the run that this process works on (`telemetry.port`). Yields the URL.

    Raises:
        UserError: the address or the tokens cannot be used.
    """
    reader, lock = RunReader(path), asyncio.Lock()

    def text() -> str:
        reader.refresh()
        return exposition(run_figures(path.name, reader.data, state=reader.state.name, live=reader.live))

    async def answer(request: Request) -> Response:
        async with lock:
            return Response(await asyncio.to_thread(text), media_type=MEDIA_TYPE)

    app = Access(Starlette(routes=[Route("/metrics", answer)]), config.token_file, where="telemetry.token_file")
    place = GatewayConfig(host=config.host, port=config.port or 0, token_file=config.token_file)
    listener = listen(place, keys=("telemetry.host", "telemetry.port"))
    async with serving(app, listener, LIMITS):
        yield f"{address(listener)}/metrics"
