from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.fleet_figures import HeldLease
from tidemill.telemetry.report.timeline import (
    NAMED_ROWS,
    Bar,
    Timeline,
    lanes,
    merged,
    serving,
    timeline,
    timeline_json,
)
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory

START = {"event": "session_start", "session": 1, "elapsed_s": 0.0, "earlier_wall_s": 0.0}


def at(elapsed_s: float, name: str, session: int = 1, **fields: Any) -> dict[str, Any]:
    return {"event": name, "session": session, "elapsed_s": elapsed_s, **fields}


def lease(elapsed_s: float, name: str, kind: str = "preemptible", worker: str = "", session: int = 1) -> dict[str, Any]:
    return at(elapsed_s, "lease", session, lease=name, worker=worker or name, kind=kind, price_usd_per_hour=1.8)


def of_run(run: RunDirectory) -> Timeline | None:
    data = RunData.load(run)
    return timeline(data.events, data.metrics)


def timeline_of(tmp_path: Path, *events: dict[str, Any]) -> Timeline | None:
    run = RunDirectory(tmp_path)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    return of_run(run)


def held(name: str, start_s: float, end_s: float) -> HeldLease:
    return HeldLease(
        session=1, lease_id=name, worker=name, kind="preemptible", start_s=start_s, end_s=end_s, cost_usd=0.0
    )


STORY = (
    START,
    lease(0, "local", kind="reserved"),
    lease(1, "a", worker="spot-2"),
    at(4, "join", lease="a", worker="spot-2", duration_s=3.0),
    at(5, "pull", lease="a", worker="spot-2", version=3, nbytes=2_500_000, full=False, duration_s=0.5, swap_s=0.012,
       retries=1),
    at(9, "decode", lease="a", worker="spot-2", kind="preemptible", step=4, purpose="train", tokens=400, samples=8,
       duration_s=4.0),
    at(9.5, "decode", lease="local", worker="local", kind="reserved", step=4, purpose="eval:held_out", tokens=10,
       samples=2, duration_s=0.5),
    at(10, "training", step=4, duration_s=1.0),
    at(10.5, "publish", version=4, nbytes=270_000_000, delta_nbytes=1_000_000),
    at(10.6, "publish", version=4),
    at(11, "notice", lease="a", worker="spot-2", grace_s=2.0, cause="SIGTERM"),
    at(13, "eviction", lease="a", worker="spot-2", noticed=True, samples=0, tokens_kept=0, tokens_lost=0),
    at(13, "lease_end", lease="a", worker="spot-2", kind="preemptible", cause="taken", evicted=True, held_s=12.0,
       cost_usd=0.006, tokens=400),
    lease(15, "b", worker="spot-10"),
    at(20, "join_failed", lease="b", worker="spot-10", cause="no answer"),
)  # fmt: skip


def test_a_run_without_preemptible_machines_has_no_timeline(tmp_path: Path) -> None:
    assert timeline_of(tmp_path, START, lease(0, "local", kind="reserved")) is None
    assert of_run(FabricatedRun(tmp_path / "run", steps=2).make()) is None


def test_reserved_machines_alone_are_drawn_on_request() -> None:
    decoded = at(9.0, "decode", lease="local", worker="local", kind="reserved", purpose="train", duration_s=4.0)
    found = timeline([START, decoded], [], reserved_only=True)
    assert found is not None
    assert (found.rows, found.first_preemptible, found.serving) == (("trainer", "local"), 2, ((0.0, 0),))
    assert [(bar.row, bar.kind, bar.start_s, bar.end_s) for bar in found.bars if bar.kind == "decode"] == [
        (1, "decode", 5.0, 9.0)
    ]


def test_bars_have_worker_activity_and_duration(tmp_path: Path) -> None:
    found = timeline_of(tmp_path, *STORY)
    assert found is not None
    assert found.rows == ("trainer", "local", "spot-2", "spot-10") and found.first_preemptible == 2
    assert [(bar.row, bar.kind, bar.start_s, bar.end_s, bar.text) for bar in found.bars if bar.row != 1] == [
        (2, "held", 1.0, 13.0, "spot-2, preemptible\nheld 12 s, $0.0060\n400 tokens\nend: taken"),
        (2, "boot", 1.0, 4.0, "spot-2 started\n3.0 s"),
        # Never ended: it costs 1.8 $/h for 5 s, until the last line of the session.
        (3, "held", 15.0, 20.0, "spot-10, preemptible\nheld 5.0 s, $0.0025\nend: none recorded"),
        (2, "notice", 11.0, 13.0, "spot-2 will be evicted in 2.0 s (SIGTERM)"),
        (
            2,
            "pull",
            4.5,
            5.0,
            "spot-2 pulled version 3 as a delta\n2.5 MB in 0.5 s, generation paused 12 ms\n1 damaged transfer",
        ),
        (2, "decode", 5.0, 9.0, "spot-2 generated, step 4\n4.0 s, 100 tok/s\n400 tokens of 8 samples"),
        (0, "train", 9.0, 10.0, "optimizer step 4\n1.0 s"),
    ]
    assert [(bar.kind, bar.text.splitlines()[0]) for bar in found.bars if bar.row == 1] == [
        ("held", "local, reserved"),
        ("evaluate", "local generated, step 4 (eval:held_out)"),
    ]
    assert [(mark.row, mark.kind, mark.at_s) for mark in found.marks] == [(2, "eviction", 13.0), (3, "failed", 20.0)]
    assert found.publishes == ((10.5, "version 4 published\n270.0 MB, delta 1.0 MB"),)
    assert found.serving == ((0.0, 0), (4.0, 1), (13.0, 0)) and found.end_s == 20.0


def test_sessions_come_one_after_another(tmp_path: Path) -> None:
    later = at(0, "session_start", session=2, earlier_wall_s=30.0)
    found = timeline_of(tmp_path, *STORY, later, lease(2, "c", worker="spot-2", session=2), at(5, "x", session=2))
    assert found is not None
    assert found.sessions == ((30.0, "session 2, after a kill"),) and found.end_s == 35.0
    bars = [(bar.row, bar.start_s, bar.end_s) for bar in found.bars if bar.kind == "held"]
    assert bars == [(1, 0, 30), (2, 1, 13), (3, 15, 30), (2, 32, 35)], "what was open ended with its session"


def test_leases_share_a_lane_unless_they_overlap() -> None:
    leases = [held("d", 8, 9), held("c", 4, 9), held("b", 1, 5), held("a", 0, 4)]
    assert [[one.worker for one in lane] for lane in lanes(leases)] == [["a", "c"], ["b", "d"]]


def test_a_worker_with_two_concurrent_leases_has_two_rows(tmp_path: Path) -> None:
    found = timeline_of(tmp_path, START, lease(1, "a", worker="w"), lease(2, "b", worker="w"), at(5, "x"))
    assert found is not None and found.rows == ("trainer", "w", "w")


def test_many_workers_share_rows(tmp_path: Path) -> None:
    events = []
    for number in range(NAMED_ROWS + 10):
        name = f"s{number}"
        end = at(10.0 * number + 9, "lease_end", lease=name, worker=name, kind="preemptible", held_s=9.0, cost_usd=0.0)
        events += [lease(10.0 * number, name), end]
    found = timeline_of(tmp_path, START, *events)
    assert found is not None and not found.named
    assert found.rows == ("trainer", ""), "one machine at a time needs one row"
    assert len(found.bars) == NAMED_ROWS + 10


def test_close_bars_are_merged() -> None:
    def bar(start_s: float, end_s: float, kind: Any = "decode", row: int = 1) -> Bar:
        return Bar(row=row, kind=kind, start_s=start_s, end_s=end_s, text="w")

    bars = [bar(0, 1), bar(1.05, 2), bar(1.1, 1.2, "pull"), bar(2.2, 3), bar(2.05, 2.1, row=2), bar(0, 1, "held")]
    found = [(one.row, one.kind, one.start_s, one.end_s, one.text) for one in merged(bars, 0.1)]
    assert found == [
        (1, "decode", 0, 2, "w\nand 1 more until here"),
        (1, "held", 0, 1, "w"),
        (1, "pull", 1.1, 1.2, "w"),
        (2, "decode", 2.05, 2.1, "w"),
        (1, "decode", 2.2, 3, "w"),
    ]


def test_a_drain_is_marked_with_the_migrated_samples(tmp_path: Path) -> None:
    moved: dict[str, Any] = {"lease": "a", "worker": "spot-2", "to_worker": "local"}
    found = timeline_of(
        tmp_path,
        START,
        lease(0, "a", worker="spot-2"),
        at(5, "migration", **moved, samples=9, tokens_kept=9),  # rebalanced, without a notice
        at(11, "notice", lease="a", worker="spot-2", grace_s=2.0),
        at(12, "drain", lease="a", worker="spot-2", samples=5),
        at(12.1, "migration", **moved, samples=1, tokens_kept=20),
        at(12.2, "migration", **moved, samples=2, tokens_kept=22),
        at(13, "eviction", lease="a", worker="spot-2", noticed=True, samples=1, tokens_kept=4, tokens_lost=0),
        at(13.1, "migration", **moved, samples=1, tokens_kept=4),  # shown by the mark of the eviction
    )
    assert found is not None
    handed = [(mark.row, mark.at_s, mark.text) for mark in found.marks if mark.kind == "drained"]
    assert handed == [(1, 12.1, "spot-2 returned 3 samples\n42 tokens kept")]


def test_workers_over_time() -> None:
    ups = {(1, "a"): (0.0, 2.0), (1, "b"): (1.0, 2.0), (1, "c"): (3.0, 5.0)}
    leases = [held("a", 0, 5), held("b", 1, 8), held("c", 3, 9), held("never up", 0, 9)]
    # One leaves as another comes up at 5: the count stays.
    assert serving(leases, ups) == [(0.0, 0), (2.0, 2), (5.0, 2), (8.0, 1), (9.0, 0)]


@pytest.mark.parametrize("places", [3, 60])
def test_the_whole_fabricated_fleet_is_drawn(tmp_path: Path, places: int) -> None:
    run = FabricatedFleet(tmp_path, places=places).make()
    found = of_run(run)
    assert found is not None
    data = timeline_json(found)
    assert len(data["bars"]) == len(found.bars) and data["named"] is (places <= NAMED_ROWS)
    assert all(
        0 <= bar[0] < len(data["rows"]) and -0.01 <= bar[2] <= bar[3] <= data["end"] + 0.01 for bar in data["bars"]
    )
    kinds = {data["kinds"][bar[1]] for bar in data["bars"]}
    assert kinds == {"held", "boot", "pull", "decode", "evaluate", "notice", "train", "checkpoint"}
    assert {mark[1] for mark in data["marks"]} == {"eviction", "drained"}
    assert data["sessions"][0][1] == "session 2, after a kill"
    assert max(count for _, count in data["serving"]) <= places
