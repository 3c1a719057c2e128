"""Ratios out of turns."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import tidemill
from benchmarks import measuring
from benchmarks.measuring import compare, earlier_parts, exit_code, report, write_part
from benchmarks.turns import SideResult, Turn, Work

WORK = Work(samples=4, prompt_tokens=40, completion_tokens=12)


def side(*seconds: tuple[float, float]) -> SideResult:
    turns = [Turn(wall_s=wall, cpu_s=cpu, work=WORK, notes={}) for wall, cpu in seconds]
    return SideResult(turns=turns, peak_rss_bytes=7)


@pytest.mark.parametrize(("package", "shown"), [("tidemill", tidemill.__version__), ("transformers", None)])
def test_a_checkout_without_metadata_has_its_own_version(
    package: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return "7"

    monkeypatch.setattr(measuring, "version", version)
    assert measuring.machine()[package] == shown
    assert measuring.machine()["torch"] == "7"


def test_the_ratio_is_the_median_of_the_rounds_in_cpu_time() -> None:
    ours = side((2.0, 1.0), (1.0, 1.0), (1.0, 2.0))
    theirs = side((8.0, 4.0), (6.0, 3.0), (9.0, 2.0))

    result = compare("case", ours, theirs, target=3.0, more=1)

    # CPU: 4/1, 3/1, 2/2 -> median 3. Wall: 8/2, 6/1, 9/1 -> median 6.
    assert (result.speedup, result.speedup_low, result.speedup_high) == (3.0, 1.0, 4.0)
    assert result.speedup_wall == 6.0
    assert (result.ours_s, result.theirs_s) == (1.0, 8.0)
    assert (result.ours_cpu_s, result.theirs_cpu_s) == (1.0, 3.0)
    assert result.reached is True
    assert result.details["completion_tokens"] == 12
    assert result.details["more"] == 1


def test_a_missed_target_is_not_reached() -> None:
    assert compare("case", side((1, 1)), side((2, 2)), target=2.5).reached is False
    assert compare("case", side((1, 1)), side((2, 2)), target=None).reached is None


def test_sides_with_different_numbers_of_rounds_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare("case", side((1, 1)), side((2, 2), (2, 2)), target=None)


def test_a_report_without_a_case_fails() -> None:
    with pytest.raises(RuntimeError, match="no case was measured"):
        report("generation-partial", [], theirs="TRL")


def test_a_report_says_whether_a_target_was_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    missed, reached, none = (compare("case", side((1, 1)), side((2, 2)), target=target) for target in (2.5, 2.0, None))
    assert report("speed", [reached, none], theirs="TRL") is True
    assert report("speed", [missed, reached, none], theirs="TRL") is False


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ({"cases": [{"reached": True}, {"reached": None}]}, 0),
        ({"cases": [{"reached": True}, {"reached": False}]}, 1),
        ({"aim": {"memory_reached": False}}, 1),
        ({"reached": {"faster": True, "smaller": False}}, 1),
        ({"reached_by": 0, "smaller": False}, 0),
        ({"by lag": {0: {"reached": False}}}, 1),
    ],
)
def test_a_missed_aim_is_a_failure(content: dict[str, object], code: int) -> None:
    assert exit_code(content) == code


def test_parts_that_are_not_measured_stay_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    path, parts = tmp_path / "speed.json", ("first", "second")
    path.write_text(json.dumps({"origin": {"commit": "a"}, "first": {"s": 1}, "second": {"s": 1}, "other": 1}))
    for commit in ("b", "c"):
        monkeypatch.setattr(measuring, "origin", lambda commit=commit: {"commit": commit})
        write_part("speed", "second", {"s": 2}, parts=parts)
        found = json.loads(path.read_text())
        assert "other" not in found
        assert found["first"] == {"s": 1, "origin": {"commit": "a"}}
        assert (found["second"]["s"], found["second"]["origin"], found["origin"]) == (2, *2 * [{"commit": commit}])
    assert earlier_parts("absent", parts) == {}
