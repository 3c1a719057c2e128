"""A configuration sent to another process means the same in another working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.config.schema import RunSpec
from tidemill.runtime.cluster.ray_calls import spec_to_send


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "critic"):
        (tmp_path / name).mkdir()
    spec = RunSpec.model_validate({"model": {"source": "policy"}, "critic": {"source": "critic"}})
    sent = RunSpec.model_validate_json(spec_to_send(spec, Path("policy")))
    assert (sent.model.source, sent.critic.source) == (str(tmp_path / "policy"), str(tmp_path / "critic"))


def test_hub_names_are_unchanged(tmp_path: Path) -> None:
    spec = RunSpec.model_validate({"model": {"source": "char"}, "critic": {"source": "smollm2-135m"}})
    sent = RunSpec.model_validate_json(spec_to_send(spec, tmp_path))
    assert (sent.model.source, sent.critic.source) == ("char", "smollm2-135m")
