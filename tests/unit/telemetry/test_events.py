from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.telemetry.events import event_line, event_text, past_sessions, read_events, timestamp


def test_time_stamps_are_utc_with_milliseconds() -> None:
    assert timestamp(1_700_000_000.1234) == "2023-11-14T22:13:20.123Z"


def test_an_event_line_starts_with_its_header_and_keeps_all_fields() -> None:
    line = event_line("publish", {"version": 3, "session": "mine"}, unix_s=0.0, session=2, elapsed_s=1.23456)
    assert line == {
        "time": "1970-01-01T00:00:00.000Z",
        "session": 2,
        "elapsed_s": 1.235,
        "event": "publish",
        "version": 3,
        "session_": "mine",
    }


def test_wall_time_adds_up_over_sessions(tmp_path: Path) -> None:
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl"
    events.write_text(
        '{"event":"session_start","session":1,"elapsed_s":0.0,"earlier_wall_s":0}\n'
        '{"event":"rollout","session":1,"elapsed_s":10.0}\n'
        '{"event":"session_start","session":2,"elapsed_s":0.1,"earlier_wall_s":12.5,"pid":7}\n'
        '{"event":"rollout","session":2,"elapsed_s":3.0}\n'
    )
    # Session 1 lasted 12.5 s (its last metrics line was rewound); session 2 so far 4.5 s by its metrics: 17.0 s.
    metrics.write_text('{"step":1,"session":1,"elapsed_s":9.0}\n{"step":2,"session":2,"elapsed_s":4.5}\n')
    past = past_sessions(events, metrics)
    assert (past.count, past.wall_s, past.last["pid"]) == (2, 17.0, 7)


def test_a_new_run_has_no_past(tmp_path: Path) -> None:
    past = past_sessions(tmp_path / "events.jsonl", tmp_path / "metrics.jsonl")
    assert (past.count, past.wall_s, past.last) == (0, 0.0, {})


def test_lines_without_an_event_name_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"resume","step":1}\n{"step":2}\n{"event":3}\n')
    assert read_events(path) == [{"event": "resume", "step": 1}]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"training": 1, "held_out": 0}, "data: 1 training row, 0 held out"),
        (
            {
                "training": 12,
                "held_out": 3,
                "left_out": {"repeated": 3, "too_long": 1},
                "rows": 19,
                "missing": {"a": 2},
            },
            "data: 12 training rows, 3 held out; left out: 3 repeated, 1 too long; without a value: a in 2 of 19 rows",
        ),
        (
            {"training": 9, "held_out": 1, "missing": dict.fromkeys("abcdef", 1), "rows": 9},
            (
                "data: 9 training rows, 1 held out; "
                "without a value: a in 1, b in 1, c in 1, d in 1, e in 1, 1 more of 9 rows"
            ),
        ),
        (
            {"training": 9, "held_out": 1, "warnings": ["w", "v"]},
            "data: 9 training rows, 1 held out\nwarning: w\nwarning: v",
        ),
    ],
)
def test_the_rows_of_a_run_are_one_line_and_its_warnings(fields: dict[str, Any], text: str) -> None:
    assert event_text("data", fields) == text


DECISION = {"number": 1, "step": 17, "onset": 12, "test": "gain", "reason": "Proxy rose. Gold fell.", "target": 10}


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("guard", DECISION | {"action": "rollback"}, "the run returns to step 10. Proxy rose. Gold fell."),
        ("guard", DECISION | {"action": "rollback", "target": 0}, "the run returns to the initial model. Proxy rose."),
        ("guard", DECISION | {"action": "warn"}, "the run continues. Proxy rose."),
        ("guard", DECISION | {"action": "pause"}, "the run pauses. Proxy rose."),
        ("guard", DECISION | {"action": "stop"}, "the run stops. Proxy rose."),
        (
            "guard_probe",
            {"probe": "empty", "score": 1.0, "typical": 0.4},
            "guard: the reward likes a text that it should not (empty): score 1.000, typical 0.400",
        ),
        (
            "gold",
            {"step": 3, "pairs": 0, "missing": 8, "why_missing": "no answer"},
            "guard: blind in step 3, no gold score arrived (no answer)",
        ),
        ("gold", {"step": 3, "pairs": 7, "missing": 1, "why_missing": "no answer"}, ""),
    ],
)
def test_what_the_reward_guard_sees_and_decides_is_one_line(name: str, fields: dict[str, Any], text: str) -> None:
    if name == "guard":
        text = f"guard: the reward rises and quality does not since about step 12; {text}"
        assert event_text(name, fields).startswith(text)
    else:
        assert event_text(name, fields) == text
