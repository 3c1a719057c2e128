from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted import planted, spec_of
from tests.unit.cli.conftest import Run
from tidemill.cli.forecasting import value
from tidemill.hardware.run_profile import kept_path, read_profile


def test_a_directory_without_a_run(run: Run, tmp_path: Path) -> None:
    ran = run("calibrate", str(tmp_path), "--json")
    assert ran.code == 2
    assert "no run there" in ran.data["error"]["message"]


def test_the_profile_is_kept_and_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    profile = planted(spec_of())
    monkeypatch.setattr("tidemill.cli.forecasting.fitted", lambda _: profile)
    ran = run("calibrate", "somewhere", "--out", str(tmp_path / "profile.json"), "--json")
    assert ran.data["files"] == [str(kept_path(profile)), str(tmp_path / "profile.json")]
    assert [read_profile(Path(file)) for file in ran.data["files"]] == [profile, profile]
    out = run("calibrate", "somewhere").out
    assert "a step took 1 s of wall time (± 0) and 0.75 s of CPU time" in " ".join(out.split())
    assert "an optimizer step" in out
    assert "300 ms" in out


def test_a_profile_that_cannot_be_written_out_is_not_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    profile = planted(spec_of())
    monkeypatch.setattr("tidemill.cli.forecasting.fitted", lambda _: profile)
    for out, said in {".": "is a directory", "file/profile.json": "cannot write the profile: "}.items():
        ran = run("calibrate", "somewhere", "--out", out)
        assert ran.code == 2
        assert f"error: --out {out}: {said}" in ran.err
        assert not kept_path(profile).exists()
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "file"))
    ran = run("calibrate", "somewhere")
    assert ran.code == 2
    assert "set TIDEMILL_CACHE" in ran.err


def test_times_as_people_read_them() -> None:
    assert [value(number, "s") for number in (2.5, 0.0125, 3.2e-5, 0.0)] == ["2.5 s", "12.5 ms", "32 µs", "0"]
    assert value(17.25, "tokens") == "17.2 tokens"
