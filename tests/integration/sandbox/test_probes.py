"""Programs that try to leave a sandbox, as root and as another user."""

from __future__ import annotations

import pytest

from tests.integration.sandbox.probes import PROBES, WITHOUT_SANDBOX
from tests.sandboxes import need_bubblewrap, probe_results

pytestmark = pytest.mark.xdist_group("probes")


@pytest.mark.parametrize("user", ["this", "other"])
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_stays_in_the_sandbox(name: str, user: str) -> None:
    need_bubblewrap()

    printed = probe_results("bwrap", user, tuple(PROBES))[name]

    assert printed != "out"
    assert printed, "the probe did not run to its end"


@pytest.mark.parametrize("name", WITHOUT_SANDBOX)
def test_a_probe_gets_out_without_a_sandbox(name: str) -> None:
    assert probe_results("none", "this", WITHOUT_SANDBOX)[name] == "out"


def test_there_are_enough_probes() -> None:
    assert len(PROBES) >= 40
