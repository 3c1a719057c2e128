"""Verdicts of people, in files that other processes write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.core.evidence import GoldPair
from tidemill.guard.verdicts import Verdict, VerdictFiles, text_digest
from tidemill.telemetry.jsonl import SharedLines, encode
from tidemill.telemetry.run_dir import samples_name
from tidemill.telemetry.sample_files import write_samples


def write_step(run: Path, step: int, completions: list[str]) -> None:
    (run / "samples").mkdir(exist_ok=True)
    lines = [{"step": step, "prompt_id": "p", "index": at, "completion": text} for at, text in enumerate(completions)]
    write_samples(run / "samples" / samples_name(step), lines)


def verdict(step: int = 1, index: int = 0, completion: str = "a", **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "run_id": "r",
        "step": step,
        "prompt_id": "p",
        "index": index,
        "completion": text_digest(completion),
        "reward": 0.9,
        "verdict": 0.0,
    }
    return Verdict(**(fields | changes))


def append(run: Path, line: Verdict, who: str = "ada") -> None:
    SharedLines(run / "checks" / f"{who}.jsonl").append(line)


def opened(run: Path, **options: Any) -> VerdictFiles:
    return VerdictFiles(run / "checks", "r", **({"warn": print} | options))


def pair(step: int = 1, index: int = 0, gold: float = 0.0) -> GoldPair:
    return GoldPair(prompt_id="p", index=index, step=step, proxy=0.9, gold=gold, source="person")


def test_each_verdict_is_returned_once_also_after_a_resume(tmp_path: Path) -> None:
    write_step(tmp_path, 1, ["a", "b"])
    files = opened(tmp_path)
    assert files.new_pairs() == []  # no folder yet
    append(tmp_path, verdict())
    first = files.new_pairs()
    assert first == [pair()]
    append(tmp_path, verdict(index=1, completion="b", verdict=1.0), "bob")
    append(tmp_path, verdict())  # again
    assert files.new_pairs() == [pair(index=1, gold=1.0)]
    assert opened(tmp_path, journalled=first).new_pairs() == [pair(index=1, gold=1.0)]


def test_a_person_may_change_their_mind(tmp_path: Path) -> None:
    write_step(tmp_path, 1, ["a"])
    append(tmp_path, verdict())
    files = opened(tmp_path)
    files.new_pairs()
    append(tmp_path, verdict(verdict=1.0))
    assert files.new_pairs() == [pair(gold=1.0)]


LEFT_OUT: list[tuple[bytes, str]] = [
    (encode(verdict(run_id="s")), "a verdict is on a sample of another run (s)"),
    (encode(verdict(verdict=1.5)), "a line is no verdict (Expected `float` <= 1.0 - at `$.verdict`)"),
    (encode(verdict(reward=float("inf"))), "a line is no verdict"),
    (b'{"run_id": "r"}', "a line is no verdict"),
    (b'["r"]', "a line is no verdict (Expected `object`"),
    (b'{"run_id": "r", "st', "a line is no verdict (Expected `object`"),  # torn, before another line
    (b"\xff\xfe", "a line is no verdict (Expected `object`"),
]


@pytest.mark.parametrize(("line", "words"), LEFT_OUT)
def test_other_lines_are_left_out_with_one_message(tmp_path: Path, line: bytes, words: str) -> None:
    write_step(tmp_path, 1, ["a"])
    checks = tmp_path / "checks"
    checks.mkdir()
    warnings: list[str] = []
    files = opened(tmp_path, warn=warnings.append)
    (checks / "eve.jsonl").write_bytes(b"\n".join([line, line, encode(verdict())]) + b"\n")
    assert files.new_pairs() == [pair()]
    with (checks / "eve.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert files.new_pairs() == []
    (message,) = warnings
    assert message.startswith(f"warning: checks/eve.jsonl: {words}")


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    write_step(tmp_path, 1, ["a"])
    checks = tmp_path / "checks"
    checks.mkdir()
    line, warnings = encode(verdict()), list[str]()
    (checks / "ada.jsonl").write_bytes(line[:20])
    files = opened(tmp_path, warn=warnings.append)
    assert files.new_pairs() == []
    (checks / "ada.jsonl").write_bytes(line + b"\n")
    assert files.new_pairs() == [pair()]
    assert warnings == []


def test_a_verdict_counts_only_for_the_text_that_was_seen(tmp_path: Path) -> None:
    append(tmp_path, verdict(step=7, completion="before"))
    append(tmp_path, verdict(step=8, completion="kept"))
    files = opened(tmp_path)
    assert files.new_pairs() == []  # the run returned to an earlier step
    write_step(tmp_path, 7, ["after"])
    assert files.new_pairs() == []
    write_step(tmp_path, 8, ["kept"])  # the same again, as after a kill
    assert files.new_pairs() == [pair(step=8)]
