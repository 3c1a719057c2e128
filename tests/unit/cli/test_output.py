from __future__ import annotations

import io
import json
import os
import sys

import pytest

from tidemill.cli.output import Result, note, reserved_stdout, write_json, write_result


def test_non_finite_numbers_are_null_in_json() -> None:
    stream = io.StringIO()
    write_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1, None)}, "e": "é"}, stream)
    assert stream.getvalue() == '{"a": null, "b": [null, 1.5], "c": {"d": [1, null]}, "e": "é"}\n'


def test_text_and_nothing() -> None:
    stream = io.StringIO()
    write_result(Result(text="words"), stream, as_json=False)
    write_result(Result(), stream, as_json=False)
    assert stream.getvalue() == "words\n"


def test_results_as_json() -> None:
    stream = io.StringIO()
    write_result(Result(data={"a": 1}, text="words"), stream, as_json=True)
    assert json.loads(stream.getvalue()) == {"a": 1}


def test_a_stream_of_ones_own_is_kept_from_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    with reserved_stdout(True) as stream:
        print("noise")
        stream.write("result")
    assert mine.getvalue() == "result"
    assert capsys.readouterr().err == "noise\n"


def test_notes_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    note("working")
    assert capsys.readouterr() == ("", "working\n")


def test_the_file_descriptor_is_moved_and_restored(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(1, "w", encoding="utf-8", closefd=False) as process_stdout:
        monkeypatch.setattr(sys, "stdout", process_stdout)
        with reserved_stdout(True) as stream:
            os.write(1, b"a child's noise\n")
            stream.write("result\n")
        os.write(1, b"after\n")
    captured = capfd.readouterr()
    assert captured.out == "result\nafter\n"
    assert "a child's noise" in captured.err
