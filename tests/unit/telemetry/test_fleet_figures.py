"""A run of two sessions, the first killed after 60 s, with figures computed by hand.

```
s     0        10        20        30        40        50        60 | 0        10        20        30        40
local |---- decode 300 ----------|                                  |       |---- decode 100 ----|
a     [ lease 0.9 $/h                 evicted 40]                   |
b         [ lease 10 .. never ended, 1.8 $/h                        ]
c                                                                   |[ lease 0 .. end 30, says 0.02 $ ]
```
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidemill.telemetry.events import DECODE, TRAINING
from tidemill.telemetry.fleet_figures import (
    covered_s,
    decode_figures,
    evictions_sentence,
    fleet_figures,
    held_leases,
    reserved_only,
    sessions_of,
)
from tidemill.telemetry.metrics import MetricLine


def line(name: str, session: int, elapsed_s: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "session": session, "elapsed_s": elapsed_s, **fields}


def lease(session: int, at_s: float, name: str, price: float, kind: str = "preemptible") -> dict[str, Any]:
    return line("lease", session, at_s, lease=name, worker=f"spot-{name}", kind=kind, price_usd_per_hour=price)


def decode(session: int, at_s: float, name: str, kind: str, tokens: int, duration_s: float) -> dict[str, Any]:
    return line("decode", session, at_s, lease=name, kind=kind, tokens=tokens, samples=1, duration_s=duration_s)


EVENTS = [
    line("session_start", 1, 0.0, earlier_wall_s=0.0),
    lease(1, 0.0, "local", 0.0, kind="reserved"),
    line("join", 1, 0.5, lease="local", duration_s=0.5),
    lease(1, 0.0, "a", 0.9),
    line("join", 1, 4.0, lease="a", duration_s=4.0),
    lease(1, 10.0, "b", 1.8),
    line("join", 1, 12.0, lease="b", error="WorkerLost", duration_s=2.0),
    decode(1, 20.0, "local", "reserved", 300, 20.0),
    line("notice", 1, 38.0, lease="a", grace_s=2.0),
    line("drain", 1, 39.0, lease="a", samples=4),  # it finished one of them
    line("migration", 1, 39.1, lease="a", to_worker="spot-b", samples=3, tokens_kept=20),
    decode(1, 40.0, "a", "preemptible", 500, 30.0),
    line("eviction", 1, 40.0, lease="a", noticed=True, samples=1, tokens_kept=20, tokens_lost=0),
    # 40 s / 3600 × 0.9 $/h = 0.01 $
    line("lease_end", 1, 40.0, lease="a", kind="preemptible", evicted=True, held_s=40.0, cost_usd=0.01, tokens=500),
    line("migration", 1, 40.1, lease="a", to_worker="local", samples=1, tokens_kept=7),
    line("rebalance", 1, 45.0, from_worker="spot-b", to_worker="local", samples=5),
    line("migration", 1, 45.5, lease="b", to_worker="local", samples=2, tokens_kept=9),
    line("rollout", 1, 55.0, step=2),
    line("session_start", 2, 0.0, earlier_wall_s=60.0),
    line("resume", 2, 0.0, step=1, tokens_recomputed=70),
    lease(2, 0.0, "c", 2.4),
    line("join", 2, 1.0, lease="c", duration_s=1.0),
    decode(2, 30.0, "local", "reserved", 100, 20.0),
    line("eviction", 2, 30.0, lease="c", noticed=False, samples=3, tokens_kept=25, tokens_lost=6),
    line("migration", 2, 30.1, lease="c", to_worker="local", samples=2, tokens_kept=15),  # the run ended first
    line("lease_end", 2, 30.0, lease="c", kind="preemptible", evicted=True, held_s=30.0, cost_usd=0.02, tokens=0),
    line("crash", 2, 30.5, lease="e", samples=1, tokens_kept=4, tokens_lost=5),
    line("quarantine", 2, 31.0, lease="d", difference=0.3, limit=0.1),
    line("session_end", 2, 40.0),
]


def metric(step: int, session: int, elapsed_s: float, **values: float) -> MetricLine:
    return MetricLine(
        step=step, policy_version=step, weights_digest="", optimizer_steps=1, session=session, elapsed_s=elapsed_s,
        values=values,
    )  # fmt: skip


METRICS = [metric(1, 1, 50.0, tokens_recomputed=11.0), metric(2, 2, 20.0, tokens_recomputed=5.0)]


def figures(events: list[dict[str, Any]] = EVENTS, price: float = 3.6, wall_s: float = 100.0) -> dict[str, Any]:
    return fleet_figures(events, METRICS, wall_s=wall_s, tokens_trained=450, reserved_usd_per_hour=price)


def test_sessions_follow_one_another() -> None:
    found = sessions_of(EVENTS, METRICS)
    # Session 1's last event is at 55 s; session 2 logged that session 1 ended at 60 s.
    assert [(one.start_s, one.end_s, one.killed) for one in found.values()] == [(0, 60, True), (60, 100, False)]


def test_the_newest_session_ends_with_its_last_line_in_either_log() -> None:
    found = sessions_of(EVENTS[:5], [metric(1, 1, 9.0)])
    assert (found[1].end_s, found[1].killed) == (9.0, True)
    assert sessions_of([], []) == {}


def test_a_lease_without_an_end_is_charged_until_its_session_ends() -> None:
    held = held_leases(EVENTS, sessions_of(EVENTS, METRICS))
    b, c = held[1, "b"], held[2, "c"]
    # 50 s at 1.8 $/h
    assert (b.start_s, b.end_s, b.tokens) == (10.0, 60.0, None)
    assert b.cost_usd == pytest.approx(0.025)
    assert (c.start_s, c.end_s, c.cost_usd, c.evicted, c.tokens) == (60.0, 90.0, 0.02, True, 0)
    # In session 2 only its decode event shows that the reserved side was held.
    assert list(held) == [(1, "local"), (1, "a"), (1, "b"), (2, "c"), (2, "local")]
    assert (held[2, "local"].start_s, held[2, "local"].end_s, held[2, "local"].kind) == (60.0, 100.0, "reserved")


def test_a_lease_end_without_its_grant_counts() -> None:
    (held,) = held_leases(
        [EVENTS[0], next(event for event in EVENTS if event["event"] == "lease_end")], sessions_of(EVENTS, METRICS)
    ).values()
    assert (held.start_s, held.end_s, held.cost_usd, held.worker) == (0.0, 40.0, 0.01, "a")


def test_overlapping_stretches_count_once() -> None:
    assert covered_s([(5.0, 8.0), (0.0, 4.0), (1.0, 2.0), (3.0, 6.0)]) == 8.0
    assert covered_s([]) == 0.0


def test_fleet_events_are_counted() -> None:
    found = figures()
    assert {key: found[key] for key in ("leases", "joins", "notices", "evictions", "evictions_noticed")} == {
        "leases": 3,
        "joins": 2,  # without the local engine and the failed join
        "notices": 1,
        "evictions": 2,
        "evictions_noticed": 1,
    }
    assert (found["quarantined"], found["crashes"]) == (1, 1)
    # migrated samples count, not requested ones: twice of a, of b (rebalanced), of c
    assert found["migrations"] == (3 + 1 + 2) + 2
    assert (found["samples_kept"], found["tokens_kept"], found["tokens_lost"]) == (6, 20 + 7 + 15, 6 + 5)
    assert found["tokens_recomputed"] == 11 + 5 + 70
    assert found["goodput_tokens_per_s"] == 4.5


def test_costs() -> None:
    found = figures()
    # 100 s at 3.6 $/h; leases a 0.01, b 0.025, c 0.02
    assert found["cost_by_kind_usd"] == {"reserved": 0.1, "preemptible": 0.055}
    assert found["cost_usd"] == 0.155


def test_the_cost_of_the_reserved_side_alone_is_estimated() -> None:
    # Its fastest decode: 300 tokens in 20 s, 15 per second. Some worker generated in [0, 40] and [70, 90]: 60 of 100 s.
    # All 900 tokens would have taken it 60 s: 100 - 60 + 60 = 100 s, at 3.6 $/h 0.1 $.
    decoded = np.array([decode_figures(event) for event in EVENTS if event["event"] == DECODE])
    alone = reserved_only(decoded, sessions_of(EVENTS, METRICS), 100.0)
    assert alone is not None
    assert (alone.generating_s, alone.other_s, alone.seconds) == (60.0, 40.0, 100.0)
    assert figures()["reserved_only_usd"] == pytest.approx(0.1)


def test_training_beside_generation_is_added_to_the_cost_of_the_reserved_side_alone() -> None:
    # Training in [15, 25] overlaps with generation, in [62, 68] it does not: 16 s of training and 60 s of generation
    # in sequence, and 100 - 60 - 6 = 34 s in which neither took place.
    events = [*EVENTS, line(TRAINING, 1, 25.0, duration_s=10.0), line(TRAINING, 2, 8.0, duration_s=6.0)]
    assert figures(events)["reserved_only_usd"] == pytest.approx(0.11)


def test_waiting_for_other_machines_is_no_cost_of_the_reserved_side_alone() -> None:
    # It generated in [0, 20] and [70, 90] and waited for 25 s: 100 - 40 - 25 = 35 s of other work.
    decoded = np.array([decode_figures(event) for event in EVENTS if event["event"] == DECODE])
    alone = reserved_only(decoded, sessions_of(EVENTS, METRICS), 100.0, 25.0)
    assert alone is not None
    assert (alone.generating_s, alone.other_s) == (60.0, 35.0)


def test_unknown_fleet_figures_are_null() -> None:
    remote_only = [event for event in EVENTS if event.get("kind") != "reserved"]
    assert figures(remote_only)["reserved_only_usd"] is None
    assert figures(price=0.0)["reserved_only_usd"] is None
    assert figures(price=0.0)["cost_usd"] == 0.055
    assert figures(wall_s=0.0)["goodput_tokens_per_s"] is None


def test_a_run_on_the_reserved_side_alone_costs_its_wall_time() -> None:
    alone = [event for event in EVENTS if event["event"].startswith("session") or event.get("kind") == "reserved"]
    found = figures(alone)
    assert (found["cost_usd"], found["reserved_only_usd"]) == (0.1, 0.1)
    assert found["cost_by_kind_usd"] == {"reserved": 0.1, "preemptible": 0.0}
    assert not any(found[key] for key in ("leases", "joins", "evictions", "migrations", "tokens_lost", "quarantined"))


def test_the_evictions_sentence() -> None:
    assert evictions_sentence(figures()) == ("2 evictions (1 with notice): 6 samples migrated, 42 tokens kept, 11 lost")
    assert evictions_sentence(figures(), is_robot=True) == "2 evictions (1 with notice)"
    assert evictions_sentence(figures([])) == ""
