"""Alerts: chosen events of a run, posted to webhooks from background threads. They never delay or end the run.

POST url   {"text": "demo: guard: the reward rises …", "run", "run_id", "event", "time", "fields": {...}}
2xx        accepted. No answer, 408, 425, 429 and 5xx: sent again after a pause. Another answer: given up.

Slack, Mattermost and Discord's `/slack` addresses show `text` and ignore the rest.
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
PAUSES_S = (1.0, 4.0, 16.0)
"""Before each further try."""
FLUSH_S = 5.0
"""Time for waiting alerts at the end of a session."""
TEMPORARY_STATUS = frozenset({408, 425, 429, *range(500, 600)})
WHERE = "telemetry.alerts"


class Webhook:
    """Sends alerts in order from a thread, which starts with the first one.

    Raises:
        UserError: the variable of `auth_env` or `url_env` is not set, or holds no URL.
    """

    def __init__(self, config: AlertConfig) -> None:
        self.events = config.events
        self._url = config.url or secret_of(config.url_env, where=f"{WHERE}.url_env")
        if any(server_url_issues(self._url, config.auth_env, needed_by=WHERE)):  # of url_env: a secret, not repeated
            what, hint = f"the value of {config.url_env} is not a URL for alerts", "set it to https://host/path"
            raise UserError(what, where=f"{WHERE}.url_env", hint=hint)
        self._headers = {"content-type": "application/json"}
        if config.auth_env:
            self._headers["authorization"] = secret_of(config.auth_env, where=f"{WHERE}.auth_env")
        self.host = urlsplit(self._url).hostname or ""
        self.failure = ""  # the first
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

    def finish(self) -> None:
        """Accept no further alert. `wait` waits for those sent before."""
        self._waiting.put(None)

    def wait(self, seconds: float) -> None:
        if self._thread.ident is None:
            return
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._fail("the last alerts were not accepted in time")
        self._given_up.set()

    def _serve(self) -> None:
        try:
            # Loopback addresses have no proxy. Redirects would send the secret elsewhere.
            outside = is_beyond_loopback(self.host)
            with httpx2.Client(timeout=REQUEST_S, trust_env=outside, follow_redirects=False) as client:
                while (body := self._waiting.get()) is not None and not self._given_up.is_set():
                    self._deliver(client, body)
        except Exception as error:  # noqa: BLE001 - the run must not end; messages of other errors may have the URL
            self._fail(type(error).__name__)

    def _deliver(self, client: httpx2.Client, body: bytes) -> None:
        for pause_s in (*PAUSES_S, 0.0):
            problem, temporary = self._post(client, body)
            if not problem:
                return
            if not temporary or not pause_s or self._given_up.wait(pause_s):
                break
        self._fail(problem)

    def _post(self, client: httpx2.Client, body: bytes) -> tuple[str, bool]:
        """The problem, empty without one, and whether another try may help."""
        try:
            with client.stream("POST", self._url, content=body, headers=self._headers) as answer:
                status = answer.status_code  # the answer's text is not read: it may have no end
        except httpx2.TransportError as error:
            return f"{type(error).__name__} {error}".rstrip(), True
        return "" if 200 <= status < 300 else f"it answered {status}", status in TEMPORARY_STATUS

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
        wanting = [webhook for webhook in self._webhooks if name in webhook.events]
        if not wanting:
            return
        what = {"text": f"{self._names['run']}: {alert_text(name, dict(fields))}", **self._names, "event": name}
        body = encode(what | {"time": timestamp(unix_s), "fields": fields})
        for webhook in wanting:
            webhook.send(body)

    def close(self) -> None:
        """Wait a few seconds for alerts that are not sent yet."""
        for webhook in self._webhooks:
            webhook.finish()
        end_s = time.monotonic() + FLUSH_S
        for webhook in self._webhooks:
            webhook.wait(end_s - time.monotonic())

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
    return event_text(name, fields) or " ".join([name, *([str(fields["reason"])] if "reason" in fields else [])])
