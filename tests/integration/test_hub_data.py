"""Training on a data set of the Hugging Face Hub, from a server on this machine that answers as the hub does."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tidemill as tm

COMMIT = "a" * 40
CARD = b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"


def parquet() -> bytes:
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), stream)
    return stream.getvalue()


FILES = {"README.md": CARD, "main/train-00000-of-00001.parquet": parquet()}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers for one data set: its description, the list of its files, and the files."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        _, found, below = path.partition("/tree/")
        if found:
            self._send_json(self._listing(below.partition("/")[2]))
        elif "/resolve/" in path:
            self._send_file(path.partition("/resolve/")[2].partition("/")[2])
        elif path.startswith("/api/datasets/made/sums"):
            names = [{"rfilename": name} for name in FILES]
            self._send_json({"_id": "1", "id": "made/sums", "sha": COMMIT, "private": False, "siblings": names})
        else:
            self._send(b"{}", status=404)

    do_HEAD = do_GET

    def _listing(self, folder: str) -> list[dict[str, object]]:
        names = [name for name in FILES if name.rpartition("/")[0] == folder]
        files = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": _digest(name)} for name in names]
        return files if folder else [*files, {"type": "directory", "path": "main", "oid": COMMIT}]

    def _send_file(self, name: str) -> None:
        if name in FILES:
            self._send(FILES[name], {"ETag": f'"{_digest(name)}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(b"", {"X-Error-Code": "EntryNotFound"}, status=404)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _digest(name: str) -> str:
    return hashlib.sha1(FILES[name], usedforsecurity=False).hexdigest()


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


@pytest.mark.slow  # tests/unit/data/test_row_table.py, without a server
def test_a_hub_data_set_is_downloaded_and_trained_on(tmp_path: Path, endpoint: str) -> None:
    def train(*words: str) -> subprocess.CompletedProcess[str]:
        settings = ["--trainer.threads=1", "--task.kind=file", '--task.columns={prompt = "question"}', *words]
        command = [sys.executable, "-m", "tidemill", "train", "@char-addition", *settings]
        environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    ran = train(
        "--task.path=hub:made/sums/main",
        "--trainer.steps=1",
        "--run.dir=run",
        "--batch.prompts=4",
        "--batch.group_size=8",
    )
    assert ran.returncode == 0, ran.stderr
    samples = tm.Run(tmp_path / "run").samples(training=True)
    assert {sample.prompt for sample in samples} <= {f"{a}+{b}=" for a in range(6) for b in range(6)}
    assert len(samples) == 4 * 8
    unknown = train("--task.path=hub:made/none", "--run.dir=other")
    assert unknown.returncode == 2
    assert "hub:made/none: cannot be loaded" in unknown.stderr
