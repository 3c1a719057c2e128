from __future__ import annotations

from typing import Any

import pytest

from tests.fabricated_run import FakeClock
from tidemill.telemetry.events import EVENTS, FLEET_EVENTS, event_text
from tidemill.telemetry.progress_views import LINES, WINDOW_S, FleetLines

EVICTED = {"lease": "l3", "worker": "spot-3", "noticed": False, "samples": 5, "tokens_kept": 1210, "tokens_lost": 0}


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("join", {"duration_s": 4.21}, "spot-3 joined after 4.2 s"),
        ("join", {"duration_s": 4.21, "error": "WorkerLost"}, ""),
        ("notice", {"grace_s": 30, "cause": "SIGTERM"}, "spot-3 will be evicted in 30 s (SIGTERM)"),
        ("drain", {"samples": 1}, "draining spot-3: 1 sample in flight"),
        ("eviction", EVICTED, "evicted spot-3 without notice: 5 samples move to other workers, 1,210 tokens kept"),
        (
            "eviction",
            EVICTED | {"samples": 1, "tokens_lost": 37, "cause": "silent"},
            "evicted spot-3 without notice: 1 sample moves to other workers, 1,210 tokens kept, 37 lost (silent)",
        ),
        (
            "eviction",
            EVICTED | {"noticed": True, "cause": "SIGTERM"},
            "evicted spot-3 after notice: 5 samples move to other workers, 1,210 tokens kept",
        ),
        ("eviction", {"samples": 0}, "evicted spot-3 without notice: no samples in flight"),
        ("eviction", {"samples": 0, "chunks": 2}, "evicted spot-3 without notice: 2 chunks for other workers"),
        ("join_failed", {"cause": "no answer in 300 s"}, "spot-3 failed to start (no answer in 300 s)"),
        ("pull", {"version": 4, "retries": 2}, "spot-3 pulled version 4 after 2 damaged transfers"),
        ("pull", {"version": 4, "retries": 0}, ""),
        (
            "quarantine",
            {"difference": 0.31, "limit": 0.1},
            "quarantined spot-3: its logprobs differ from the trainer's by 0.310 (limit 0.100)",
        ),
        (
            "worker_health",
            {"state": "suspect", "machine": "node-7", "cause": "slow", "value": 1.4, "limit": 1.2},
            "spot-3 on node-7 is suspect: slow (1.400, limit 1.200)",
        ),
        ("worker_health", {"state": "probation", "cause": "a probe passed"}, "spot-3 is on probation: a probe passed"),
        ("lease", {}, ""),
        ("lease_end", {"cause": "the run ended"}, ""),
        ("decode", {"tokens": 5}, ""),
    ],
)
def test_event_text_of_fleet_events(name: str, fields: dict[str, Any], text: str) -> None:
    assert event_text(name, {"worker": "spot-3"} | fields) == text


def test_fleet_events_are_registered() -> None:
    assert set(EVENTS) >= FLEET_EVENTS


def test_many_evictions_are_summarised_in_one_line() -> None:
    clock = FakeClock()
    lines = FleetLines(clock)
    shown = [text for _ in range(LINES + 37) for text in lines.event("eviction", EVICTED)]
    assert len(shown) == LINES and lines.due() == []
    assert lines.event("join", {"worker": "spot-9", "duration_s": 1.0}) == []
    clock.pass_s(WINDOW_S)
    # 37 × 5 samples, 37 × 1210 tokens
    assert lines.event("join", {"worker": "spot-9", "duration_s": 1.0}) == [
        "also 1 join, 37 evictions: 185 samples move to other workers, 44,770 tokens kept",
        "spot-9 joined after 1.0 s",
    ]
    assert lines.due(closing=True) == []


def test_suppressed_events_are_summarised_at_the_end() -> None:
    lines = FleetLines(FakeClock())
    for _ in range(LINES + 2):
        lines.event("notice", {"worker": "spot-1", "grace_s": 5.0})
    assert lines.event("quarantine", {"worker": "spot-1", "difference": 1.0, "limit": 0.1}) != []
    assert lines.due(closing=True) == ["also 2 notices"]


def test_events_of_the_reserved_side_are_not_shown() -> None:
    lines = FleetLines(FakeClock())
    lines.event("lease", {"lease": "local", "worker": "local", "kind": "reserved"})
    assert lines.event("join", {"lease": "local", "worker": "local", "duration_s": 1.0}) == []


def test_the_health_of_workers_is_shown_for_reserved_ones_too_and_quarantine_always() -> None:
    lines = FleetLines(FakeClock())
    lines.event("lease", {"lease": "l0", "worker": "local", "kind": "reserved"})
    fields = {"lease": "l0", "worker": "local", "cause": "wrong tokens"}
    shown = [line for _ in range(LINES + 2) for line in lines.event("worker_health", fields | {"state": "suspect"})]
    assert shown == ["local is suspect: wrong tokens"] * LINES
    assert lines.event("worker_health", fields | {"state": "quarantined"}) == ["local is quarantined: wrong tokens"]
    assert lines.due(closing=True) == ["also 2 health changes"]
