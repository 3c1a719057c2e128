"""Alerts: chosen events of a run, posted to webhooks from background threads. They never delay or end the run.

POST url   {"text": "demo: guard: the reward rises …", "run", "run_id", "event", "time", "fields": {...}}
2xx        accepted. No answer, 408, 425, 429 and 5xx: sent again after a pause. Another answer: given up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tidemill.config.addresses import server_url_issues
from tidemill.config.base import is_beyond_loopback
from tidemill.config.schema import AlertConfig
from tidemill.core.credentials import secret_of
from tidemill.core.errors import UserError
from tidemill.telemetry.events import SESSION_END, SESSION_START, event_text, timestamp
from tidemill.telemetry.jsonl import encode

QUEUED = 100
"""Alerts that wait for a webhook; further ones are dropped."""
REQUEST_S = 10.0
"""Longest wait for a connection, and for the answer."""
PAUSES_S = (1.0, 4.0, 16.0, 0.0)
"""After each try; the last one is not repeated."""
FLUSH_S = 5.0
"""Time for waiting alerts at the end of a session."""
TEMPORARY_STATUS = frozenset({408, 425, 429, *range(500, 600)})


class Webhook:
    """Sends alerts in order from a thread, which starts with the first one.

    Raises:
        UserError: the variable of `auth_env` or `url_env` is not set, or holds no URL.
    """

    def __init__(self, config: AlertConfig) -> None:
        where = "telemetry.alerts"
        self.events = config.events
        self._url = config.url or secret_of(config.url_env, where=f"{where}.url_env")
        if any(server_url_issues(self._url, config.auth_env, needed_by=where)):  # a secret, not repeated
            what, hint = f"the value of {config.url_env} is not a URL for alerts", "set it to https://host/path"
            raise UserError(what, where=f"{where}.url_env", hint=hint)
        self._headers = {"content-type": "application/json"}
        if config.auth_env:
            self._headers["authorization"] = secret_of(config.auth_env, where=f"{where}.auth_env")
        self.host = urlsplit(self._url).hostname or ""
        self.failure = ""  # the first alert that was not taken
        self._problem = ""  # of the newest try
        self._waiting = SimpleQueue[bytes | None]()
        self._given_up = Event()
        self._thread = Thread(target=self._serve, name=f"alerts to {self.host}", daemon=True)

    def send(self, body: bytes) -> None:
        if self._waiting.qsize() >= QUEUED:
            self._fail(f"{QUEUED} alerts wait; further ones are dropped")
            return
        self._waiting.put(body)
        if self._thread.ident is None:
            self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Wait for alerts that are not sent yet, until a time of the monotonic clock."""
        self._waiting.put(None)
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
            if self._thread.is_alive():
                self._fail(self._problem or "no answer before the end of the session")
        self._given_up.set()

    def _serve(self) -> None:
        try:
            # No proxy for loopback addresses, and no redirect of the secret to another server.
            outside = is_beyond_loopback(self.host)
            with httpx2.Client(timeout=REQUEST_S, trust_env=outside, follow_redirects=False) as client:
                while (body := self._waiting.get()) is not None and not self._given_up.is_set():
                    self._deliver(client, body)
        except Exception as error:  # noqa: BLE001 - must not end the run; the message may have the URL
            self._fail(type(error).__name__)

    def _deliver(self, client: httpx2.Client, body: bytes) -> None:
        for pause_s in PAUSES_S:
            try:
                with client.stream("POST", self._url, content=body, headers=self._headers) as answer:
                    status = answer.status_code  # its text is not read: it may have no end
            except httpx2.TransportError as error:
                self._problem, temporary = f"{type(error).__name__} {error}".rstrip(), True
            else:
                if 200 <= status < 300:
                    self._problem = ""
                    return
                self._problem, temporary = f"it answered {status}", status in TEMPORARY_STATUS
            if not temporary or self._given_up.wait(pause_s):
                break
        self._fail(self._problem)

    def _fail(self, problem: str) -> None:
        self.failure = self.failure or problem


class Alerts:
    """The webhooks of a run. Raises UserError as `Webhook`."""

    def __init__(self, configs: Sequence[AlertConfig], *, run: str, run_id: str) -> None:
        self._names = {"run": run, "run_id": run_id}
        self._webhooks = [Webhook(config) for config in configs]
        self._reported = set[Webhook]()

    def event(self, name: str, fields: Mapping[str, Any], unix_s: float) -> None:
        """Send an event to the webhooks that want it."""
        if wanting := [webhook for webhook in self._webhooks if name in webhook.events]:
            line = {"text": f"{self._names['run']}: {alert_text(name, dict(fields))}", **self._names, "event": name}
            body = encode(line | {"time": timestamp(unix_s), "fields": fields})
            for webhook in wanting:
                webhook.send(body)

    def close(self) -> None:
        """Wait a few seconds for alerts that are not sent yet."""
        deadline_s = time.monotonic() + FLUSH_S
        for webhook in self._webhooks:
            webhook.close(deadline_s)

    def new_failures(self) -> list[tuple[str, str]]:
        """(host, problem) of each webhook that failed for the first time since the last call."""
        failed = [webhook for webhook in self._webhooks if webhook.failure and webhook not in self._reported]
        self._reported.update(failed)
        return [(webhook.host, webhook.failure) for webhook in failed]


def alert_text(name: str, fields: dict[str, Any]) -> str:
    """One line about an event."""
    if name == SESSION_START:
        return "resumed" if fields.get("resumed") else "started"
    if name == SESSION_END:
        error = f": {fields['error']}" if fields.get("error") else ""
        return f"{fields.get('outcome')} after step {fields.get('step')}{error}"
    return event_text(name, fields) or f"{name} {fields.get('reason', '')}".rstrip()
