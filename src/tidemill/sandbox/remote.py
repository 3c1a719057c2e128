"""Sandboxes of a server, over HTTP. `docs/sandbox.md` describes the protocol."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidemill.sandbox.records import Finished, Limits, SandboxError, SandboxLostError, Snapshot

ANSWER_S = 30.0
"""Deadline of an answer beyond that of a command."""
MOST_BYTES = 1 << 28
LEFT_OUT = "x-left-out"
MISTAKES = (400, 404, 409, 413)
"""Status codes of methods that cannot do what they were asked; with any other the sandbox itself failed."""


class RemoteSandbox:
    """A sandbox of a server; implements `Sandbox`."""

    def __init__(self, url: str, token: str, limits: Limits, network: Sequence[str]) -> None:
        self._token, self._limits = token, limits
        self._url = f"{url.rstrip('/')}/v1/sandboxes"
        wanted = {"limits": msgspec.to_builtins(limits), "network": list(network)}
        answer = json.loads(self._send("POST", "", json.dumps(wanted).encode())[0])
        try:
            self._url += f"/{urllib.parse.quote(answer['id'], safe='')}"
        except (TypeError, KeyError) as error:
            raise SandboxLostError("the server's answer has no id") from error
        self._open = True

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] = {},
        timeout_s: float | None = None,
    ) -> Finished:
        wait_s = min(timeout_s or self._limits.wall_s, self._limits.wall_s)
        wanted = {"argv": list(argv), "stdin": _text(stdin), "env": dict(env), "timeout_s": wait_s}
        body, _ = self._send("POST", "/run", json.dumps(wanted).encode(), wait_s)
        try:
            return msgspec.json.decode(body, type=Finished)  # bytes are base64 in JSON
        except msgspec.DecodeError as error:
            raise SandboxLostError(f"the server's answer is wrong: {error}") from error

    def read(self, path: str) -> bytes:
        return self._send("GET", f"/files/{urllib.parse.quote(path)}")[0]

    def write(self, path: str, data: bytes) -> None:
        self._send("PUT", f"/files/{urllib.parse.quote(path)}", data)

    def snapshot(self) -> Snapshot:
        data, headers = self._send("GET", "/snapshot")
        return Snapshot(data=data, left_out=int(headers.get(LEFT_OUT) or 0))

    def restore(self, snapshot: Snapshot) -> None:
        self._send("PUT", "/snapshot", snapshot.data)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._send("DELETE", "")

    def _send(self, method: str, path: str, body: bytes | None = None, wait_s: float = 0.0) -> tuple[bytes, Any]:
        """Body and headers of the answer. Raises SandboxError."""
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/octet-stream"}
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=wait_s + ANSWER_S) as answer:
                data = answer.read(MOST_BYTES + 1)
                if len(data) > MOST_BYTES:
                    raise SandboxLostError(f"the server's answer is longer than {MOST_BYTES:,} bytes")
                return data, answer.headers
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(1000).decode(errors="replace").strip()
            kind = SandboxError if error.code in MISTAKES else SandboxLostError
            raise kind(f"the server refuses ({error.code}): {said or error.reason}") from None
        except OSError as error:
            raise SandboxLostError(f"the server does not answer: {getattr(error, 'reason', error)}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
