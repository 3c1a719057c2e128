"""The routes of `tidemill watch`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.dashboard.access import ASSETS, refusal
from tidemill.dashboard.runs import WatchedFolder, WatchedRun
from tidemill.dashboard.stream import Stream
from tidemill.gateway.access import body_of
from tidemill.gateway.errors import ApiError, invalid
from tidemill.guard.checks import CheckQueue, shown_parts
from tidemill.guard.verdicts import SampleKey, sample_key
from tidemill.telemetry.control import CONTROL, HOLD_S, Action, ControlFolder, new_request
from tidemill.telemetry.openmetrics import MEDIA_TYPE, exposition
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.report.pages import HERE, render_page
from tidemill.telemetry.report.sections import SECTIONS, run_page, section
from tidemill.telemetry.run_reader import RunReader

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

BODY_BYTES, BODY_S = 4096, 5.0
"""Largest body of a request, and the time in which it must arrive."""
LONGEST_HOLD_S = 7 * 86400.0
ASSET_FILES = {
    "report.css": "text/css",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "fleet.js": "text/javascript",
    "samples.js": "text/javascript",
    "runs.js": "text/javascript",
    "check.js": "text/javascript",
    "door.js": "text/javascript",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}
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
        rows = await asyncio.to_thread(self._folder.rows)
        values = {"rows": rows, "folder": str(self._folder.root), "summary": counted(len(rows), "run")}
        return HTMLResponse(render_page(HERE / "templates/runs.html.j2", **values))
