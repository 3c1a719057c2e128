"""The client's side of training sessions, for programs that run an agent on a run's tasks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx2

from tidemill.core.errors import TidemillError

CALL_S = 60.0
"""Deadline of one call; opening a session is repeated until there is one."""
GONE_S = 30.0
"""A gateway that does not answer for so long has ended; a run that is resumed answers sooner."""


class AgentSession:
    """One episode of an agent: a context manager that ends the session, also when the agent fails.

    Attributes:
        key: API key of the agent's requests.
        base_url: address for an OpenAI client.
        task: `id`, `prompt`, `messages` and `metadata` of the task. With a chat template `prompt` is the text of the last
            of the messages.
    """

    def __init__(self, http: httpx2.Client, opened: dict[str, Any], base_url: str) -> None:
        self.id: str = opened["id"]
        self._http, self._path = http, f"/tidemill/sessions/{self.id}"
        self.key: str = opened["key"]
        self.task: dict[str, Any] = opened["task"]
        self.base_url = base_url

    def reward(self, value: float) -> None:
        """Give the whole session a reward, instead of the run's own. Raises TidemillError: it has ended."""
        _answer(self._http.post(f"{self._path}/reward", json={"value": value}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._http.post(f"{self._path}/end")


def sessions(
    url: str, *, key: str = "", task: str | None = None, group: str | None = None, start_s: float = 300.0
) -> Iterator[AgentSession]:
    """Sessions of a run one after the other, until the run has ended. Several threads or processes may each take some.

    Args:
        url: of the gateway, "http://127.0.0.1:8000".
        key: of a client, if the gateway has keys.
        task: only this task.
        group: a name; sessions of a task with the same name are of the same group.
        start_s: how long to wait for the first answer, while the run loads its model.

    Raises:
        TidemillError: the gateway refuses, or never answered.
    """
    base_url = f"{url.rstrip('/')}/v1"
    headers = {"authorization": f"Bearer {key}"} if key else {}
    wanted = {name: value for name, value in (("task", task), ("group", group)) if value is not None}
    answered, retry_key = False, uuid.uuid4().hex
    with httpx2.Client(base_url=base_url, headers=headers, timeout=CALL_S) as http:
        until_s = time.monotonic() + start_s
        while time.monotonic() < until_s:
            try:
                answer = http.post("/tidemill/sessions", json=wanted, headers={"idempotency-key": retry_key})
            except httpx2.TransportError:
                time.sleep(0.5)
                continue
            answered = True
            if answer.status_code == 503:  # the run stops, or has been resumed
                time.sleep(1.0)
                continue
            if answer.status_code == 429:  # no sample needed a session for a while
                until_s = time.monotonic() + GONE_S
                continue
            retry_key = uuid.uuid4().hex
            yield AgentSession(http, _answer(answer), base_url)
            until_s = time.monotonic() + GONE_S
    if not answered:
        raise TidemillError(f"nothing answers at {url}: start the run with gateway.sessions = true")


def _answer(answer: httpx2.Response) -> dict[str, Any]:
    """Raises TidemillError: the gateway refuses."""
    if answer.status_code >= 400:
        raise TidemillError(f"{answer.url}: {answer.json()['error']['message']}")
    found: dict[str, Any] = answer.json()
    return found
