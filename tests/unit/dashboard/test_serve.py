"""Ports, the command's life, notebooks, and a run's own metrics."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

import tidemill
from tests.char_task import char_task
from tests.unit.dashboard.served import DEADLINE_S, make_run, page_of, serving_pages, tokens
from tidemill.api.watch import Watch
from tidemill.config.load import from_toml
from tidemill.core.errors import UserError
from tidemill.dashboard import serve
from tidemill.dashboard.serve import BackgroundServer, listen_to_watchers, open_browser
from tidemill.jobs.train import train
from tidemill.telemetry.events import SINK_FAILED, read_events

ONE_STEP = (
    char_task()
    + """\
[batch]
prompts = 2
group_size = 2
[sampling]
max_new_tokens = 2
[trainer]
steps = 2
threads = 1
[checkpoint]
every_steps = 2
[eval]
prompts = 1
"""
)


def get(url: str, **headers: str) -> httpx2.Response:
    return httpx2.get(url, headers=headers, timeout=DEADLINE_S, trust_env=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


def test_two_watchers_of_one_run_take_two_ports(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(serve, "PORT", port)
        with listen_to_watchers("127.0.0.1", None) as free:
            assert free.getsockname()[1] != port
        with pytest.raises(UserError, match="Address already in use") as failure:
            listen_to_watchers("127.0.0.1", port)
        with pytest.raises(UserError) as of_notebook:
            tidemill.watch(run, port=port)
    assert (failure.value.where, of_notebook.value.where) == ("--port", "port")
    servers = [BackgroundServer(serving_pages(run)) for _ in range(2)]
    assert [get(f"{server.url}{page_of(run, '.')}").status_code for server in servers] == [200, 200]
    for server in servers:
        server.close()
        server.close()
        with pytest.raises(httpx2.ConnectError):
            get(server.url)


def test_the_command_ends_with_its_streams(run: Path) -> None:
    command = [sys.executable, "-m", "tidemill", "watch", str(run), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().rpartition(" ")[2].strip()
            with httpx2.stream("GET", f"{url}/events", timeout=DEADLINE_S, trust_env=False) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith("retry")
                began_s = time.monotonic()
                process.send_signal(signal.SIGINT)
                assert [*lines][-3:-1] == ["event: end", "data: {}"]
            assert process.wait(DEADLINE_S) == 0
            assert time.monotonic() - began_s < 5
            assert process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("environment", "opens"),
    [
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({}, False),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "there"}, False),
    ],
)
def test_a_browser_opens_where_there_is_a_display(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], opens: bool
) -> None:
    opened = threading.Event()
    monkeypatch.setattr("webbrowser.open", lambda url: opened.set())
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    open_browser("http://127.0.0.1:1")
    assert opened.wait(2.0 if opens else 0.1) == opens


def test_a_notebook_shows_the_page(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = tidemill.watch(run, height=500)
    try:
        assert isinstance(shown, Watch)
        assert capsys.readouterr().out == f"run is shown at {shown.url}\n"
        assert tidemill.watch(str(run)) is shown is tidemill.watch(tidemill.Run(run))
        frame = shown._repr_html_()
        assert f'<iframe src="{shown.url}"' in frame and 'height="800"' in frame
        page = get(f"{shown.url}{page_of(run, '.')}")
        assert "frame-ancestors 'self' http://localhost:* " in page.headers["content-security-policy"]
        capsys.readouterr()
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
        tidemill.watch(run)
        assert capsys.readouterr().out == ""
    finally:
        shown.close()
    with pytest.raises(httpx2.ConnectError):
        get(shown.url)
    with pytest.raises(tidemill.TidemillError, match="no such run"):
        tidemill.watch(run / "nothing")


def test_a_run_serves_its_own_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[httpx2.Response]()
    file = tokens(tmp_path / "tokens")
    recipe = f'{ONE_STEP}[telemetry]\nport = 0\ntoken_file = "{file}"\n[run]\ndir = "{tmp_path / "run"}"\n'

    class Asking(tidemill.Callback):
        def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
            [url] = [server.url for server in started]
            seen.extend([get(url), get(url, authorization="Bearer reader-token")])

    started, begin = list[BackgroundServer](), BackgroundServer.__init__

    def kept(self: BackgroundServer, *args: object) -> None:
        begin(self, *args)  # type: ignore[arg-type]
        started.append(self)

    monkeypatch.setattr(BackgroundServer, "__init__", kept)
    assert train(from_toml(recipe, source="test"), callbacks=[Asking()])["finished"]
    assert [answer.status_code for answer in seen[:2]] == [401, 200]
    assert 'tidemill_step{run="run"' in seen[1].text and seen[1].text.endswith("# EOF\n")
    with pytest.raises(httpx2.ConnectError):
        get(started[0].url)


def test_a_run_goes_on_without_its_metrics_if_their_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        recipe = f'{ONE_STEP}[telemetry]\nport = {port}\n[run]\ndir = "{tmp_path / "run"}"\n'
        assert train(from_toml(recipe, source="test"))["finished"]
    [failed] = [event for event in read_events(tmp_path / "run/events.jsonl") if event["event"] == SINK_FAILED]
    assert failed["sink"] == "telemetry.port" and "Address already in use" in failed["error"]
