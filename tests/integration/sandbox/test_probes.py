"""Programs that try to leave a sandbox, as root and as another user."""

from __future__ import annotations

import json
import subprocess
from functools import cache

import pytest

from tests.integration.sandbox.probes import PROBES, WITHOUT_SANDBOX
from tests.sandboxes import REPOSITORY, command_as, need_bubblewrap

pytestmark = pytest.mark.xdist_group("probes")
DEADLINE_S = 300.0


@cache
def results(backend: str, user: str, names: tuple[str, ...]) -> dict[str, str]:
    program = str(REPOSITORY / "tests/integration/sandbox/run_probes.py")
    command, environment = command_as(user, program, backend, json.dumps(names))
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("user", ["this", "other"])
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_stays_in_the_sandbox(name: str, user: str) -> None:
    need_bubblewrap()

    printed = results("bwrap", user, tuple(PROBES))[name]

    assert printed != "out"
    assert printed, "the probe did not run to its end"


@pytest.mark.parametrize("name", WITHOUT_SANDBOX)
def test_a_probe_gets_out_without_a_sandbox(name: str) -> None:
    assert results("none", "this", WITHOUT_SANDBOX)[name] == "out"


def test_there_are_enough_probes() -> None:
    assert len(PROBES) >= 40
