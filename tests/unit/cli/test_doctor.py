from __future__ import annotations

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.cli.test_findings import FACTS, changed

HEADER = {"python": "3.11.0", "system": "Linux"}


def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.cli.doctor.gather", lambda _: FACTS | HEADER)
    ran = run("doctor")
    assert ran.code == 0
    assert ran.out.startswith("Python 3.11.0 on Linux")
    assert 'optional: pip install "wandb>=' in ran.out
    data = run("doctor", "--json").data
    assert data["usable"] is True
    assert data["machine"]["cpu"]["cores"] == 4


def test_an_unusable_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = changed("torch", {"error": "ImportError [x]"}) | HEADER
    monkeypatch.setattr("tidemill.cli.doctor.gather", lambda _: facts)
    ran = run("doctor", "--json")
    assert ran.code == 2
    assert ran.data["usable"] is False
    assert "ImportError [x]" in run("doctor").out  # brackets are no markup
