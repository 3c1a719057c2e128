"""A server of sandboxes, by the protocol of docs/sandbox.md, over those of this machine."""

from __future__ import annotations

import base64
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import msgspec

from tidemill.sandbox import Limits, Sandbox, SandboxError, Snapshot
from tidemill.sandbox.local import LocalSandbox, launcher

TOKEN = "a-token"


class Handler(BaseHTTPRequestHandler):
    sandboxes: dict[str, Sandbox] = {}
    numbers = itertools.count(1)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.answer(401, b"the token is wrong")
            return
        try:
            self.answer(200, *self.served(body))
        except KeyError:
            self.answer(404, b"there is no such sandbox")
        except SandboxError as error:
            self.answer(409, str(error).encode())

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def served(self, body: bytes) -> tuple[bytes, int]:
        """The body of the answer, and how much a snapshot leaves out."""
        _, _, name, *rest = self.path.strip("/").split("/", 3) + [""] * 2
        match self.command, (name, *rest)[1] if name else "":
            case "POST", "" if not name:
                limits = msgspec.convert(json.loads(body)["limits"], Limits)
                name = str(next(self.numbers))
                self.sandboxes[name] = LocalSandbox(launcher("bwrap").address, limits, ())
                return json.dumps({"id": name}).encode(), 0
            case "DELETE", _:
                self.sandboxes.pop(name).close()
                return b"", 0
        sandbox, what = self.sandboxes[name], rest[0]
        if what == "run":
            given = json.loads(body)
            given["stdin"] = base64.b64decode(given["stdin"])
            return msgspec.json.encode(sandbox.run(given.pop("argv"), **given)), 0
        if what == "snapshot" and self.command == "GET":
            snapshot = sandbox.snapshot()
            return snapshot.data, snapshot.left_out
        if what == "snapshot":
            sandbox.restore(Snapshot(data=body))
            return b"", 0
        path = unquote(what.removeprefix("files/"))
        if self.command == "GET":
            return sandbox.read(path), 0
        sandbox.write(path, body)
        return b"", 0

    def answer(self, code: int, body: bytes, left_out: int = 0) -> None:
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-left-out", str(left_out))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def sandbox_server() -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
        for sandbox in Handler.sandboxes.values():
            sandbox.close()
        Handler.sandboxes.clear()
