"""The loop with a guard, in virtual time: it returns to a checkpoint, and decides the same after every kill."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.doubles.guard import FakeGuard
from tests.doubles.session import Disk, Session, small_spec
from tests.rotation import daily
from tests.virtual_time import run_virtual
from tidemill.config.schema import RunSpec
from tidemill.controller.ledger import Ledger
from tidemill.controller.reward_watch import RewardWatch
from tidemill.core.errors import GuardStop, RollBack, root_error
from tidemill.core.evidence import GuardDecision
from tidemill.telemetry.events import GUARD

STEPS, EVERY = 7, 11
GOLD: dict[str, Any] = {"rewards": [{"kind": "exact"}, {"kind": "numeric", "role": "gold", "weight": 0.0}]}


def spec_of(action: str = "rollback", **guard: Any) -> RunSpec:
    amend = {"kl_beta": 0.1} if action == "rollback" else {}
    return small_spec(
        scoring=GOLD,
        trainer={"steps": STEPS},
        guard={"action": action, "canary_every": 3, "canaries": 2, "amend": amend, **guard},
    )


def live(
    disk: Disk,
    spec: RunSpec,
    *,
    alarms: Mapping[int, int] = {5: 4},
    again: Mapping[int, int] = {},
    cut: int | None = None,
) -> tuple[Session, BaseException | None]:
    """One process: after a rollback the loop starts again, with other rounding instead of an amendment.

    Args:
        alarms: of the guard before a rollback.
        again: of the guard after it.
    """
    left = cut
    while True:

        async def main(left: int | None = left) -> tuple[Session, BaseException | None]:
            guard = FakeGuard(again if disk.rollbacks else alarms)
            session = Session(disk=disk, spec=spec, power_cut_after=left, guard=guard)
            session.trainer.salt = "amended" * disk.rollbacks
            try:
                session.result = await session.run_until_power_cut()
            except Exception as raised:  # noqa: BLE001 - looked at below
                return session, root_error(raised)
            return session, None

        session, error = run_virtual(main())
        if left is not None:
            left = max(1, left - session.journal.written)
        if not isinstance(error, RollBack):
            return session, error
        for step in [step for step in disk.checkpoints if step > error.step]:
            del disk.checkpoints[step]
        disk.rollbacks += 1


def decided(session: Session) -> list[GuardDecision]:
    return list(session.ledger.decisions)


@functools.cache
def quiet_run(checkpoint: int, lag: int) -> Session:
    session, error = live(Disk(), _spec(checkpoint, lag))
    assert error is None
    return session


def _spec(checkpoint: int, lag: int) -> RunSpec:
    found = spec_of()
    return found.model_copy(
        update={
            "checkpoint": found.checkpoint.model_copy(update={"every_steps": checkpoint}),
            "schedule": found.schedule.model_copy(update={"max_policy_lag": lag, "unfinished": "wait"} if lag else {}),
        }
    )


def test_the_run_returns_to_the_newest_checkpoint_before_the_onset_and_finishes() -> None:
    disk = Disk()
    session, error = live(disk, spec_of())

    assert error is None
    assert session.result is not None
    assert session.result.steps == STEPS
    (decision,) = decided(session)
    assert (decision.action, decision.step, decision.onset, decision.target) == ("rollback", 5, 4, 2)
    assert disk.rollbacks == 1
    assert session.result.resumed_from == 2
    assert session.trainer.positions[0] == [6, 7, 8]  # the groups of step 3 are trained again
    assert [evidence.step for evidence in session.ledger.evidence.values()] == list(range(1, STEPS + 1))


def test_before_the_first_checkpoint_the_run_returns_to_the_initial_model() -> None:
    session, error = live(Disk(), spec_of(), alarms={3: 2})

    assert error is None
    (decision,) = decided(session)
    assert decision.target == 0
    assert session.result is not None
    assert session.result.resumed_from == 0
    assert session.trainer.positions[0] == [0, 1, 2]


def test_steps_after_the_last_checkpoint_are_not_replayed_from_the_journal() -> None:
    """The journal has batches 5 and 6, and no checkpoint after the target is lost."""
    disk = Disk()
    session, _ = live(disk, spec_of(), alarms={6: 5})

    assert decided(session)[0].target == 4
    assert session.result is not None
    assert session.result.replayed == 0
    assert session.engine.submitted


@pytest.mark.parametrize("first", daily(range(EVERY), 1))
@pytest.mark.parametrize("checkpoint_and_lag", daily([(2, 0), (3, 1), (0, 0)], 1), ids=str)
def test_killed_at_any_journal_write_the_run_decides_the_same(checkpoint_and_lag: tuple[int, int], first: int) -> None:
    checkpoint, lag = checkpoint_and_lag
    spec, reference = _spec(checkpoint, lag), quiet_run(checkpoint, lag)
    for cut in range(400 + 277 * first, 60_000, 277 * EVERY):
        disk = Disk()
        killed, error = live(disk, spec, cut=cut)
        assert error is None, cut
        if killed.result is not None:
            return
        resumed, error = live(disk, spec)
        assert error is None, cut
        assert decided(resumed) == decided(reference), cut
        assert resumed.trainer.version == reference.trainer.version, cut
        assert resumed.ledger.evidence == reference.ledger.evidence, cut
    raise AssertionError("no run was long enough")


@pytest.mark.parametrize(("checkpoint", "again"), [(2, {6: 5}), (3, {4: 4})])
def test_a_second_alarm_stops_the_run_also_when_it_is_started_again(checkpoint: int, again: dict[int, int]) -> None:
    disk, spec = Disk(), _spec(checkpoint, 0)
    session, error = live(disk, spec, alarms={4: 3}, again=again)

    assert isinstance(error, GuardStop)
    assert [decision.action for decision in decided(session)] == ["rollback", "stop"]
    assert "rollback" in str(error)
    _, error = live(disk, spec, alarms={4: 3}, again=again)
    assert isinstance(error, GuardStop)
    session, error = live(disk, spec_of("warn"), again={})
    assert error is None
    assert session.result is not None
    assert session.result.steps == STEPS


def test_a_run_killed_between_its_last_checkpoint_and_the_decision_decides_when_it_is_started_again() -> None:
    disk = Disk()
    live(disk, spec_of(), alarms={})
    session, error = live(disk, spec_of(), alarms={STEPS: 5})

    assert error is None
    assert [(decision.step, decision.target) for decision in decided(session)] == [(STEPS, 4)]
    assert session.result is not None
    assert (session.result.resumed_from, session.result.steps) == (4, STEPS)


@pytest.mark.parametrize("killed_at", ["rollback", "stop"])
def test_a_decision_that_was_journalled_and_not_announced_is_announced_by_the_next_session(
    monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    async def killed(self: Ledger, decision: GuardDecision) -> None:
        await record(self, decision)
        if decision.action == killed_at:
            raise RuntimeError("killed")

    announced = list[str]()

    def announce(self: RewardWatch, decision: GuardDecision) -> None:
        announced.append(decision.action)

    record, disk, spec = Ledger.record_decision, Disk(), spec_of()
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "record_decision", killed)
        _, error = live(disk, spec, alarms={4: 3}, again={6: 5})
        assert str(error) == "killed"
    monkeypatch.setattr(RewardWatch, "_announce", announce)
    live(disk, spec, alarms={}, again={})

    assert announced == [killed_at]


def test_a_run_told_to_stop_counts_gold_that_is_not_there_as_missing() -> None:
    """Stopped while it waits for the scores of step 1."""
    disk = Disk()

    async def main() -> Session:
        session = Session(disk=disk, spec=spec_of(), guard=FakeGuard({}, gold_s=100.0))
        asyncio.get_running_loop().call_later(60.0, session.stop.set)
        session.result = await session.run()
        return session

    session = run_virtual(main())
    assert session.result is not None
    assert (session.result.steps, session.result.interrupted) == (2, True)
    assert [*session.ledger.evidence] == [1, 2]


def test_a_paused_run_continues_with_the_same_command_or_returns_with_another_action() -> None:
    disk = Disk()
    _, error = live(disk, spec_of("pause"))
    assert isinstance(error, GuardStop)
    assert max(disk.checkpoints) == 6  # a checkpoint of the last step was written
    session, error = live(disk, spec_of("pause"), alarms={})
    assert error is None
    assert session.result is not None
    assert session.result.resumed_from == 6

    disk = Disk()
    live(disk, spec_of("pause"))
    session, error = live(disk, spec_of("rollback"))
    assert error is None
    assert [decision.action for decision in decided(session)] == ["pause", "rollback"]
    assert decided(session)[1].target == 2


def test_a_warning_does_not_change_the_weights() -> None:
    session, error = live(Disk(), spec_of("warn"))
    assert error is None
    unwatched, _ = live(Disk(), spec_of("warn"), alarms={})

    assert session.trainer.version == unwatched.trainer.version
    assert [fields["action"] for fields in session.telemetry.named(GUARD)] == ["warn"]
