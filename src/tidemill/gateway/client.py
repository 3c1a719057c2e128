"""The client's side of training sessions, for programs that run an agent on a run's tasks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx2

from tidemill.core.errors import TidemillError

CALL_S = 60.0
"""Deadline of one call; opening a session is repeated until there is one."""
GONE_S = 30.0
"""A gateway that does not answer for so long has ended; a run that is resumed answers sooner."""
PAUSE_S = 0.5


class AgentSession:
    """One episode of an agent: a context manager that ends the session. If the agent raises, the session is left out of
    its group, because an error of a program or a network is no lesson for the model.

    Attributes:
        id: of the session.
        key: API key of the agent's requests.
        base_url: address for an OpenAI client.
        task: `id`, `prompt`, `messages` and `metadata` of the task. With a chat template `prompt` is the last message.
    """

    def __init__(self, gateway: _Gateway, opened: dict[str, Any]) -> None:
        self._gateway, self._path = gateway, f"/tidemill/sessions/{opened['id']}"
        self.id: str = opened["id"]
        self.key: str = opened["key"]
        self.task: dict[str, Any] = opened["task"]
        self.base_url = gateway.base_url

    def reward(self, value: float, *, turn: int | None = None) -> None:
        """Give the whole session a reward instead of the run's own, or one of its turns, the first of which is 0.

        Raises:
            TidemillError: the session has ended, or the gateway is gone.
        """
        _found(self._gateway.call(f"{self._path}/reward", {"value": value, "turn": turn}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with contextlib.suppress(TidemillError):  # it has ended with its run
            self._gateway.call(f"{self._path}/end", {"failed": error is not None})


class _Gateway:
    def __init__(self, http: httpx2.Client, url: str) -> None:
        self._http, self._url = http, url
        self.base_url = f"{url.rstrip('/')}/v1"

    def call(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        wait_s: float = GONE_S,
    ) -> httpx2.Response:
        """Its answer; the call is repeated while the run is not there, or is being resumed.

        Raises:
            TidemillError: nothing answered within `wait_s`.
        """
        until_s = time.monotonic() + wait_s
        while True:
            with contextlib.suppress(httpx2.TransportError):
                answer = self._http.post(self.base_url + path, json=body, headers=headers)
                if answer.status_code != 503:
                    return answer
            if time.monotonic() > until_s:
                raise TidemillError(f"nothing answers at {self._url}: start the run with gateway.sessions = true")
            time.sleep(PAUSE_S)


def sessions(
    url: str, *, key: str = "", task: str | None = None, group: str | None = None, start_s: float = 300.0
) -> Iterator[AgentSession]:
    """Sessions of a run one after the other, until the run has finished. Several threads or processes may each take
    some.

    Args:
        url: of the gateway, "http://127.0.0.1:8000".
        key: of a client, if the gateway has keys.
        task: only this task.
        group: a name; sessions of a task with the same name are of the same group.
        start_s: how long to wait for the first answer, while the run loads its model.

    Raises:
        TidemillError: the gateway refuses, or never answered.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    wanted = {name: value for name, value in (("task", task), ("group", group)) if value is not None}
    retry_key, answered = uuid.uuid4().hex, False
    with httpx2.Client(headers=headers, timeout=CALL_S) as http:
        gateway = _Gateway(http, url)
        while True:
            try:
                answer = gateway.call(
                    "/tidemill/sessions",
                    wanted,
                    headers={"idempotency-key": retry_key},
                    wait_s=GONE_S if answered else start_s,
                )
            except TidemillError:
                if not answered:
                    raise
                return  # the run was stopped
            answered = True
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else ""
            if code == "run_finished":
                return
            if code == "rate_limit_exceeded":
                time.sleep(PAUSE_S)
            if answer.status_code != 429:
                retry_key = uuid.uuid4().hex
                yield AgentSession(gateway, _found(answer))


def _found(answer: httpx2.Response) -> dict[str, Any]:
    """Raises TidemillError: the gateway refuses."""
    if answer.status_code >= 400:
        raise TidemillError(f"{answer.url}: {answer.json()['error']['message']}")
    found: dict[str, Any] = answer.json()
    return found
