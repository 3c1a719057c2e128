from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidemill.telemetry.control import Action, ControlFolder, ControlRequest, RunControl, new_request

Logged = list[dict[str, Any]]


def request(action: Action, **changes: Any) -> ControlRequest:
    made = new_request(action, run_id="run", session=2, by="command line")
    return msgspec.structs.replace(made, **changes)


def open_control(folder: Path, *, between_steps: bool = True) -> tuple[RunControl, Logged, list[str]]:
    logged, stops = Logged(), list[str]()
    control = RunControl(ControlFolder(folder), run_id="run", session=2, log=lambda **fields: logged.append(fields))
    control.attach(stops.append, between_steps=between_steps)
    return control, logged, stops


def send(control: RunControl, folder: Path, *actions: Action) -> None:
    for action in actions:
        ControlFolder(folder).write(request(action))
        control.poll()


def outcomes(logged: Logged) -> list[tuple[str, str]]:
    return [(line["action"], line["outcome"]) for line in logged]


@pytest.mark.parametrize(
    ("actions", "pauses", "expected"),
    [
        (["pause"], True, [("pause", "applied")]),
        (["checkpoint"], False, [("checkpoint", "applied")]),
        (["checkpoint", "pause"], True, [("checkpoint", "applied"), ("pause", "applied")]),
        (["pause", "pause"], True, [("pause", "ignored"), ("pause", "applied")]),
        (["pause", "resume"], False, [("pause", "ignored"), ("resume", "applied")]),
        (["pause", "resume", "pause"], True, [("pause", "ignored"), ("resume", "applied"), ("pause", "applied")]),
        (["resume"], False, [("resume", "ignored")]),
        (["stop", "stop"], False, [("stop", "applied")] * 2),
    ],
)
def test_requests_of_one_step(
    tmp_path: Path, actions: list[Action], pauses: bool, expected: list[tuple[str, str]]
) -> None:
    control, logged, stops = open_control(tmp_path)
    send(control, tmp_path, *actions)
    assert control.take_waiting() is pauses
    assert outcomes(logged) == expected
    assert len(stops) == actions.count("stop")
    assert not list((tmp_path / "control").iterdir())


@pytest.mark.parametrize(
    ("actions", "paused", "outcome"),
    [
        (["resume"], False, "applied"),
        (["pause"], True, "applied"),
        (["checkpoint"], True, "applied"),
        (["resume", "resume"], False, "ignored"),
    ],
)
def test_requests_while_the_run_is_paused(tmp_path: Path, actions: list[Action], paused: bool, outcome: str) -> None:
    control, logged, _ = open_control(tmp_path)
    send(control, tmp_path, "pause")
    control.take_waiting()
    send(control, tmp_path, *actions)
    assert (control.paused is not None) is paused
    assert logged[-1]["outcome"] == outcome


def test_a_second_pause_changes_the_hold_time(tmp_path: Path) -> None:
    control, _, _ = open_control(tmp_path)
    send(control, tmp_path, "pause")
    control.take_waiting()
    assert control.paused is not None and control.paused.hold_s == 600.0
    ControlFolder(tmp_path).write(request("pause", hold_s=10.0))
    control.poll()
    assert control.paused.hold_s == 10.0


@pytest.mark.parametrize(
    ("change", "age_s", "reason"),
    [
        ({"session": 1}, 0.0, "it is for session 1, and this is session 2"),
        ({"run_id": "other"}, 0.0, "it is for another run"),
        ({}, 3700.0, "it is older than 1:00:00"),
        ({}, -7200.0, ""),
    ],
)
def test_a_request_counts_by_session_and_by_the_clock_of_the_file_system(
    tmp_path: Path, change: dict[str, Any], age_s: float, reason: str
) -> None:
    control, logged, stops = open_control(tmp_path)
    made = request("stop", **change)
    ControlFolder(tmp_path).write(made)
    file = ControlFolder(tmp_path).file(made.request_id)
    written_s = file.stat().st_mtime
    os.utime(file, (written_s - age_s, written_s - age_s))
    control.poll()
    assert [line.get("reason", "") for line in logged] == [reason]
    assert len(stops) == (not reason)
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b'{"action":"stop"', b'{"action":"explode"}', b"\xff"])
def test_an_unreadable_request_is_deleted_and_logged(tmp_path: Path, content: bytes) -> None:
    control, logged, stops = open_control(tmp_path)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "a.json").write_bytes(content)
    control.poll()
    assert [(line["request"], line["outcome"]) for line in logged] == [("a", "ignored")]
    assert not stops and not (tmp_path / "control" / "a.json").exists()


def test_a_request_whose_file_cannot_be_deleted_is_applied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, logged, stops = open_control(tmp_path)
    ControlFolder(tmp_path).write(request("stop"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(3):
        control.poll()
    assert outcomes(logged) == [("stop", "applied")] and len(stops) == 1


def test_a_copy_of_a_request_is_not_applied_again(tmp_path: Path) -> None:
    control, logged, stops = open_control(tmp_path)
    made = request("stop")
    for name in ("own", "own", "copy"):
        ControlFolder(tmp_path).write(made)
        if name == "copy":
            ControlFolder(tmp_path).file(made.request_id).rename(tmp_path / "control" / "copy.json")
        control.poll()
    assert outcomes(logged) == [("stop", "applied"), ("stop", "ignored")] and len(stops) == 1


def test_a_pipe_a_link_or_a_file_that_is_withdrawn_does_not_disturb_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, logged, stops = open_control(tmp_path)
    folder = tmp_path / "control"
    folder.mkdir()
    os.mkfifo(folder / "a.json")
    (folder / "b.json").symlink_to(tmp_path / "absent")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*folder.iterdir(), folder / "withdrawn.json"])
    control.poll()
    assert not logged and not stops


def test_the_end_of_a_run_logs_what_still_waits(tmp_path: Path) -> None:
    control, logged, stops = open_control(tmp_path)
    send(control, tmp_path, "pause", "checkpoint")
    ControlFolder(tmp_path).write(request("resume"))
    control.close()
    assert outcomes(logged) == [("pause", "ignored"), ("resume", "applied"), ("checkpoint", "ignored")]
    ControlFolder(tmp_path).write(request("stop"))
    control.poll()
    assert not stops


def test_without_steps_of_its_own_a_run_only_stops(tmp_path: Path) -> None:
    control, logged, stops = open_control(tmp_path, between_steps=False)
    send(control, tmp_path, "pause", "checkpoint", "resume", "stop")
    assert [outcome for _, outcome in outcomes(logged)] == ["ignored"] * 3 + ["applied"] and len(stops) == 1
