from __future__ import annotations

from typing import Any

import pytest

from tidemill.telemetry.guard_history import guard_figures, guard_history, guard_sentences


def gold(step: int, mean: float) -> dict[str, Any]:
    return {"event": "gold", "step": step, "pairs": 8, "gold_mean": mean, "proxy_mean": 0.5}


def decision(number: int, step: int, action: str, target: int = 0) -> dict[str, Any]:
    fields = {"step": step, "action": action, "target": target, "onset": 4, "reason": "R. S.", "test": "gap"}
    return {"event": "guard", "number": number, "time": "2026-11-27T10:00:00.000Z", "session": 1} | fields


def test_a_rollback_takes_later_steps_back_and_the_run_replaces_them() -> None:
    events = [gold(step, step / 10) for step in range(1, 7)]
    events += [decision(1, 6, "rollback", target=3), gold(4, 0.9), gold(5, 0.9)]
    events.append(decision(1, 6, "rollback", target=3))  # a session that was killed before it acted decides again
    history = guard_history(events)
    figures = history.by_step
    assert [figures[step]["gold_mean"] for step in range(1, 6)] == [0.1, 0.2, 0.3, 0.9, 0.9]
    assert figures[6] == {"lost_proxy": 0.5, "lost_gold": 0.6}
    assert [figures[step].get("lost_gold") for step in range(1, 6)] == [None, None, None, 0.4, 0.5]
    assert history.marks == [(4, "onset"), (6, "decided")]


@pytest.mark.parametrize("event", [{"event": "resume", "step": 1}, decision(1, 3, "warn"), decision(1, 3, "pause")])
def test_other_events_leave_the_scores_in_place(event: dict[str, Any]) -> None:
    """The evidence of a resumed run is in its journal, and its scores are not logged again."""
    history = guard_history([gold(1, 0.1), gold(2, 0.2), event])
    assert [figures["gold_mean"] for figures in history.by_step.values()] == [0.1, 0.2]


def test_the_figures_of_a_summary_and_its_last_lines() -> None:
    health = {"event": "worker_health", "worker": "w2", "machine": "node-7", "value": 0.31, "limit": 0.05}
    events = [
        decision(1, 2, "stop"),
        health | {"state": "suspect", "cause": "a probe differs"},
        health | {"state": "quarantined", "cause": "wrong tokens"},
        health | {"state": "quarantined", "cause": "again"},
        {"event": "worker_health", "worker": "w3", "state": "suspect", "cause": "slow"},
    ]
    figures = guard_figures(guard_history(events))
    fields = {"step": 2, "action": "stop", "target": 0, "onset": 4, "reason": "R. S.", "test": "gap"}
    assert figures == {
        "guard": [{"number": 1, **fields}],
        "machines": {"node-7": "wrong tokens (0.310, limit 0.050)"},
    }
    assert guard_sentences(figures) == [
        "guard, step 2: the reward rises and quality does not since about step 4; the run stops",
        "quarantined node-7: wrong tokens (0.310, limit 0.050)",
    ]


def test_a_run_without_guards_has_no_figures() -> None:
    assert guard_figures(guard_history([{"event": "resume", "step": 3}])) == {}
    assert guard_sentences({}) == []
