"""Alerts: chosen events of a run, posted to webhooks from background threads. They never delay or end the run.

POST url   {"text": "demo: guard: the reward rises …", "run", "run_id", "event", "time", "fields": {...}}
2xx        accepted. No answer, 408, 425, 429 and 5xx: sent again after a pause. Another answer: given up.
"""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tidemill.config.addresses import server_url_issues
from tidemill.config.base import is_beyond_loopback
from tidemill.config.telemetry import AlertConfig
from tidemill.core.credentials import secret_of
from tidemill.core.errors import UserError
from tidemill.telemetry.events import event_text, timestamp
from tidemill.telemetry.jsonl import encode

QUEUED = 100
"""Alerts that wait for a webhook; further ones are dropped."""
REQUEST_S = 10.0
"""Longest wait for a connection, and for the answer."""
PAUSES_S = (0.0, 1.0, 4.0, 16.0)
"""Before each try."""
FLUSH_S = 5.0
"""Time for waiting alerts at the end of a session."""
SHOWN = ("outcome", "step", "error", "reason")
"""Fields in the text of an event that has no line of its own."""


class Webhook:
    """Sends alerts in order from a thread.

    Raises:
        UserError: the variable of `url_env` is not set, or holds no URL.
    """

    def __init__(self, config: AlertConfig, *, run: str, run_id: str) -> None:
        self._events, self._names = config.events, {"run": run, "run_id": run_id}
        where = "telemetry.alerts.url_env"
        self._url = config.url or secret_of(config.url_env, where=where)
        if any(server_url_issues(self._url, "", needed_by="an alert")):  # a secret, not repeated
            what, hint = f"the value of {config.url_env} is not a URL for alerts", "set it to https://host/path"
            raise UserError(what, where=where, hint=hint)
        self.host = urlsplit(self._url).hostname or ""
        self.failure = ""  # of the newest alert that was not taken
        self._waiting = SimpleQueue[bytes | None]()
        self._given_up = Event()
        self._thread = Thread(target=self._serve, name=f"alerts to {self.host}", daemon=True)
        self._thread.start()

    def event(self, name: str, fields: Mapping[str, Any], unix_s: float) -> None:
        """Send an event, if the webhook wants it."""
        if name not in self._events:
            return
        if self._waiting.qsize() >= QUEUED:
            self.failure = f"{QUEUED} alerts wait; further ones are dropped"
            return
        shown = ", ".join(f"{key} {fields[key]}" for key in SHOWN if key in fields)
        text = event_text(name, dict(fields)) or f"{name}: {shown}"
        line = {"text": f"{self._names['run']}: {text}", **self._names, "event": name, "time": timestamp(unix_s)}
        self._waiting.put(encode(line | {"fields": fields}))

    def close(self) -> None:
        """Wait a few seconds for alerts that are not sent yet."""
        self._waiting.put(None)
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            self.failure = self.failure or "not accepted before the end of the session"
        self._given_up.set()

    def _serve(self) -> None:
        # No proxy for loopback addresses, and no redirect to another server.
        outside = is_beyond_loopback(self.host)
        with httpx2.Client(timeout=REQUEST_S, trust_env=outside, follow_redirects=False) as client:
            while (body := self._waiting.get()) is not None and not self._given_up.is_set():
                self._deliver(client, body)

    def _deliver(self, client: httpx2.Client, body: bytes) -> None:
        problem = ""
        for pause_s in PAUSES_S:
            if self._given_up.wait(pause_s):
                break
            try:
                with client.stream(
                    "POST", self._url, content=body, headers={"content-type": "application/json"}
                ) as answer:
                    status = answer.status_code  # its text is not read: it may have no end
            except httpx2.TransportError as error:
                problem = f"{type(error).__name__} {error}".rstrip()
                continue
            if 200 <= status < 300:
                return
            problem = f"it answered {status}"
            if status < 500 and status not in (408, 425, 429):
                break
        self.failure = problem
