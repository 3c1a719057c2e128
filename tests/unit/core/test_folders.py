from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.folders import another_directory, cache_dir


def test_the_hint_for_another_run_names_a_free_directory(tmp_path: Path) -> None:
    for name in ("sft", "sft-2"):
        (tmp_path / name).mkdir()
    assert another_directory(tmp_path / "sft") == f"choose another --run.dir, such as {tmp_path / 'sft-3'}"


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEMILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache/tidemill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg/tidemill"
    monkeypatch.setenv("TIDEMILL_CACHE", "~/models")
    assert cache_dir() == tmp_path / "models"
