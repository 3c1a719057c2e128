"""The worker around an engine: ticks, failures, ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tests.fake_fleet import SAMPLING, FakeCompute, FakeEngine, completion, make_id, make_prompt
from tests.virtual_time import run_virtual
from tidemill.core.buffers import unpack_tokens
from tidemill.core.clock import LoopClock
from tidemill.core.errors import DeadlineError
from tidemill.core.records import GenerateRequest, PolicyVersion, TokenDelta
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread

T = TypeVar("T")

V0, V1 = PolicyVersion(number=0, digest="v0"), PolicyVersion(number=1, digest="v1")


def request(name: str, index: int = 0, version: int = 0) -> GenerateRequest:
    return GenerateRequest(
        sample_id=make_id(name, index),
        lease_id="lease",
        attempt=1,
        prompt_ids=make_prompt(name).token_ids,
        sampling=SAMPLING,
        exact_version=version,
    )


class Stage:
    def __init__(self) -> None:
        self.engine = FakeEngine(V0)
        self.compute = FakeCompute(0.1)
        self.polls, self.fail_at = 0, 0
        self.engine.on_poll = self._count
        self.worker = EngineWorker(
            self.engine, self.compute, clock=LoopClock(), tick_s=0.1, worker_id="w1", lease_id="lease"
        )

    def _count(self) -> None:
        self.polls += 1
        if self.polls == self.fail_at:
            raise ValueError("engine on fire")

    async def deltas(self) -> list[TokenDelta]:
        """Everything until the worker falls silent."""
        found: list[TokenDelta] = []
        while report := await self.worker.next_report(5.0):
            assert report.lease_id == "lease"
            found += report.deltas
        return found


def test_one_report_a_tick_until_everything_is_generated() -> None:
    async def main() -> None:
        stage = Stage()
        requests = [request("p0"), request("p1"), request("p2"), request("p3")]
        await stage.worker.submit(requests)
        first = await stage.worker.next_report(5.0)
        assert first is not None
        # three slots, one sample queued, two tokens a tick and slot; 0.1 s a tick
        assert (first.status.running, first.status.queued, first.status.free_slots) == (3, 1, 0)
        assert first.status.worker_id == "w1"
        assert first.status.prompt_tokens_computed == 8
        assert first.status.tokens_per_s == pytest.approx(sum(len(d.token_ids) for d in first.deltas) / 4 / 0.1)

        deltas = [*first.deltas, *await stage.deltas()]

        for one in requests:
            tokens = [t for d in deltas if d.sample_id == one.sample_id for t in unpack_tokens(d.token_ids)]
            assert tokens == completion(one.sample_id, V0, SAMPLING.max_new_tokens)[0]
        await stage.worker.close()

    run_virtual(main())


def test_an_idle_worker_does_not_poll() -> None:
    async def main() -> None:
        stage = Stage()
        assert await stage.worker.next_report(1.0) is None
        await stage.worker.submit([request("p0")])
        await stage.deltas()
        polls = stage.polls
        await asyncio.sleep(100.0)
        assert stage.polls == polls
        await stage.worker.submit([request("p1")])  # and wakes up again
        assert await stage.deltas()
        await stage.worker.close()

    run_virtual(main())


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_samples_submitted_while_the_last_ones_end_are_not_forgotten(delay: float) -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(delay)
        await stage.worker.submit([request("p1")])
        finished = [delta.sample_id for delta in await stage.deltas() if delta.finish]
        assert finished == [make_id("p0"), make_id("p1")]
        await stage.worker.close()

    run_virtual(main())


class LateNews(FakeCompute):
    """Tells late what a poll found; what was submitted meanwhile is told earlier."""

    async def run(self, function: Callable[[], T]) -> T:
        result = await super().run(function)
        if result is not None:
            await asyncio.sleep(0.5)
        return result


def test_samples_submitted_behind_the_last_poll_are_not_taken_for_idleness() -> None:
    async def main() -> None:
        stage = Stage()
        stage.worker = EngineWorker(stage.engine, LateNews(0.1), clock=LoopClock(), tick_s=0.1, lease_id="lease")
        stage.engine.per_poll = 100  # one poll finishes a sample
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(0.15)  # that poll is over, and the worker has not heard of it
        await stage.worker.submit([request("p1")])
        assert {delta.sample_id for delta in await stage.deltas() if delta.finish} == {make_id("p0"), make_id("p1")}
        await stage.worker.close()

    run_virtual(main())


def test_aborted_samples_are_handed_back_and_their_siblings_go_on() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0"), request("p1")])
        await stage.worker.next_report(5.0)
        await stage.worker.abort([make_id("p0"), make_id("unknown")])
        finishes = {delta.sample_id: delta.finish for delta in await stage.deltas() if delta.finish}
        assert finishes[make_id("p0")] == "aborted"
        assert finishes[make_id("p1")] in ("stop", "length")
        await stage.worker.abort([make_id("p0")])
        assert await stage.worker.next_report(1.0) is None  # nothing to say
        await stage.worker.close()

    run_virtual(main())


def test_new_weights_are_used_from_the_next_sample_on() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.load(V1)
        await stage.worker.submit([request("p0", version=1)])
        assert {delta.version for delta in await stage.deltas()} == {V1}
        await stage.worker.close()

    run_virtual(main())


def test_what_the_engine_raises_comes_after_the_reports_made_before_it() -> None:
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


def test_a_failure_wakes_who_is_waiting() -> None:
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


def test_a_faulty_request_is_refused_at_submit_and_harms_no_other() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        with pytest.raises(AssertionError, match="not loaded"):
            await stage.worker.submit([request("p1", version=7)])
        assert [delta.sample_id for delta in await stage.deltas() if delta.finish] == [make_id("p0")]
        await stage.worker.close()

    run_virtual(main())


def test_closing_ends_the_tick_and_then_refuses() -> None:
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


def test_a_worker_that_never_worked_closes() -> None:
    async def main() -> None:
        await Stage().worker.close()

    run_virtual(main())


async def test_closing_has_a_deadline_when_the_engine_hangs() -> None:
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


async def test_with_a_real_thread() -> None:
    engine, compute = FakeEngine(V0), ComputeThread("real")
    worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=0.01)
    await worker.submit([request(f"p{at}") for at in range(20)])
    finished = 0
    while finished < 20:
        report = await worker.next_report(5.0)
        assert report is not None
        finished += sum(delta.finish is not None for delta in report.deltas)
    await worker.close()
    await compute.close(5.0)


def test_a_queue_that_waits_for_a_later_version_is_looked_at_once_a_tick() -> None:
    class Waiting(FakeEngine):
        """Has a sample that no loaded version may serve yet."""

        def poll(self, deadline_s: float) -> list[TokenDelta]:
            self.on_poll()
            return []

    async def main() -> None:
        stage = Stage()
        stage.engine = Waiting(V0)
        stage.engine.on_poll = stage._count
        stage.worker = EngineWorker(stage.engine, FakeCompute(0.0), clock=LoopClock(), tick_s=0.1)
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(1.05)
        assert stage.polls <= 11
        await stage.worker.close()

    run_virtual(main())
