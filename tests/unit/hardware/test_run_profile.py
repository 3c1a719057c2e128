from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.planted import planted, spec_of
from tidemill.core.errors import UserError
from tidemill.hardware.run_profile import (
    cost_settings,
    kept_path,
    kept_profiles,
    read_profile,
    setting_differences,
    write_profile,
)
from tidemill.planner.calibration.run_observations import observe

CHAR = {"source": "char"}


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = planted(spec_of())
    write_profile(profile, tmp_path / "new" / "profile.json")
    assert read_profile(tmp_path / "new" / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b'"format": 2', b'"format": 9'),
        (b'"steps"', b'"stepz"'),
        (b'"engine_pass_s"', b'"engine_pace_s"'),
        (b"{", b""),
    ],
)
def test_an_invalid_profile_is_refused(tmp_path: Path, change: bytes, words: bytes) -> None:
    path = tmp_path / "profile.json"
    write_profile(planted(spec_of()), path)
    path.write_bytes(path.read_bytes().replace(change, words, 1))
    with pytest.raises(UserError, match="profile"):
        read_profile(path)


def test_invalid_profiles_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    profile = planted(spec_of())
    write_profile(profile, kept_path(profile))
    folder = tmp_path / "profiles"
    (folder / "damaged.json").write_text("{")
    (folder / "dangling.json").symlink_to(folder / "gone")
    (folder / "folder.json").mkdir()
    assert kept_profiles({"processor": "Abacus", "cores": 2}) == [profile]


def test_the_newest_of_this_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path))
    profile = planted(spec_of())
    other = msgspec.structs.replace(profile, machine=msgspec.structs.replace(profile.machine, processor="Slide rule"))
    for each in (profile, other, msgspec.structs.replace(profile, run="newer")):
        write_profile(each, kept_path(each))
    (tmp_path / "profiles" / "torn.json").write_text("{")
    assert [each.run for each in kept_profiles({"processor": "Abacus", "cores": 2})] == ["newer"]
    assert kept_profiles({"processor": "Abacus", "cores": 3}) == []


def test_a_run_of_another_kind_is_recognised() -> None:
    profile = planted(spec_of())
    assert setting_differences(profile, spec_of(steps=9, batch={"prompts": 9, "group_size": 2})) == []
    assert setting_differences(profile, spec_of(engine={"batch_invariant": True})) == [
        "engine.batch_invariant is True, and the profile was measured with False"
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": CHAR | {"char": {"layers": 9}}}, "model.char.layers"),
        ({"model": CHAR | {"lora": {"rank": 8}}}, "model.lora.rank"),
        ({"model": CHAR, "trainer": {"activation_checkpointing": True}}, "trainer.activation_checkpointing"),
    ],
)
def test_a_model_of_another_shape_is_another_kind(changes: dict[str, Any], named: str) -> None:
    found = setting_differences(planted(spec_of(model=CHAR)), spec_of(**changes))
    assert found[0].startswith(f"{named} is ")


def test_seeds_and_unused_settings_make_no_difference() -> None:
    assert setting_differences(planted(spec_of(model=CHAR)), spec_of(model=CHAR | {"char": {"seed": 5}})) == []
    hub = {"source": "org/model", "char": {"layers": 9}}
    assert not any("char." in name for name in cost_settings(spec_of(model=hub)))


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "no run there"),
        ("".join(f'{{"step": {step}, "time_step_s": 1}}\n' for step in range(1, 3)), "2 timed steps"),
        ("".join(f'{{"step": {step}, "time_step_s": "1"}}\n' for step in range(1, 9)), "0 timed steps"),
        (
            "".join(f'{{"step": {step}, "time_step_s": 1, "session": {step}}}\n' for step in range(1, 9)),
            "8 timed steps",
        ),
        ("".join(f'{{"step": {step}, "time_step_s": 1}}\n' for step in range(1, 4)), "no measurements"),
    ],
)
def test_a_run_with_too_few_events_is_refused(tmp_path: Path, metrics: str | None, words: str) -> None:
    if metrics is not None:
        (tmp_path / "config.toml").write_text("")
        (tmp_path / "metrics.jsonl").write_text(metrics)
    with pytest.raises(UserError, match=words):
        observe(tmp_path)
