"""Requests of people between two steps, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.session import Session, granted, small_spec, trained
from tests.small_pool import pool, quiet
from tests.virtual_time import run_virtual
from tidemill.controller.live_view import under_way
from tidemill.controller.loop import LoopResult
from tidemill.telemetry.control import Action, ControlFolder, RunControl, new_request
from tidemill.telemetry.live_state import UnderWay


def control_of(folder: Path, session: Session) -> None:
    session.control = RunControl(
        ControlFolder(folder),
        run_id="run",
        session=1,
        log=lambda **fields: session.telemetry.event("control", **fields),
    )
    session.control.attach(lambda reason: session.stop.set())


async def driven(folder: Path, session: Session, *requests: tuple[float, Action, float]) -> LoopResult:
    """Run a session; write requests at these seconds, with these hold times."""

    async def write() -> None:
        passed_s = 0.0
        for at_s, action, hold_s in requests:
            await asyncio.sleep(at_s - passed_s)
            passed_s = at_s
            ControlFolder(folder).write(new_request(action, run_id="run", session=1, by="test", hold_s=hold_s))

    control_of(folder, session)
    writing = asyncio.create_task(write())
    try:
        return await session.run()
    finally:
        writing.cancel()


@pytest.mark.parametrize("schedule", [{}, {"max_policy_lag": 1, "unfinished": "wait"}])
def test_a_paused_run_trains_on_the_same_as_one_that_is_not(tmp_path: Path, schedule: dict[str, Any]) -> None:
    spec = small_spec(schedule=schedule, checkpoint={"every_steps": 0})
    session = Session(spec=spec)
    requests: list[tuple[float, Action, float]] = [
        (3.0, "pause", 0.0),
        (50.0, "resume", 0.0),
        (50.7, "checkpoint", 0.0),
    ]
    result = run_virtual(driven(tmp_path, session, *requests))
    assert result.steps == 4 and not result.interrupted
    assert trained(session) == quiet(spec)
    (paused,) = session.telemetry.named("paused")
    assert paused["duration_s"] > 40
    assert [fields["outcome"] for fields in session.telemetry.named("control")] == ["applied"] * 3
    assert paused["step"] in dict(session.checkpoints.saved)
    assert len(session.checkpoints.saved) == 3  # the pause, the request, the end


@pytest.mark.parametrize("end", ["stop", "signal"])
def test_a_paused_run_can_be_stopped_and_resumed_later(tmp_path: Path, end: str) -> None:
    session = Session()

    async def run() -> LoopResult:
        if end == "signal":  # Ctrl-C, SIGTERM and trainer.hours
            asyncio.get_running_loop().call_later(30.0, session.stop.set)
            return await driven(tmp_path, session, (3.0, "pause", 0.0))
        return await driven(tmp_path, session, (3.0, "pause", 0.0), (30.0, "stop", 0.0))

    result = run_virtual(run())
    assert result.interrupted and result.steps < 4
    assert session.telemetry.named("paused")[0]["duration_s"] > 20
    again = Session(disk=session.disk)
    run_virtual(again.run())
    assert trained(again) == quiet(again.spec)


AHEAD = {"max_policy_lag": 1, "unfinished": "wait"}


@pytest.mark.parametrize(
    ("schedule", "hold_s", "returned"), [({}, 1000.0, 0), ({}, 5.0, 3), ({}, 0.0, 3), (AHEAD, 5.0, 3)]
)
def test_rented_machines_are_returned_after_the_hold_time(
    tmp_path: Path, schedule: dict[str, Any], hold_s: float, returned: int
) -> None:
    spec = small_spec(batch={"prompts": 6, "group_size": 3}, schedule=schedule)
    session = pool(granted("a"), granted("b"), granted("c", 40.0), granted("d", 70.0), spec=spec)
    held: dict[float, int] = {}

    async def run() -> LoopResult:
        def count() -> None:
            loop = asyncio.get_running_loop()
            held[loop.time()] = session.fleet.preemptible_count

        for at_s in (20.0, 50.0):
            asyncio.get_running_loop().call_at(at_s, count)
        return await driven(tmp_path, session, (3.0, "pause", hold_s), (60.0, "resume", 0.0))

    result = run_virtual(run())
    assert result.steps == 4
    assert trained(session) == quiet(spec)
    (paused,) = session.telemetry.named("paused")
    assert paused["machines_returned"] == returned  # "c" was granted although no machine was wanted
    assert held == ({20.0: 2, 50.0: 3} if not returned else {20.0: 0, 50.0: 0})
    assert sorted(session.provider.released)[:returned] == ["lease-a", "lease-b", "lease-c"][:returned]
    assert 0 in session.provider.wanted and session.provider.wanted[-1] > 0
    ends = [fields for fields in session.telemetry.named("lease_end") if fields["cause"] == "the run is paused"]
    assert len(ends) == returned and not any(fields["evicted"] for fields in ends)
    assert not session.telemetry.named("eviction")


def test_the_samples_under_way_and_their_workers() -> None:
    session = pool(granted("a"))
    found: list[UnderWay] = []

    async def run() -> LoopResult:
        def look() -> None:
            assert session.training is not None
            found.append(under_way(session.training))

        for at in range(1, 40):
            asyncio.get_running_loop().call_later(0.25 * at, look)
        return await session.run()

    run_virtual(run())
    assert {row.worker_id for row in found[-1].fleet} == {"local", "spot-a"}
    samples = [row for one in found for row in one.samples]
    assert {(row.worker, row.lease) for row in samples} == {("", ""), ("local", "local"), ("spot-a", "lease-a")}
    assert {1, 2, 3} <= {row.step for row in samples} <= {1, 2, 3, 4}
    assert any(row.tokens and row.versions for row in samples)
    assert all(one.samples_total == len(one.samples) for one in found)
