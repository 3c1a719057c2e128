"""Alerts against a stand-in server on the loopback interface."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.fabricated_run import FakeClock
from tidemill.config.schema import RunSpec
from tidemill.config.telemetry import AlertConfig, AlertEvent
from tidemill.core.errors import UserError
from tidemill.telemetry import alerts
from tidemill.telemetry.alerts import Webhook
from tidemill.telemetry.events import EVENTS
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

DECISION = {"number": 1, "step": 17, "onset": 12, "action": "rollback", "target": 10, "reason": "R. S.", "test": "gap"}


class Server:
    """Answers with `statuses` in order, the last one for ever; None: no answer before the test ends."""

    def __init__(self) -> None:
        self.statuses: list[int | None] = [200]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.ended = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                server.headers.append({key.lower(): value for key, value in self.headers.items()})
                status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
                if status is None:
                    server.ended.wait(20)
                    return
                self.send_response(status)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "1000000")  # an answer that never ends
                self.end_headers()
                with suppress(OSError):
                    self.wfile.write(b"ok")

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/hook"

    def close(self) -> None:
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(alerts, "PAUSES_S", (0.0, 0.01, 0.01))
    made = Server()
    yield made
    made.close()


def opened(**options: Any) -> Webhook:
    return Webhook(AlertConfig(**options), run="demo", run_id="id7")


def test_an_alert_is_one_line_of_text_and_the_fields_of_its_event(server: Server) -> None:
    subject = opened(url=server.url)
    subject.event("checkpoint", {"step": 16}, 0.0)  # not among the default events
    subject.event("guard", DECISION | {"proxy": (0.5, float("nan"))}, 1_700_000_000.5)
    subject.event("session_end", {"outcome": "failed", "step": 20, "error": "OSError: no"}, 0.0)
    subject.close()
    assert subject.failure == ""
    guard, ended = server.bodies
    text = "guard: the reward rises and quality does not since about step 12; the run returns to step 10. R. S."
    assert guard == {
        "text": f"demo: {text}",
        "run": "demo",
        "run_id": "id7",
        "event": "guard",
        "time": "2023-11-14T22:13:20.500Z",
        "fields": DECISION | {"proxy": [0.5, None]},
    }
    assert ended["text"] == "demo: session_end: outcome failed, step 20, error OSError: no"


@pytest.mark.parametrize(
    ("statuses", "tries", "failure"),
    [
        ([500, 200], 2, ""),
        ([429, 503, 204], 3, ""),
        ([500], 3, "it answered 500"),
        ([404], 1, "it answered 404"),
        ([302], 1, "it answered 302"),  # a redirect could send the secret elsewhere
    ],
)
def test_a_webhook_is_tried_again_where_that_may_help(
    server: Server, statuses: list[int | None], tries: int, failure: str
) -> None:
    server.statuses = statuses
    subject = opened(url=server.url)
    subject.event("guard", DECISION, 0.0)
    subject.close()
    assert len(server.bodies) == tries
    assert subject.failure == failure


def test_neither_a_slow_server_nor_none_delays_the_run(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "FLUSH_S", 0.3)
    monkeypatch.setattr(alerts, "QUEUED", 20)
    server.statuses = [None]
    started_s = time.monotonic()
    subjects = [opened(url=url) for url in (server.url, "http://127.0.0.1:1/hook")]
    for _ in range(200):
        for subject in subjects:
            subject.event("worker_health", {"worker": "w1", "state": "suspect", "cause": "slow"}, 0.0)
    assert time.monotonic() - started_s < 2
    for subject in subjects:
        subject.close()
    assert time.monotonic() - started_s < 4
    assert subjects[0].failure == "20 alerts wait; further ones are dropped"
    assert subjects[1].failure and len(server.bodies) <= 1


def test_an_alert_that_is_not_accepted_by_the_end_is_a_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "FLUSH_S", 0.1)
    server.statuses = [None]
    subject = opened(url=server.url)
    subject.event("guard", DECISION, 0.0)
    subject.close()
    assert subject.failure == "not accepted before the end of the session"


def test_a_secret_url_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_URL", server.url)
    subject = opened(url_env="HOOK_URL")
    subject.event("guard", DECISION, 0.0)
    subject.close()
    (headers,) = server.headers
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("value", "what"),
    [(None, "HOOK_URL is not set"), ("hush", "HOOK_URL is not a URL"), ("https://me:hush@a/x", "is not a URL")],
)
def test_a_url_that_cannot_be_used_is_refused_at_the_start_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, value: str | None, what: str
) -> None:
    monkeypatch.delenv("HOOK_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("HOOK_URL", value)
    with pytest.raises(UserError, match=what) as caught:
        opened(url_env="HOOK_URL")
    assert "hush" not in str(caught.value)


def test_the_recorder_sends_events_and_notes_a_failure_once(tmp_path: Path, server: Server) -> None:
    server.statuses = [404]
    telemetry = {"alerts": [{"url": server.url, "events": ["session_start", "guard", "session_end"]}]}
    spec = RunSpec.model_validate({"run": {"dir": str(tmp_path), "name": "demo"}, "telemetry": telemetry})
    stream, run = io.StringIO(), RunDirectory.open(tmp_path)
    recorder = Recorder(run, spec, stream=stream, clock=FakeClock(), unix_time=lambda: 0.0)
    recorder.event("guard", **DECISION)
    recorder.close("finished")
    recorder.run.close()
    assert [body["text"].partition(":")[2][:9] for body in server.bodies] == [" session_", " guard: t", " session_"]
    guard, *warnings = stream.getvalue().splitlines()
    assert guard.startswith("guard: the reward rises")
    assert warnings == ["warning: an alert to 127.0.0.1 failed (it answered 404); the run continues"]


def test_the_events_of_alerts_exist() -> None:
    assert set(get_args(AlertEvent)) <= EVENTS.keys()
