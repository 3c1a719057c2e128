from __future__ import annotations

from typing import Any

import pytest

from tidemill.telemetry.guard_history import guard_figures, guard_history, guard_sentences, smoothed_gold


def gold(step: int, mean: float, pairs: int = 8, missing: int = 0) -> dict[str, Any]:
    why = "no answer" if missing else ""
    fields = {"pairs": pairs, "gold_mean": mean, "missing": missing, "why_missing": why, "proxy_mean": 0.5}
    return {"event": "gold", "step": step} | fields


def decision(number: int, step: int, action: str, target: int = 0) -> dict[str, Any]:
    fields = {"step": step, "action": action, "target": target, "onset": 4, "reason": "R. S.", "test": "gap"}
    return {"event": "guard", "number": number, "time": "2026-11-27T10:00:00.000Z", "session": 1} | fields


def test_a_rollback_moves_later_steps_away_and_the_run_replaces_them() -> None:
    events = [gold(step, step / 10) for step in range(1, 7)]
    events += [decision(1, 6, "rollback", target=3), gold(4, 0.9), gold(5, 0.9)]
    events.append(decision(1, 6, "rollback", target=3))  # a session that was killed before it acted decides again
    history = guard_history(events)
    assert {step: event["gold_mean"] for step, event in history.gold.items()} == {
        1: 0.1, 2: 0.2, 3: 0.3, 4: 0.9, 5: 0.9,
    }  # fmt: skip
    assert {step: event["gold_mean"] for step, event in history.abandoned.items()} == {4: 0.4, 5: 0.5, 6: 0.6}
    assert [one["number"] for one in history.decisions] == [1]


@pytest.mark.parametrize("event", [{"event": "resume", "step": 1}, decision(1, 3, "warn"), decision(1, 3, "pause")])
def test_other_events_leave_the_scores_in_place(event: dict[str, Any]) -> None:
    """The evidence of a resumed run is in its journal, and its scores are not logged again."""
    history = guard_history([gold(1, 0.1), gold(2, 0.2), event])
    assert (list(history.gold), list(history.abandoned)) == ([1, 2], [])


def test_gold_is_smoothed_by_pairs() -> None:
    # Step 1: steps 1 to 3 of 1 to 5; step 2 has no pairs. (8 · 0.5 + 2 · 1) / 10 = 0.6. Step 6: 3 pairs of its own.
    scores = {1: gold(1, 0.5, 8), 2: gold(2, 0.0, 0, 8), 3: gold(3, 1.0, 2), 6: gold(6, 0.25, 3)}
    assert smoothed_gold(scores) == {1: pytest.approx(0.6), 3: pytest.approx(0.6), 6: 0.25}


def test_the_figures_of_a_summary_and_its_last_lines() -> None:
    health = {
        "event": "worker_health",
        "worker": "w2",
        "machine": "node-7",
        "lease": "l2",
        "value": 0.31,
        "limit": 0.05,
    }
    events = [
        {"event": "guard_probe", "probe": "echo", "score": 1.0, "typical": 0.2, "text": "What?", "session": 1},
        gold(1, 0.5, 6, missing=2),
        gold(2, 0.5, 8),
        decision(1, 2, "stop"),
        health | {"state": "suspect", "cause": "a probe differs"},
        health | {"state": "quarantined", "cause": "wrong tokens"},
        health | {"state": "quarantined", "cause": "again"},
        {"event": "worker_health", "worker": "w3", "state": "suspect", "cause": "slow"},
    ]
    figures = guard_figures(guard_history(events))
    fields = {"step": 2, "action": "stop", "target": 0, "onset": 4, "reason": "R. S.", "test": "gap"}
    assert figures == {
        "guard": {
            "decisions": [{"number": 1, **fields}],
            "probes": [{"probe": "echo", "score": 1.0, "typical": 0.2, "text": "What?"}],
        },
        "gold": {"measured": 14, "missing": 2, "share": 0.875, "why_missing": "no answer"},
        "machines": {
            "quarantined": [
                {"machine": "node-7", "worker": "w2", "lease": "l2", "cause": "wrong tokens (0.310, limit 0.050)"}
            ]
        },
    }
    assert guard_sentences(figures) == [
        "guard, step 2: the reward rises and quality does not since about step 4; the run stops",
        "quarantined: node-7 (wrong tokens (0.310, limit 0.050))",
    ]


def test_a_run_without_guards_has_no_figures() -> None:
    assert guard_figures(guard_history([{"event": "resume", "step": 3}])) == {}
    assert guard_sentences({}) == []


def test_a_run_without_any_score_says_that_all_are_missing() -> None:
    figures = guard_figures(guard_history([gold(1, 0.0, 0, missing=8)]))
    assert figures["gold"] == {"measured": 0, "missing": 8, "share": 0.0, "why_missing": "no answer"}
    assert smoothed_gold({1: gold(1, 0.0, 0, 8)}) == {}
