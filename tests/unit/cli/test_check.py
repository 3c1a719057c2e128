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
    """A run with three samples, of which reward and gold disagree on the second."""
    folder = tmp_path / "made"
    (folder / "samples").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"format": 2, "run_id": "r"}', encoding="utf-8")
    rewards = '{ kind = "exact" }, { kind = "numeric", name = "truth", role = "gold", weight = 0 }'
    (folder / "config.toml").write_text(f"[scoring]\nrewards = [{rewards}]\n", encoding="utf-8")
    scores = ((0.0, 0.0, "bad"), (1.0, 0.0, "\x1b[2Jhacked"), (1.0, 1.0, "good"), (0.0, 0.0, "poor"))
    lines = [
        {
            "step": 3, "prompt_id": f"p{at}", "epoch": 1, "index": 2, "prompt": "1+1=", "completion": text,
            "reward": reward, "valid": True, "components": {"exact": reward, "truth": gold},
        }
        for at, (reward, gold, text) in enumerate(scores)
    ]  # fmt: skip
    write_samples(folder / "samples" / samples_name(3), lines)
    return folder


def types(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_verdicts_are_asked_for_and_stored(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, "perhaps", "r", "n", "s", "0.75", "q")
    ran = run("check", "made", "--who", "ada")
    assert ran.code == 0
    shown = ran.err.split("──")
    assert "hacked" in shown[2]  # the disagreement first
    assert "\\x1b[2Jhacked" in shown[2]
    assert shown[2].count("skip, q quit >") == 3
    assert shown[2].index("hacked") < shown[2].index("reward 1.000 (exact 1.000, truth 0.000)")
    lines = [json.loads(line) for line in (made / "checks" / "ada.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[0] | {"unix_s": 0} == {
        "run_id": "r", "step": 3, "prompt_id": "p1", "epoch": 1, "index": 2, "completion": lines[0]["completion"],
        "reward": 1.0, "verdict": 0.0, "who": "ada", "unix_s": 0,
    }  # fmt: skip
    assert ran.out.startswith("2 verdicts\npeople accept 38 % (95 %: ")  # (0 + 0.75) / 2
    pairs = VerdictFiles(made / "checks", "r").new_pairs()
    assert GoldPair(prompt_id="p1", index=2, step=3, proxy=1.0, gold=0.0, source="person") in pairs
    types(monkeypatch, "y", "y", "y")
    ran = run("check", "made", "--who", "bob")
    assert ran.err.count("[completion]") == 2  # the others have a verdict
    assert "4 verdicts" in ran.out
    assert "all samples have a verdict" in run("check", "made").err


def test_the_list_is_printed_for_other_tools(run: Run, made: Path) -> None:
    data = run("check", "made", "--n", "2", "--json").data
    assert [each["chosen_for"] for each in data["samples"]] == ["disagreement", "high reward"]
    first = data["samples"][0]
    (made / "checks").mkdir()
    line = json.dumps(first["line"] | {"verdict": 1})
    (made / "checks" / "tool.jsonl").write_text(f"{line}\n", encoding="utf-8")
    (pair,) = VerdictFiles(made / "checks", "r").new_pairs()
    assert (pair.gold, pair.proxy) == (1.0, 1.0)
    assert first["line"] not in [each["line"] for each in run("check", "made", "--json").data["samples"]]


def test_verdicts_of_another_run_do_not_count(run: Run, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types(monkeypatch, "y")
    run("check", "made", "--who", "ada")
    (made / "manifest.json").write_text('{"format": 2, "run_id": "s"}', encoding="utf-8")
    types(monkeypatch)
    ran = run("check", "made")
    assert "of another run (r); such lines are left out" in ran.err
    assert ran.out == "0 verdicts\n"


@pytest.mark.parametrize(
    ("file", "words"), [("manifest.json", "no run there"), ("samples/step_000003.jsonl", "no samples")]
)
def test_what_there_is_nothing_to_check_in(run: Run, made: Path, file: str, words: str) -> None:
    (made / file).unlink()
    ran = run("check", "made")
    assert ran.code == 2
    assert words in ran.err
