"""Sandboxes of a server, over HTTP. `docs/how-to/sandbox.md` describes the protocol."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from tidemill.sandbox.records import Finished, Limits, SandboxError, SandboxLostError, Snapshot, check_command
from tidemill.sandbox.scratch import path_parts

ANSWER_S = 30.0
"""Deadline of an answer beyond that of a command."""
LEFT_OUT = "x-left-out"
MISTAKES = (400, 404, 409, 413)
"""Status codes of methods that cannot do what they were asked; with any other the sandbox itself failed."""


class RemoteSandbox:
    """A sandbox of a server; implements `Sandbox`.

    Raises:
        SandboxLostError: the server does not answer, or refuses.
    """

    def __init__(self, url: str, token: str, limits: Limits, network: Sequence[str]) -> None:
        self._limits = limits
        headers = {"authorization": f"Bearer {token}"}
        self._client = httpx2.Client(base_url=f"{url.rstrip('/')}/v1/", headers=headers, trust_env=False)
        self._path = "sandboxes"
        try:
            wanted = {"limits": msgspec.to_builtins(limits), "network": list(network)}
            self._path += f"/{quote(str(self._send('POST', json=wanted).json()['id']), safe='')}"
        except (ValueError, TypeError, KeyError) as error:
            self._client.close()
            raise SandboxLostError("the server's answer has no id") from error
        except SandboxError:
            self._client.close()
            raise

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] = {},
        timeout_s: float | None = None,
    ) -> Finished:
        check_command(argv, env)
        wait_s = min(timeout_s or self._limits.wall_s, self._limits.wall_s)
        wanted = {"argv": list(argv), "stdin": base64.b64encode(stdin).decode(), "env": dict(env), "timeout_s": wait_s}
        answer = self._send("POST", "/run", wait_s=wait_s, json=wanted)
        try:
            return msgspec.json.decode(answer.content, type=Finished)  # bytes are base64 in JSON
        except msgspec.DecodeError as error:
            raise SandboxLostError(f"the server's answer is wrong: {error}") from error

    def read(self, path: str) -> bytes:
        return self._send("GET", _file(path)).content

    def write(self, path: str, data: bytes) -> None:
        if len(data) > self._limits.scratch_bytes:  # the server would close the connection while it is sent
            raise SandboxError(f"the sandbox has room for {self._limits.scratch_bytes} bytes")
        self._send("PUT", _file(path), content=data)

    def snapshot(self) -> Snapshot:
        answer = self._send("GET", "/snapshot")
        return Snapshot(data=answer.content, left_out=int(answer.headers.get(LEFT_OUT) or 0))

    def restore(self, snapshot: Snapshot) -> None:
        self._send("PUT", "/snapshot", content=snapshot.data)

    def close(self) -> None:
        if not self._client.is_closed:
            try:
                self._send("DELETE")
            finally:
                self._client.close()

    def _send(self, method: str, path: str = "", *, wait_s: float = 0.0, **content: Any) -> httpx2.Response:
        """Raises SandboxError, SandboxLostError."""
        if self._client.is_closed:
            raise SandboxLostError("the sandbox is closed")
        try:
            answer = self._client.request(method, self._path + path, timeout=wait_s + ANSWER_S, **content)
        except httpx2.HTTPError as error:
            raise SandboxLostError(f"the server does not answer: {str(error) or type(error).__name__}") from error
        if answer.is_success:
            return answer
        kind = SandboxError if answer.status_code in MISTAKES else SandboxLostError
        raise kind(f"the server refuses ({answer.status_code}): {answer.text.strip()[:300] or answer.reason_phrase}")


def _file(path: str) -> str:
    """The address of a file. Raises SandboxError: its path leads out of the sandbox."""
    return f"/files/{'/'.join(quote(part, safe='') for part in path_parts(path))}"
