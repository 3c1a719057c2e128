"""The routes of training sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tidemill.gateway.access import unless_left
from tidemill.gateway.errors import AUTHENTICATION, ApiError
from tidemill.gateway.requests import decode_body
from tidemill.gateway.session import Session
from tidemill.gateway.sessions import Sessions

PATH = "/v1/tidemill/sessions"
LARGEST_REWARD, MOST_TURNS = 1e6, 1 << 20
Handler = Callable[[Request, str], Awaitable[Response]]


class OpenBody(msgspec.Struct):
    task: str | None = None
    group: str | None = None
    metadata: dict[str, Any] = {}


class RewardBody(msgspec.Struct):
    value: Annotated[float, msgspec.Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
    turn: Annotated[int, msgspec.Meta(ge=0, le=MOST_TURNS)] | None = None


class EndBody(msgspec.Struct):
    failed: bool = False


def session_routes(
    sessions: Sessions,
    body_of: Callable[[Request], Awaitable[dict[str, Any]]],
    guarded: Callable[[Handler], Callable[[Request], Awaitable[Response]]],
) -> list[Route]:
    """Routes to open, see, reward and end sessions.

    Args:
        body_of: reads a body within the gateway's limits.
        guarded: checks keys and limits, and answers errors.
    """

    async def opened(request: Request, key: str) -> Response:
        if sessions.find(key) is not None:
            raise ApiError(403, "a session's key opens no other session", code="forbidden")
        body = decode_body(await body_of(request), OpenBody)
        opening = sessions.open(body.task, body.group, body.metadata, request.headers.get("idempotency-key", ""))
        session = await unless_left(request, opening)
        prompt = session.prompt
        about = {
            "id": prompt.prompt_id,
            "prompt": prompt.messages[-1].content if prompt.messages else prompt.text,
            "messages": [{"role": each.role, "content": each.content} for each in prompt.messages],
            "metadata": prompt.metadata,
        }
        return JSONResponse({**sessions.about(session), "key": session.key, "task": about})

    def route(action: str, kind: Any, act: Callable[[Session, Any], None] = lambda *_: None) -> Route:
        """A route that does something with a session, given a body of a kind, and answers with the session."""

        async def handle(request: Request, key: str) -> Response:
            session = sessions.named(request.path_params["name"])
            if sessions.find(key) not in (None, session):
                raise ApiError(403, "this is another session's key", kind=AUTHENTICATION, code="forbidden")
            if kind is not None:
                act(session, decode_body(await body_of(request), kind))
            return JSONResponse(sessions.about(session))

        return Route(f"{PATH}/{{name}}{action}", guarded(handle), methods=["GET" if kind is None else "POST"])

    return [
        Route(PATH, guarded(opened), methods=["POST"]),
        route("", None),
        route("/reward", RewardBody, lambda session, body: sessions.give_reward(session, body.value, body.turn)),
        route("/end", EndBody, lambda session, body: sessions.end(session, failed=body.failed)),
    ]
