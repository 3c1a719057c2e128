from __future__ import annotations

from pathlib import Path

import tidemill
from tidemill.telemetry import manifest
from tidemill.telemetry.manifest import build_manifest, git_state, machine, versions, without_absolute_paths


def test_a_session_is_appended_to_the_manifest() -> None:
    first = build_manifest({}, run="demo", model="char", seed=3, unix_s=0.0, argv=["/usr/bin/tidemill", "train"])
    noted = {**first, "model_digest": "0123"}
    second = build_manifest(noted, run="demo", model="char", seed=3, unix_s=86400.5, argv=["tidemill", "train"])
    assert second["model_digest"] == "0123"  # fields added elsewhere stay
    assert second["created"] == first["created"] == "1970-01-01T00:00:00.000Z"
    assert second["run_id"] == first["run_id"]
    assert [session["started"] for session in second["sessions"]] == [
        "1970-01-01T00:00:00.000Z",
        "1970-01-02T00:00:00.500Z",
    ]
    assert second["sessions"][0]["argv"] == ["tidemill", "train"]
    assert (second["run"], second["model"], second["seed"]) == ("demo", "char", 3)


def test_absolute_paths_are_shortened_to_their_last_part() -> None:
    argv = ["/venv/bin/tidemill", "train", "@/home/me/a.toml", "@b.toml", "--run.dir", "/data/runs/x", "--run.dir=/y/z"]
    assert without_absolute_paths(argv) == [
        "tidemill",
        "train",
        "@…/a.toml",
        "@b.toml",
        "--run.dir",
        "…/x",
        "--run.dir=…/z",
    ]
    assert without_absolute_paths([]) == []


def test_versions_of_packages_are_recorded() -> None:
    found = versions()
    assert found["tidemill"] == tidemill.__version__ and found["numpy"]


def test_a_missing_git_checkout_is_not_an_error(tmp_path: Path) -> None:
    assert manifest._git(tmp_path, "rev-parse", "HEAD") is None
    state = git_state()
    assert state == {} or len(state["commit"]) >= 40


def test_the_machine_has_cores_and_memory() -> None:
    found = machine()
    assert found["cores"] >= 1 and found["memory_bytes"] > 1e8 and found["processor"]
