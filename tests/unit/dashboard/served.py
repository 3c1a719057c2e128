"""Pages of runs on a free port."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.fabricated_run import FabricatedRun
from tidemill.dashboard.runs import WatchedFolder
from tidemill.dashboard.serve import BackgroundServer, listen_to_watchers, watching
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_list import run_key

DEADLINE_S = 10.0


def make_run(path: Path, *, steps: int = 2) -> FabricatedRun:
    """A finished run of a few samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = FabricatedRun(path, steps=steps, groups=2, group_size=2)
    recorder = run.session()
    run.evaluate(recorder, 0)
    for step in range(1, steps + 1):
        run.learn(recorder, step)
    recorder.finish("finished")
    recorder.run.close()
    return run


def open_run(path: Path) -> tuple[FabricatedRun, Recorder]:
    """A run of this process, in progress, after its first step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = FabricatedRun(path, groups=2, group_size=2)
    recorder = run.session()
    run.learn(recorder, 1)
    return run, recorder


def tokens(path: Path) -> Path:
    """A file with a token for each right."""
    path.write_text("read reader-token\nact actor-token\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def serving_pages(root: Path, token_file: Path | None = None) -> AbstractAsyncContextManager[str]:
    return watching(WatchedFolder(root), listen_to_watchers("127.0.0.1", 0), token_file=token_file)


@contextmanager
def pages(root: Path, *, token_file: Path | None = None) -> Iterator[httpx2.Client]:
    """A client of the pages of a folder."""
    server = BackgroundServer(serving_pages(root, token_file))
    try:
        with httpx2.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False) as client:
            yield client
    finally:
        server.close()


def page_of(root: Path, name: str) -> str:
    """The address of a run's page."""
    return f"/run/{run_key(root, root / name)}/"


def raw(client: httpx2.Client, request: bytes) -> bytes:
    """The answer to the bytes of a request, up to the end of the connection or for a second."""
    answer = b""
    place = ("127.0.0.1", client.base_url.port or 0)
    with socket.create_connection(place, timeout=DEADLINE_S) as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(request)
        connection.settimeout(1.0)
        while part := connection.recv(65536):
            answer += part
    return answer


def events(client: httpx2.Client, address: str, **headers: str) -> Generator[dict[str, Any], None, None]:
    """The events of a stream: name, id and data. Close it in the end."""
    with client.stream("GET", address, headers=headers) as answer:
        assert answer.status_code == 200
        fields = dict[str, Any]()
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if line and name:
                fields[name] = json.loads(value) if name == "data" else value
            elif "event" in fields:
                yield fields
                fields = {}
