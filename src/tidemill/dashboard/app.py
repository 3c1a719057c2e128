"""The routes of `tidemill watch`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.dashboard.access import refusal
from tidemill.dashboard.runs import WatchedFolder, WatchedRun
from tidemill.dashboard.stream import Stream
from tidemill.gateway.access import body_of
from tidemill.gateway.errors import ApiError, invalid
from tidemill.guard.checks import shown_parts
from tidemill.guard.verdicts import SampleKey, sample_key
from tidemill.telemetry.comparison import MOST as MOST_COMPARED
from tidemill.telemetry.comparison import check_number
from tidemill.telemetry.control import CONTROL, HOLD_S, Action, ControlFolder, new_request
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.openmetrics import MEDIA_TYPE, exposition
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.report.compare import compare_page
from tidemill.telemetry.report.pages import ASSETS, TEMPLATES, render_page
from tidemill.telemetry.report.sample_pages import samples_view
from tidemill.telemetry.report.sections import ALL_SECTIONS, fleet_data, run_page, section
from tidemill.telemetry.run_reader import RunReader
from tidemill.telemetry.run_state import resume_command

Asked: TypeAlias = Mapping[str, str]
"""Parameters of a request."""
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
View: TypeAlias = Callable[[WatchedRun, RunReader, Asked], "str | dict[str, Any]"]
"""HTML or JSON about a run, for threads that have its lock."""

COMPRESSED_BYTES = 10_000
BODY_BYTES, BODY_S = 4096, 5.0
"""Largest body of a request, and the time in which it must arrive."""
LONGEST_HOLD_S = 7 * 86400.0
WHOLE = re.compile(r"[0-9]{1,12}")
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}
RUNNING = ("running", "paused", "stalled", "waiting")
"""States of a run with a process that takes requests."""


class ControlBody(Record, forbid_unknown_fields=True):
    """What a page sends to a run."""

    action: Action
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_HOLD_S)] = HOLD_S


class VerdictBody(Record, forbid_unknown_fields=True):
    """A verdict on a sample of the queue; without a score it is asked for last."""

    sample: SampleKey
    score: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


class Dashboard:
    """The pages of a run or of the runs below a folder."""

    def __init__(self, folder: WatchedFolder) -> None:
        self._folder, self.stream = folder, Stream()

    def app(self) -> Starlette:
        """The application, without checks of who asks (`access.py`)."""
        run = "/run/{key}"
        gets: dict[str, Handler] = {
            "/": self._runs,
            "/compare": self._compare,
            "/assets/{name}": self._asset,
            "/metrics": self._metrics,
            "/events": self._events,
            run: self._run_address,
            **{f"{run}/{path}": partial(self._view, view=view) for path, view in VIEWS.items()},
        }
        posts: dict[str, Handler] = {
            f"{run}/control": partial(self._act, kind=ControlBody, work=_ask),
            f"{run}/verdict": partial(self._act, kind=VerdictBody, work=_judge),
        }
        app = Starlette(
            routes=[
                *(Route(path, _answering(handler), methods=["GET"]) for path, handler in gets.items()),
                *(Route(path, _answering(handler), methods=["POST"]) for path, handler in posts.items()),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=COMPRESSED_BYTES, compresslevel=4)],
            exception_handlers={404: _no_route, 405: _no_route},
        )
        app.router.redirect_slashes = False  # its answer would contain the host that the client sent
        return app

    async def _view(self, request: Request, *, view: View) -> Response:
        run = await self._folder.run(request.path_params["key"])
        return _shown(await run.read(lambda reader: view(run, reader, request.query_params)))

    async def _act(self, request: Request, *, kind: type[Any], work: Callable[..., dict[str, Any]]) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the body as application/json", param="content-type", code="unsupported_type")
        raw = await body_of(request, most_bytes=BODY_BYTES, timeout_s=BODY_S)
        try:
            given = msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not as expected: {error}") from error
        run = await self._folder.run(request.path_params["key"])
        return _shown(await run.read(lambda reader: work(run, reader, given)))

    async def _runs(self, request: Request) -> Response:
        if self._folder.single:
            return RedirectResponse(f"/run/{self._folder.single}/", 303)
        rows = await self._folder.rows()
        shown = [(row, row.path.relative_to(self._folder.root).as_posix(), _curve(row.sparkline)) for row in rows]
        values = {"rows": shown, "pipelines": {row.pipeline for row in rows}, "most": MOST_COMPARED}
        return _shown(render_page(TEMPLATES / "runs.html.j2", folder=str(self._folder.root), **values))

    async def _run_address(self, request: Request) -> Response:
        return RedirectResponse(f"/run/{(await self._folder.run(request.path_params['key'])).key}/", 308)

    async def _compare(self, request: Request) -> Response:
        runs = [await self._folder.run(key) for key in request.query_params.getlist("run")[: MOST_COMPARED + 1]]
        check_number([run.path for run in runs])
        async with AsyncExitStack() as stack:
            for run in sorted(runs, key=lambda run: run.key):
                await stack.enter_async_context(run.lock)
            return _shown(
                await asyncio.to_thread(lambda: compare_page([run.refresh().data for run in runs], live=True))
            )

    async def _metrics(self, request: Request) -> Response:
        return Response(exposition(await self._folder.figures()), media_type=MEDIA_TYPE)

    async def _events(self, request: Request) -> Response:
        key = request.query_params.get("run")
        watched = self._folder if key is None else await self._folder.run(key)
        messages = await self.stream.listen(watched)
        return StreamingResponse(messages, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _asset(self, request: Request) -> Response:
        path = ASSETS.get(request.path_params["name"])
        if path is None:
            raise ApiError(404, "there is no such file", code="unknown_asset")
        headers = {"cache-control": "no-cache"}  # another version may be installed
        return Response(path.read_bytes(), media_type=MEDIA_TYPES.get(path.suffix, "text/plain"), headers=headers)


def _page(run: WatchedRun, reader: RunReader, asked: Asked) -> str:
    return run_page(reader.data, state=reader.state, live=reader.live, key=run.key)


def _section(run: WatchedRun, reader: RunReader, asked: Asked, *, name: str) -> str:
    index = run.samples() if name == "samples" else None
    return section(reader.data, name, state=reader.state, live=reader.live, index=index)


def _charts(run: WatchedRun, reader: RunReader, asked: Asked) -> dict[str, Any]:
    after = asked.get("after", "")
    return chart_data(reader.data, after=int(after) if WHOLE.fullmatch(after) else None, cursor=asked.get("cursor", ""))


def _samples(run: WatchedRun, reader: RunReader, asked: Asked, *, view: str) -> str:
    return samples_view(reader.data, run.samples(), view, asked)


def _check(run: WatchedRun, reader: RunReader, asked: Asked) -> str:
    queue = run.checks()
    waiting = queue.waiting()
    sample = waiting[0] if waiting else None
    return render_page(
        TEMPLATES / "check.html.j2",
        key=run.key,
        run=reader.data.name,
        sample=sample,
        identity=sample and json.dumps(sample_key(sample)),
        parts=shown_parts(sample) if sample else (),
        judged=queue.judged,
        waiting=len(waiting),
    )


VIEWS: dict[str, View] = {
    "": _page,
    **{f"section/{name}": partial(_section, name=name) for name in ALL_SECTIONS},
    "charts.json": _charts,
    "fleet.json": lambda run, reader, asked: fleet_data(reader.data),
    **{view: partial(_samples, view=view) for view in ("samples", "group", "sample")},
    "check": _check,
}


def _ask(run: WatchedRun, reader: RunReader, given: ControlBody) -> dict[str, Any]:
    """Write a request to a run. Raises ApiError: nobody would read it."""
    path, state, live = run.path, reader.state, reader.live
    if state.name not in RUNNING:
        again = f"`{resume_command(path)}` starts it again"
        hint = "it has no step left" if state.name == "finished" else again
        raise ApiError(409, f"the run takes no requests ({state.name}): {hint}", code="not_running")
    if live is None or live.session != max(reader.data.sessions, default=0):
        raise ApiError(409, "the run takes no requests: it has just started, or is of another version", code="deaf")
    _refuse_link(path / CONTROL)
    request = new_request(given.action, run_id=live.run_id, session=live.session, by="watch", hold_s=given.hold_s)
    ControlFolder(path).write(request)
    return {"request": request.request_id, "action": given.action}


def _judge(run: WatchedRun, reader: RunReader, given: VerdictBody) -> dict[str, Any]:
    """Store a verdict. Raises ApiError: its sample is not in the queue."""
    queue = run.checks()
    sample = queue.find(given.sample)
    if sample is None:
        raise ApiError(404, "this sample is not in the queue; load the next one", code="unknown_sample")
    if given.score is None:
        queue.skip(sample)
    else:
        _refuse_link(run.path / "checks")
        queue.judge(sample, given.score)
    return {"reward": sample.reward, "judged": queue.judged}


def _refuse_link(folder: Path) -> None:
    """Raises ApiError: what is written would go elsewhere."""
    if folder.is_symlink():
        raise ApiError(409, f"{folder.name} of this run is a link; nothing is written there", code="link")


def _curve(values: Sequence[float]) -> str:
    """The points of a sparkline of 100 by 24; empty for a single value."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    height, width = 20 / (high - low) if high > low else 0, 98 / max(len(values) - 1, 1)
    points = [f"{1 + at * width:.1f},{22 - (value - low) * height:.1f}" for at, value in enumerate(values)]
    return " ".join(points) if points[1:] else ""


def _shown(value: str | dict[str, Any]) -> Response:
    return HTMLResponse(value) if isinstance(value, str) else Response(encode(value), media_type="application/json")


def _answering(handler: Handler) -> Handler:
    """The handler, whose errors are answers."""

    async def answering(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return refusal(request, error)
        except FileNotFoundError:
            return refusal(request, ApiError(404, "this run was deleted", code="gone"))
        except (UserError, OSError) as error:
            return refusal(request, ApiError(409, str(error), code="unreadable"))

    return answering


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return refusal(request, ApiError(status, "there is no such page here", code="not_found"))
