"""`tidemill sandbox serve`: who may use it, how much, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tests.sandbox_server import TOKEN, sandbox_server
from tests.sandboxes import need_bubblewrap
from tidemill.cli.app import main
from tidemill.config.sandbox import SandboxConfig
from tidemill.sandbox import Limits, SandboxError, SandboxLostError, open_sandbox

HEADERS = {"authorization": f"Bearer {TOKEN}"}
LIMITS = msgspec.to_builtins(Limits())


@pytest.fixture(autouse=True)
def bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    monkeypatch.setenv("TIDEMILL_SANDBOX_TOKEN", TOKEN)


def config(url: str, **changed: Any) -> SandboxConfig:
    return SandboxConfig.model_validate({"backend": "http", "url": url, **changed})


def soon(holds: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "text"),
    [
        ("GET", "/health", {}, 200, "ok\n"),
        ("POST", "/v1/sandboxes", {"json": {}}, 401, "wrong or missing key"),
        ("POST", "/v1/sandboxes", {"headers": HEADERS, "content": b"{"}, 400, "the body is not as expected"),
        ("POST", "/v1/sandboxes", {"headers": HEADERS, "json": {"size": 1}}, 400, "unknown field `size`"),
        (
            "POST",
            "/v1/sandboxes",
            {"headers": HEADERS, "json": {"limits": LIMITS | {"processes": 65}}},
            400,
            "limits.processes is 65; this server allows up to 64",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"headers": HEADERS, "json": {"limits": LIMITS | {"wall_s": 0}}},
            400,
            "limits.wall_s is 0",
        ),
        (
            "POST",
            "/v1/sandboxes",
            {"headers": HEADERS, "json": {"network": ["pypi.org:443"]}},
            400,
            "does not allow 'pypi.org:443'",
        ),
        ("GET", "/v1/sandboxes/1/snapshot", {"headers": HEADERS}, 410, "there is no such sandbox"),
        ("DELETE", "/v1/sandboxes/1", {"headers": HEADERS}, 200, ""),
    ],
)
def test_requests_without_a_sandbox(method: str, path: str, sent: dict[str, Any], status: int, text: str) -> None:
    with sandbox_server() as url:
        answer = httpx2.request(method, f"{url}{path}", **sent)
    assert answer.status_code == status
    assert text in answer.text


def test_a_sandbox_beyond_the_cap_is_refused_until_another_one_closes() -> None:
    with sandbox_server(most=1) as url:
        with closing(open_sandbox(config(url))), pytest.raises(SandboxLostError, match=r"503.*1 sandboxes are open"):
            open_sandbox(config(url))
        open_sandbox(config(url)).close()


def test_an_idle_sandbox_is_closed_and_one_with_a_command_is_not() -> None:
    with sandbox_server(idle_s=0.5) as url:
        sandbox = open_sandbox(config(url))
        assert sandbox.run(["sleep", "1.2"]).code == 0  # longer than the idle time
        time.sleep(1.5)
        with pytest.raises(SandboxLostError, match=r"410.*without a request for 0.5 s is closed"):
            sandbox.read("a")
        sandbox.close()  # of a sandbox that is gone: no error


def test_a_body_larger_than_the_sandbox_is_a_mistake_of_the_agent() -> None:
    with sandbox_server(scratch_mb=1) as url, closing(open_sandbox(config(url, scratch_mb=1))) as sandbox:
        with pytest.raises(SandboxError, match="room for 1048576 bytes") as refused:
            sandbox.write("large", b"x" * ((1 << 20) + 1))
        sandbox.write("small", b"x")
        assert sandbox.read("small") == b"x"
        small = {"limits": LIMITS | {"scratch_bytes": 4096}}
        name = httpx2.post(f"{url}/v1/sandboxes", json=small, headers=HEADERS).json()["id"]
        answer = httpx2.put(f"{url}/v1/sandboxes/{name}/files/a", content=b"x" * 4097, headers=HEADERS)
        assert (answer.status_code, answer.text) == (413, "the body has more than 4096 bytes")
    assert not isinstance(refused.value, SandboxLostError)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 is open to other machines without tokens"),
        (["--token-file", "open.txt"], "--token-file: others can read open.txt (mode 644)"),
        (["--sandbox.backend", "http", "--sandbox.url", "http://x"], "sandbox.backend: a server has sandboxes of its"),
        (["--most", "0"], "--most: must be above 0"),
        (["--port", "70000"], "--port: must be from 0 to 65535"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("open.txt").write_text("token\n")
    Path("open.txt").chmod(0o644)
    assert main(["sandbox", "serve", *arguments]) == 2
    assert error in capsys.readouterr().err


def test_sigterm_ends_the_server_its_sandboxes_and_their_commands(tmp_path: Path) -> None:
    token_file = tmp_path / "tokens"
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    command = [sys.executable, "-m", "tidemill", "sandbox", "serve", "--port", "0", "--token-file", str(token_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = iter(server.stderr.readline, "")
        url = next(line for line in lines if "served at" in line).split()[-1]
        sandbox = open_sandbox(config(url))
        marker = "86399.25"  # seconds; finds the process
        lost: list[Exception] = []

        def run() -> None:
            try:
                sandbox.run(["sleep", marker])
            except SandboxError as error:
                lost.append(error)

        client = threading.Thread(target=run)
        client.start()
        try:
            assert soon(lambda: bool(pids_with(marker)))
            server.send_signal(signal.SIGTERM)
            stdout, errors = server.communicate(timeout=30)
        finally:
            server.kill()
        client.join(30)
    assert server.returncode == 0, errors
    assert stdout == "1 sandboxes were opened\n"
    assert isinstance(lost[0], SandboxLostError)
    assert soon(lambda: not pids_with(marker), 5.0)


def pids_with(argument: str) -> list[int]:
    """Processes of this machine with an argument."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if argument in arguments_of(pid)]


def arguments_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
