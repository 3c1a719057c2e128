"""An agent's run whose controller is killed at named moments, and at every byte of a journal entry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.doubles.fault_points import CHECKPOINT, FAULT_POINTS, FaultPoints, PointedSession
from tests.doubles.journal import MemoryJournal
from tests.doubles.session import Disk, small_spec
from tests.rotation import DAY
from tests.virtual_time import run_virtual
from tidemill.config.schema import RunSpec
from tidemill.controller.entries import CallEnded, CallStarted, Observed, decode

VERSIONS = 7
"""Index in what the trainer gets of a sample."""

KINDS = ("start of a call", "last token", "result of a call", "observation", "reward")


SCHEDULES: dict[str, dict[str, Any]] = {
    "no lag": {"max_policy_lag": 0},
    "one version": {"max_policy_lag": 2, "unfinished": "wait"},
    "versions as they come": {"max_policy_lag": 2, "unfinished": "continue"},
}

FAST = ("no lag", "versions as they come")


def spec_of(schedule: str) -> RunSpec:
    return small_spec(
        schedule=SCHEDULES[schedule],
        trainer={"steps": 4},
        eval={"every_steps": 4},
        checkpoint={"every_steps": 1},
    )


@cache
def undisturbed(schedule: str) -> PointedSession:
    session = PointedSession(spec=spec_of(schedule))
    assert run_virtual(session.run_until_killed())
    return session


def interrupted_samples(disk: Disk, size: int) -> set[tuple[int, int]]:
    """(group, index) of the samples of which a call is durably started and has no durable result."""
    open_calls: set[tuple[int, int]] = set()
    for _, blob in run_virtual(MemoryJournal(disk.journal).load()):
        entry = decode(blob)
        if isinstance(entry, CallStarted):
            open_calls.add((entry.ordinal, entry.index))
        elif isinstance(entry, CallEnded):
            open_calls.discard((entry.ordinal, entry.index))
        elif isinstance(entry, Observed):
            open_calls = {call for call in open_calls if call[0] != entry.ordinal}
    return {divmod(ordinal, size) for ordinal, _ in open_calls}


def trained(session: PointedSession) -> Iterator[tuple[tuple[int, int], Any]]:
    """(group, index) of each sample that the trainer got, and all that it got except the versions."""
    for batch in session.trainer.state.history:
        for position, _, samples in batch:  # type: ignore[misc]
            for index, sample in enumerate(samples):  # type: ignore[has-type]
                yield (position, index), (*sample[:VERSIONS], *sample[VERSIONS + 1 :])  # type: ignore[has-type]


def check_resumed(killed: PointedSession, quiet: PointedSession, where: str) -> int:
    """Resume a killed session and compare it with the undisturbed one; returns how many samples were interrupted."""
    size = killed.spec.batch.group_size
    interrupted = interrupted_samples(killed.disk, size)
    session = PointedSession(spec=killed.spec, disk=killed.disk, executed=killed.executed)
    assert run_virtual(session.run_until_killed()), where
    pairs = zip(trained(session), trained(quiet), strict=True)
    for (sample, got), (same, right) in pairs:
        assert sample == same, where
        if sample in interrupted:
            assert "a call was interrupted" in got, f"{where}: {sample}"
        else:
            assert got == right, f"{where}: {sample}"
    unrepeatable = [call for call in session.executed if call.startswith("train") and call.endswith("/1")]
    assert unrepeatable and all(session.executed[call] == 1 for call in unrepeatable), where
    return len(interrupted)


@pytest.mark.parametrize("schedule", [*FAST, pytest.param("one version", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FAULT_POINTS, CHECKPOINT])
def test_killed_at_a_fault_point_a_run_learns_the_same(name: str, schedule: str) -> None:
    quiet = undisturbed(schedule)
    times = quiet.points.hits[name]
    if name == CHECKPOINT and schedule != "versions as they come":
        assert not times  # all samples are finished
        return
    assert times, f"{name} was never reached"
    interrupted = 0
    for nth in sorted({1, (times + 1) // 2, times}):
        killed = PointedSession(spec=quiet.spec, points=FaultPoints(name, nth))
        assert not run_virtual(killed.run_until_killed()), f"{name} was not reached {nth} times"
        interrupted += check_resumed(killed, quiet, f"killed at {name} for the {nth}. time")
    if name in ("start of a call durable", "call that must not be repeated begins"):
        assert interrupted > 0


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])])
def test_a_write_torn_at_any_byte_is_as_if_it_had_not_happened(kind: str) -> None:
    quiet = undisturbed("no lag")
    start, end = [(start, end) for name, start, end in quiet.pointed.frames if name == kind][3]
    # Every byte within four days.
    for after in sorted({start, *range(start + DAY % 4, end, 4), end - 1}):
        killed = PointedSession(spec=quiet.spec, power_cut_after=after)
        assert not run_virtual(killed.run_until_killed())
        assert len(killed.disk.journal) >= after - start
        check_resumed(killed, quiet, f"torn after {after - start} of {end - start} bytes of a {kind}")
