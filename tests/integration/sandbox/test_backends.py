"""The back-ends other than bubblewrap, and what happens where one does not work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.sandboxes import close_launchers, need_bubblewrap, skip
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.sandbox import local, open_sandbox
from tidemill.sandbox.open_sandbox import check_sandbox

RUNC = """\
#!/bin/sh
# Takes the place of runsc: runc runs the same bundles, with the kernel of the host.
exec runc --root "$2" run --bundle "$7" "$8"
"""


@pytest.fixture
def own_launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launchers that are started and ended by the test."""
    monkeypatch.setattr(local, "_launchers", {})
    yield
    close_launchers()


def test_a_bundle_for_gvisor_runs(own_launchers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()
    if shutil.which("runc") is None or os.getuid() != 0:
        skip("runc, which runs bundles in place of runsc, is not installed, or this is not root")
    (tmp_path / "runsc").write_text(RUNC)
    (tmp_path / "runsc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with closing(open_sandbox(SandboxConfig(backend="runsc"))) as sandbox:
        sandbox.write("given", b"6 * 7")
        finished = sandbox.run(
            ["python3", "-c", "import os; open('made', 'w').write('x'); print(eval(open('given').read()), os.getuid())"]
        )
        outside = sandbox.run(["python3", "-c", f"print(open({str(tmp_path / 'runsc')!r}).read())"])
        network = sandbox.run(["python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 1))"])
        late = sandbox.run(["sleep", "30"], timeout_s=0.5)

        assert finished.stdout == b"42 1000\n"
        assert sandbox.read("made") == b"x"
        assert b"FileNotFoundError" in outside.stderr
        assert b"refused" in network.stderr or b"unreachable" in network.stderr
        assert late.ended == "wall"


@pytest.mark.parametrize("backend", ["bwrap", "runsc"])
def test_a_back_end_that_is_not_installed_is_named(
    own_launchers: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(UserError, match=r"sandbox\.backend: .* is not installed") as caught:
        check_sandbox(SandboxConfig.model_validate({"backend": backend}))

    assert "install it" in caught.value.hint


def test_without_user_namespaces_the_reason_is_told(
    own_launchers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with pytest.raises(UserError, match="No permissions to create a new namespace"):
        check_sandbox(SandboxConfig())


def test_without_a_sandbox_a_warning_is_logged(own_launchers: None, caplog: pytest.LogCaptureFixture) -> None:
    check_sandbox(SandboxConfig(backend="none"))

    assert "runs with all rights of this user" in caplog.text
