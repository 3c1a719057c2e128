"""The back-end "http" against a server that offers sandboxes of this machine."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from tests.sandbox_server import TOKEN, sandbox_server
from tests.sandboxes import need_bubblewrap
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.sandbox import SandboxError, SandboxLostError, open_sandbox, remote
from tidemill.sandbox.open_sandbox import check_sandbox


def config(url: str, **changed: object) -> SandboxConfig:
    return SandboxConfig.model_validate({"backend": "http", "url": url, **changed})


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_SANDBOX_TOKEN", TOKEN)


def test_a_remote_sandbox_does_what_a_local_one_does() -> None:
    need_bubblewrap()
    with sandbox_server() as url:
        check_sandbox(config(url))
        with closing(open_sandbox(config(url, output_kb=1))) as sandbox:
            sandbox.write("folder/a file", b"\0\xff")
            finished = sandbox.run(
                ["sh", "-c", "cat; echo $NAME; ln -s / link; exit 3"], stdin=b"in\n", env={"NAME": "x"}
            )
            snapshot = sandbox.snapshot()
            long = sandbox.run(["head", "-c", "5000", "/dev/zero"])
            late = sandbox.run(["sleep", "20"], timeout_s=0.3)

            assert (finished.stdout, finished.code) == (b"in\nx\n", 3)
            assert sandbox.read("folder/a file") == b"\0\xff"
            assert snapshot.left_out == 1
            assert (len(long.stdout), long.discarded_bytes) == (1024, 5000 - 1024)
            assert late.ended == "wall"
            for path in ("../1/files/a", "/etc/passwd", "..", ""):
                with pytest.raises(SandboxError, match="not a path"):
                    sandbox.read(path)
            with pytest.raises(SandboxError, match="cannot be read") as missing:
                sandbox.read("missing")
            assert not isinstance(missing.value, SandboxLostError)
        with closing(open_sandbox(config(url))) as other:
            other.restore(snapshot)
            assert other.read("folder/a file") == b"\0\xff"
        with pytest.raises(SandboxLostError, match="closed"):
            sandbox.read("x")


def test_a_wrong_or_missing_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    with sandbox_server() as url:
        monkeypatch.setenv("TIDEMILL_SANDBOX_TOKEN", "another")
        with pytest.raises(UserError, match=r"refuses \(401\): wrong or missing key"):
            check_sandbox(config(url))
        monkeypatch.delenv("TIDEMILL_SANDBOX_TOKEN")
        with pytest.raises(UserError, match="the server's token is missing") as missing:
            check_sandbox(config(url))
    assert missing.value.where == "sandbox.token_env"


def test_a_server_that_never_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_S", 0.3)
    for listens in (True, False):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            if not listens:
                silent.close()
            with pytest.raises(UserError, match="the server does not answer"):
                check_sandbox(config(url))
