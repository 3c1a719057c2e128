from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from tidemill.core.evidence import GoldPair
from tidemill.guard.verdicts import VerdictFiles
from tidemill.telemetry.run_dir import samples_name
from tidemill.telemetry.sample_files import write_samples


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A run with four samples, of which only the second has a high reward."""
    folder = tmp_path / "made"
    (folder / "samples").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"format": 3, "run_id": "r"}', encoding="utf-8")
    scores = ((0.0, "bad"), (1.0, "\x1b[2Jhacked"), (0.0, "worse"), (0.0, "poor"))
    lines = [
        {
            "step": 3, "prompt_id": f"p{at}", "index": 2, "prompt": "1+1=", "completion": text,
            "reward": reward, "valid": True,
        }
        for at, (reward, text) in enumerate(scores)
    ]  # fmt: skip
    write_samples(folder / "samples" / samples_name(3), lines)
    return folder


def types(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_verdicts_are_asked_for_and_stored(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, "perhaps", "n", "s", "0.75", "q")
    ran = run("check", "made")
    assert ran.code == 0
    assert ran.out == "2 new verdicts, 2 in all\n"
    shown = ran.err.split("──")
    assert "\\x1b[2Jhacked" in shown[2]
    assert shown[2].count("skip, q quit >") == 2
    assert shown[2].index("hacked") < shown[2].index("its reward is 1.000")
    file = made / "checks" / "verdicts.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {
        "run_id": "r", "step": 3, "prompt_id": "p1", "index": 2, "completion": lines[0]["completion"],
        "reward": 1.0, "verdict": 0.0,
    }  # fmt: skip
    pairs = VerdictFiles(made / "checks", "r", warn=print).new_pairs()
    assert GoldPair(prompt_id="p1", index=2, step=3, proxy=1.0, gold=0.0, source="person") in pairs
    types(monkeypatch, "y", "y", "y")
    ran = run("check", "made")
    assert ran.err.count("[completion]") == 2  # the others have a verdict
    assert ran.out == "2 new verdicts, 4 in all\n"
    assert "all samples have a verdict" in run("check", "made").err


def test_verdicts_of_another_run_do_not_count(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, "y")
    run("check", "made")
    (made / "manifest.json").write_text('{"format": 3, "run_id": "s"}', encoding="utf-8")
    types(monkeypatch)
    ran = run("check", "made")
    assert "of another run (r); such lines are left out" in ran.err
    assert ran.out == "0 new verdicts, 0 in all\n"


@pytest.mark.parametrize(
    ("file", "words"), [("manifest.json", "no run there"), ("samples/step_000003.jsonl", "no samples")]
)
def test_what_there_is_nothing_to_check_in(run: Run, made: Path, file: str, words: str) -> None:
    (made / file).unlink()
    ran = run("check", "made")
    assert ran.code == 2
    assert words in ran.err
