"""Who may read and act, and the headers of every answer."""

from __future__ import annotations

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.gateway.access import LOG, Keys, discard_body, refuse_repeated
from tidemill.gateway.errors import ApiError
from tidemill.telemetry.report.pages import TEMPLATES, render_page

READ, ACT = RIGHTS = ("read", "act")
ASSETS = "/assets/"
"""Files of this package without data, which a page loads before it can send a token."""
FRAMES = "'self' http://localhost:* http://127.0.0.1:* vscode-webview:"
"""Pages that may show ours in a frame, if any may: notebooks on this machine."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors "
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Access:
    """Checks each request before the application gets it.

    Args:
        token_file: of mode 600, with lines `read TOKEN` and `act TOKEN`; one that may act may read, too. Without it
            every program of this machine may read and act, and no page of another site.
        where: the setting that names the file, for errors.
        framed: notebooks may show the pages.

    Raises:
        UserError: the tokens cannot be used.
    """

    def __init__(self, app: ASGIApp, token_file: Path | None, *, where: str, framed: bool = False) -> None:
        self._app, self._keys = app, Keys(token_file, where=where, rights=RIGHTS)
        self._headers = HEADERS | {"content-security-policy": POLICY + (FRAMES if framed else "'none'")}
        self._public = token_file is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                headers.update(self._headers)
                headers.setdefault("cache-control", "no-store")
                if request.method not in ("GET", "HEAD") and not getattr(request.state, "read", False):
                    await discard_body(request)
                    headers["connection"] = "close"  # more of its body may follow
            await send(message)

        app: ASGIApp = self._app
        try:
            refuse_repeated(request)
            self._check(request)
        except ApiError as error:
            app = refusal(request, error)
        try:
            await app(scope, receive, with_headers)
        except Exception:  # noqa: BLE001 - one request's failure ends no other; the application has answered
            LOG.exception("%s %r failed", request.method, scope["path"])

    def _check(self, request: Request) -> None:
        """Raises ApiError: the client may not do this."""
        reads = request.method in ("GET", "HEAD")
        if not (self._public and request.scope["path"].startswith(ASSETS)):
            self._keys.check(request, READ if reads else ACT)
        if reads and request.headers.get("sec-fetch-mode") == "navigate":
            return  # a link on another page, which cannot read the answer
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise ApiError(403, "requests of other pages are not answered", code="forbidden_site")
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if (
            not reads
            and origin is not None
            and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}")
        ):
            raise ApiError(403, "requests of other pages are not answered", code="forbidden_origin")


def refusal(request: Request, error: ApiError) -> Response:
    """An error in the form that the client reads: a page for a person, which asks for a token where one is missing."""
    if "text/html" not in request.headers.get("accept", ""):
        return JSONResponse(error.content, status_code=error.status, headers=error.headers)
    if error.status == 401:
        return HTMLResponse(render_page(TEMPLATES / "door.html.j2"), 401, error.headers)
    return PlainTextResponse(f"{error.message}\n", error.status, error.headers)
