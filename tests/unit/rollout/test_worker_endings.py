"""Worker errors, close, kill and hangs, and what callers observe."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.doubles.engine import FakeEngine
from tests.doubles.samples import make_id
from tests.virtual_time import run_virtual
from tests.worker_stage import V0, V1, SlowSource, Stage, request
from tidemill.core.errors import DeadlineError, WorkerLost
from tidemill.core.protocols import LoopClock
from tidemill.core.records import WorkerReport
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread


def test_an_engine_error_is_raised_after_earlier_reports() -> None:
    async def main() -> None:
        stage = Stage()
        stage.fail_at = 3
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(5.0)
        assert await stage.worker.next_report(1.0) is not None
        assert await stage.worker.next_report(1.0) is not None
        calls: list[Awaitable[object]] = [
            stage.worker.next_report(1.0),
            stage.worker.submit([request("p1")]),
            stage.worker.abort([make_id("p0")]),
            stage.worker.load(V1),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="engine on fire"):
                await call
        await stage.worker.close()

    run_virtual(main())


def test_an_engine_error_wakes_a_waiting_caller() -> None:
    async def main() -> None:
        stage = Stage()
        waiting = asyncio.create_task(stage.worker.next_report(1000.0))
        await asyncio.sleep(1.0)
        stage.fail_at = 1
        await stage.worker.submit([request("p0")])
        with pytest.raises(ValueError, match="engine on fire"):
            await waiting
        assert asyncio.get_running_loop().time() < 2.0
        await stage.worker.close()

    run_virtual(main())


def test_an_invalid_request_is_refused_without_affecting_others() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        with pytest.raises(AssertionError, match="other weights"):
            await stage.worker.submit([request("p1", version=7)])
        assert [delta.sample_id for delta in await stage.deltas() if delta.finish] == [make_id("p0")]
        await stage.worker.close()

    run_virtual(main())


def test_a_closed_worker_stops_and_refuses_calls() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        await stage.worker.close()
        await stage.worker.close()
        polls = stage.polls
        await asyncio.sleep(10.0)
        assert stage.polls == polls
        with pytest.raises(RuntimeError, match="w1 is closed"):
            await stage.worker.submit([request("p1")])

    run_virtual(main())


def test_an_unused_worker_can_be_closed() -> None:
    async def main() -> None:
        await Stage().worker.close()

    run_virtual(main())


async def test_close_has_a_deadline_if_the_engine_hangs() -> None:
    engine, compute, go_on = FakeEngine(V0), ComputeThread("hanging"), threading.Event()
    wait: Callable[[], None] = lambda: (go_on.wait(10.0), None)[1]  # noqa: E731
    engine.on_poll = wait
    worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=0.01, worker_id="w2", close_timeout_s=0.1)
    await worker.submit([request("p0")])
    await asyncio.sleep(0.05)

    with pytest.raises(DeadlineError, match=r"waited 0.1 s for the worker to stop; look at the engine of worker w2"):
        await worker.close()

    go_on.set()
    await compute.close(5.0)


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.5, 1.05])
def test_kill_stops_everything(at_s: float) -> None:
    """Killed while idle, in a poll, between polls, in a pull, in a swap."""

    async def main() -> None:
        stage = Stage()
        source = SlowSource(stage.engine)
        stage.worker = stage.make_worker(heartbeat_s=0.01, source=source)
        await stage.worker.submit([request("p0"), request("p1")])
        loading = asyncio.create_task(stage.worker.load(V1))
        waiting = asyncio.create_task(_reports_until_lost(stage.worker))
        await asyncio.sleep(at_s)

        stage.worker.kill()

        with pytest.raises(WorkerLost, match="w1 was killed"):
            await loading
        reports = len(await waiting)
        calls: list[Awaitable[object]] = [
            stage.worker.next_report(1.0),
            stage.worker.submit([request("p2")]),
            stage.worker.abort([make_id("p0")]),
            stage.worker.load(V1),
        ]
        for call in calls:
            with pytest.raises(WorkerLost):
                await call
        assert asyncio.all_tasks() == {asyncio.current_task()}
        polls = stage.polls
        await asyncio.sleep(10.0)
        assert (stage.polls, source.swapped, source.closed) == (polls, [], 1)
        assert reports >= int(at_s / 0.1)
        stage.worker.kill()
        stage.worker.notice(1.0)
        await stage.worker.close()

    run_virtual(main())


async def _reports_until_lost(worker: EngineWorker) -> list[WorkerReport]:
    reports: list[WorkerReport] = []
    with suppress(WorkerLost):
        while report := await worker.next_report(100.0):
            reports.append(report)
        pytest.fail("no report, but the worker is not lost")
    return reports


def test_kill_discards_pending_reports() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(0.15)
        stage.worker.kill()
        with pytest.raises(WorkerLost):
            await stage.worker.next_report(1.0)

    run_virtual(main())


def test_a_cancelled_caller_gets_cancelled_error_after_a_kill() -> None:
    async def main() -> None:
        stage = Stage()
        stage.worker = stage.make_worker(source=SlowSource(stage.engine))
        loading = asyncio.create_task(stage.worker.load(V1))
        await asyncio.sleep(0.5)
        loading.cancel()
        stage.worker.kill()
        with pytest.raises(asyncio.CancelledError):
            await loading

    run_virtual(main())


async def test_there_is_no_heartbeat_during_an_engine_call() -> None:
    engine, compute, go_on = FakeEngine(V0), ComputeThread("stuck"), threading.Event()
    engine.on_poll = lambda: (go_on.wait(10.0), None)[1]
    worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=0.01, heartbeat_s=0.01)
    assert await worker.next_report(5.0) is not None
    await worker.submit([request("p0")])
    await asyncio.sleep(0.05)
    while await worker.next_report(0.0):
        pass  # reported before the engine hung
    assert await worker.next_report(0.2) is None
    worker.kill()
    go_on.set()
    await compute.close(5.0)
