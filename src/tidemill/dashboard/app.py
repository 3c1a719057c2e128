"""The routes of `tidemill watch`."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.core.errors import UserError
from tidemill.core.formatting import dollars
from tidemill.core.records import Record
from tidemill.dashboard.access import ASSETS, refusal
from tidemill.dashboard.runs import WatchedFolder, WatchedRun
from tidemill.dashboard.stream import Stream
from tidemill.gateway.access import LOG, body_of
from tidemill.gateway.errors import ApiError, invalid
from tidemill.guard.checks import CheckQueue, shown_parts
from tidemill.guard.verdicts import SampleKey, sample_key
from tidemill.telemetry.comparison import MOST as MOST_COMPARED
from tidemill.telemetry.comparison import check_number, comparison_json
from tidemill.telemetry.control import CONTROL, HOLD_S, Action, ControlFolder, new_request
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.openmetrics import MEDIA_TYPE, exposition
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.report.compare import SCRIPTS as COMPARE_SCRIPTS
from tidemill.telemetry.report.compare import compare_page
from tidemill.telemetry.report.pages import HERE, render_page
from tidemill.telemetry.report.sample_pages import group_section, sample_section, samples_section
from tidemill.telemetry.report.sections import SCRIPTS, SECTIONS, STYLES, TEMPLATES, fleet_data, run_page, section
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import TRAINING_PURPOSE
from tidemill.telemetry.run_reader import RunReader
from tidemill.telemetry.sample_index import SampleQuery

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

BODY_BYTES, BODY_S = 4096, 5.0
"""Largest body of a request, and the time in which it must arrive."""
LONGEST_HOLD_S = 7 * 86400.0
FEWEST_POINTS = 2
WHOLE = re.compile(r"[0-9]{1,12}")
OWN_ASSETS = (
    "templates/samples.js",
    "templates/samples.css",
    "templates/runs.js",
    "templates/check.js",
    "templates/door.js",
)
ASSETS_BY_NAME = {Path(name).name: HERE / name for name in (*SCRIPTS, *STYLES, *COMPARE_SCRIPTS, *OWN_ASSETS)}
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}
RUNNING = ("running", "paused", "stalled", "waiting")
"""States of a run with a process that takes requests."""
SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ControlBody(Record, forbid_unknown_fields=True):
    """What a page sends to a run."""

    action: Action
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_HOLD_S)] = HOLD_S


class VerdictBody(Record, forbid_unknown_fields=True):
    """A verdict on a sample of the queue; without a score it is asked for last."""

    sample: SampleKey
    score: Annotated[float, msgspec.Meta(ge=0, le=1)] | None


class Dashboard:
    """The pages of a run or of the runs below a folder.

    Args:
        folder: raises UserError if nothing can be watched there.
    """

    def __init__(self, folder: WatchedFolder) -> None:
        self._folder, self.stream = folder, Stream(folder)
        self._queues = asyncio.Lock()

    def app(self) -> Starlette:
        """The application, without checks of who asks (`access.py`)."""
        run = "/run/{key}"
        reads: dict[str, Handler] = {
            "/": self._runs,
            "/compare": self._compare,
            "/compare.json": self._compare_json,
            ASSETS + "{name}": self._asset,
            "/metrics": self._metrics,
            "/events": self._events,
            run: self._run_address,
            f"{run}/": self._run_page,
            f"{run}/section/{{name}}": self._section,
            f"{run}/charts.json": self._charts,
            f"{run}/fleet.json": self._fleet,
            f"{run}/samples": self._samples,
            f"{run}/group": self._group,
            f"{run}/sample": self._sample,
            f"{run}/check": self._check,
        }
        acts: dict[str, Handler] = {f"{run}/control": self._control, f"{run}/verdict": self._verdict}
        app = Starlette(
            routes=[
                *(Route(path, _answering(handler), methods=["GET"]) for path, handler in reads.items()),
                *(Route(path, _answering(handler), methods=["POST"]) for path, handler in acts.items()),
            ],
            exception_handlers={404: _no_route, 405: _no_route},
        )
        app.router.redirect_slashes = False  # its answer would contain the host that the client sent
        return app

    # Pages.

    async def _runs(self, request: Request) -> Response:
        if self._folder.single:
            return RedirectResponse(f"/run/{self._folder.single}/", 303)
        rows = await self._folder.rows()
        shown = [
            msgspec.structs.asdict(row)
            | {
                "place": row.path.relative_to(self._folder.root).as_posix(),
                "curve": _curve(row.sparkline),
                "cost": dollars(row.cost_usd) if row.cost_usd else "",
            }
            for row in rows
        ]
        pipelines = {row.pipeline for row in rows}
        values = {"rows": shown, "folder": str(self._folder.root), "pipelines": pipelines, "most": MOST_COMPARED}
        return HTMLResponse(render_page(TEMPLATES / "runs.html.j2", **values))

    async def _run_address(self, request: Request) -> Response:
        return RedirectResponse(f"/run/{(await self._run(request)).key}/", 308)

    async def _run_page(self, request: Request) -> Response:
        run = await self._run(request)
        return HTMLResponse(await run.read(lambda reader: _page(reader, run.key)))

    async def _section(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in SECTIONS:
            raise ApiError(404, "there is no such section", code="unknown_section")
        run = await self._run(request)
        return HTMLResponse(await run.read(lambda reader: _section(reader, name, run)))

    async def _samples(self, request: Request) -> Response:
        run, query = await self._run(request), SampleQuery.of_url(request.query_params)
        return HTMLResponse(await run.read(lambda reader: samples_section(reader.data, run.samples(), query)))

    async def _group(self, request: Request) -> Response:
        run, place = await self._run(request), _place(request)
        return HTMLResponse(await run.read(lambda reader: group_section(reader.data, run.samples(), **place)))

    async def _sample(self, request: Request) -> Response:
        run, place, number = await self._run(request), _place(request), _whole(request, "index")
        show = partial(sample_section, number=number, **place)
        return HTMLResponse(await run.read(lambda reader: show(reader.data, run.samples())))

    async def _check(self, request: Request) -> Response:
        run = await self._run(request)
        queue = await self._queue(run)
        waiting = await asyncio.to_thread(queue.waiting)
        sample = waiting[0] if waiting else None
        values = {
            "key": run.key,
            "run": run.path.name,
            "sample": sample,
            "identity": sample and json.dumps(sample_key(sample)),
            "parts": shown_parts(sample) if sample else (),
            "judged": queue.judged,
            "waiting": len(waiting),
        }
        return HTMLResponse(render_page(TEMPLATES / "check.html.j2", **values))

    async def _compare(self, request: Request) -> Response:
        return HTMLResponse(await self._compared(request, partial(compare_page, live=True)))

    # Data.

    async def _charts(self, request: Request) -> Response:
        after = _whole(request, "after") if "after" in request.query_params else None
        cursor, run = request.query_params.get("cursor", ""), await self._run(request)
        return _json(await run.read(lambda reader: chart_data(reader.data, after=after, cursor=cursor)))

    async def _fleet(self, request: Request) -> Response:
        run = await self._run(request)
        return _json(await run.read(lambda reader: fleet_data(reader.data)))

    async def _compare_json(self, request: Request) -> Response:
        return _json(await self._compared(request, comparison_json))

    async def _metrics(self, request: Request) -> Response:
        return Response(exposition(await self._folder.figures()), media_type=MEDIA_TYPE)

    async def _events(self, request: Request) -> Response:
        key = request.query_params.get("run")
        run = None if key is None else await self._folder.run(key)
        messages = await self.stream.listen(run, request.headers.get("last-event-id", ""))
        return StreamingResponse(messages, media_type="text/event-stream", headers=SSE_HEADERS)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS_BY_NAME:
            raise ApiError(404, "there is no such file", code="unknown_asset")
        path = ASSETS_BY_NAME[name]
        headers = {"cache-control": "no-cache"}  # another version may be installed
        return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=headers)

    # Actions.

    async def _control(self, request: Request) -> Response:
        asked = await _body(request, ControlBody)
        run = await self._run(request)
        return _json(await run.read(lambda reader: _write_request(reader, asked)), status=202)

    async def _verdict(self, request: Request) -> Response:
        given = await _body(request, VerdictBody)
        run = await self._run(request)
        queue = await self._queue(run)
        sample = queue.find(given.sample)
        if sample is None:
            raise ApiError(404, "this sample is not in the queue; load the next one", code="unknown_sample")
        if given.score is None:
            queue.skip(sample)
        else:
            _refuse_link(run.path / "checks")
            await asyncio.to_thread(queue.judge, sample, given.score)
        return _json({"reward": sample.reward, "judged": queue.judged})

    # What they share.

    async def _run(self, request: Request) -> WatchedRun:
        return await self._folder.run(request.path_params["key"])

    async def _queue(self, run: WatchedRun) -> CheckQueue:
        """The run's queue; a new one when all its samples are judged or the run has new samples."""
        async with self._queues:
            if run.checks is None or not run.checks.waiting():
                run.checks = await asyncio.to_thread(lambda: CheckQueue(run.path, warn=LOG.warning))
            return run.checks

    async def _compared(self, request: Request, work: Callable[[Sequence[RunData]], T]) -> T:
        """Raises ApiError: these runs cannot be compared."""
        runs = [await self._folder.run(key) for key in request.query_params.getlist("run")[: MOST_COMPARED + 1]]
        check_number([run.path for run in runs])
        for run in runs:
            await run.refresh()
        async with AsyncExitStack() as stack:
            for run in sorted(runs, key=lambda run: run.key):
                await stack.enter_async_context(run.lock)
            return await asyncio.to_thread(lambda: work([run.data for run in runs]))


def _curve(values: Sequence[float]) -> str:
    """The points of a sparkline of 100 by 24."""
    if len(values) < FEWEST_POINTS:
        return ""
    low, high = min(values), max(values)
    height, width = 20 / (high - low) if high > low else 0, 98 / (len(values) - 1)
    return " ".join(f"{1 + at * width:.1f},{22 - (value - low) * height:.1f}" for at, value in enumerate(values))


def _page(reader: RunReader, key: str) -> str:
    return run_page(reader.data, state=reader.state, live=reader.live, mode="live", key=key, can_act=True)


def _section(reader: RunReader, name: str, run: WatchedRun) -> str:
    index = run.samples() if name == "samples" else None
    return section(reader.data, name, state=reader.state, live=reader.live, index=index)


def _write_request(reader: RunReader, asked: ControlBody) -> dict[str, Any]:
    """Raises ApiError: nobody would read the request."""
    path, state, live = reader.path, reader.state, reader.live
    if state.name not in RUNNING:
        again = f"`tidemill resume {shlex.quote(str(path))}` starts it again"
        hint = "it has no step left" if state.name == "finished" else again
        raise ApiError(409, f"{state.text.rstrip('.')}, so it takes no requests; {hint}", code="not_running")
    if live is None or live.session != max(reader.data.sessions, default=0):
        raise ApiError(409, "the run takes no requests: it has just started, or is of another version", code="deaf")
    _refuse_link(path / CONTROL)
    hold_s = asked.hold_s
    request = new_request(asked.action, run_id=live.run_id, session=live.session, by="watch", hold_s=hold_s)
    ControlFolder(path).write(request)
    return {"request": request.request_id, "action": asked.action}


def _refuse_link(folder: Path) -> None:
    """Raises ApiError: what is written would go elsewhere."""
    if folder.is_symlink():
        raise ApiError(409, f"{folder.name} of this run is a link; nothing is written there", code="link")


async def _body(request: Request, kind: type[T]) -> T:
    """Raises ApiError: the body is not such a document."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body as application/json", param="content-type", code="unsupported_type")
    raw = await body_of(request, most_bytes=BODY_BYTES, timeout_s=BODY_S)
    request.state.read = True
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not as expected: {error}") from error


def _whole(request: Request, name: str) -> int:
    """A parameter that is a whole number. Raises ApiError: it is none."""
    text = request.query_params.get(name, "0")
    if not WHOLE.fullmatch(text):
        raise invalid(f"{name} is not a whole number", name)
    return int(text)


def _place(request: Request) -> dict[str, Any]:
    """The group that a request is about."""
    given = request.query_params
    about = {"step": _whole(request, "step"), "epoch": _whole(request, "epoch"), "prompt_id": given.get("prompt", "")}
    return about | {"purpose": given.get("purpose", TRAINING_PURPOSE)}


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


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
            return refusal(request, ApiError(409, f"cannot be read: {error}", code="unreadable"))

    return answering


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return refusal(request, ApiError(status, "there is no such page here", code="not_found"))
