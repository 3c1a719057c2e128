"""Waits with events and deadlines."""

from __future__ import annotations

import asyncio

import pytest

from tests.doubles.session import FakeTelemetry
from tests.virtual_time import run_virtual
from tidemill.controller.waiting import Wait, wait_with_deadline
from tidemill.core.errors import DeadlineError
from tidemill.core.protocols import LoopClock

WAIT = Wait(awaited="the tide", look_at="the moon", deadline_s=100.0)


async def wait_for(seconds: float, telemetry: FakeTelemetry) -> str:
    return await wait_with_deadline(
        asyncio.sleep(seconds, "came"), WAIT, notice_s=30.0, telemetry=telemetry, clock=LoopClock()
    )


def test_a_result_in_time_is_returned_after_waiting_events() -> None:
    telemetry = FakeTelemetry()

    assert run_virtual(wait_for(70.0, telemetry)) == "came"

    # 70 s with an event every 30 s: at 30 and 60
    assert [fields["waited_s"] for fields in telemetry.named("waiting")] == [30.0, 60.0]
    assert telemetry.named("waiting")[0]["awaited"] == "the tide"


def test_a_deadline_error_names_what_was_awaited_and_where_to_look() -> None:
    telemetry = FakeTelemetry()

    with pytest.raises(DeadlineError, match=r"waited 100.0 s for the tide; look at the moon"):
        run_virtual(wait_for(1000.0, telemetry))

    assert len(telemetry.named("waiting")) == 3


def test_errors_propagate_and_cancelling_the_wait_cancels_the_awaited_task() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    async def main() -> bool:
        with pytest.raises(ValueError, match="broken"):
            await wait_with_deadline(fail(), WAIT, notice_s=1.0, telemetry=FakeTelemetry(), clock=LoopClock())
        inner = asyncio.get_running_loop().create_future()
        outer = asyncio.create_task(
            wait_with_deadline(inner, WAIT, notice_s=1.0, telemetry=FakeTelemetry(), clock=LoopClock())
        )
        await asyncio.sleep(0.5)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        return inner.cancelled()

    assert run_virtual(main())
