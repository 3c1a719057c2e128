"""Ticks of a worker: reports, idling, aborts, heartbeats, notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.doubles.engine import FakeCompute, FakeEngine
from tests.doubles.samples import SAMPLING, completion, make_id
from tests.virtual_time import run_virtual
from tests.worker_stage import PROBE, V0, V1, SlowSource, Stage, request
from tidemill.core.protocols import LoopClock
from tidemill.core.records import TokenDelta, WeightsSum, count, unpack_tokens
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread

T = TypeVar("T")


def test_one_report_per_tick_until_all_samples_are_finished() -> None:
    async def main() -> None:
        stage = Stage()
        requests = [request("p0"), request("p1"), request("p2"), request("p3")]
        await stage.worker.submit(requests)
        first = await stage.worker.next_report(5.0)
        assert first is not None
        # three slots, one queued sample, two tokens per tick and slot, 0.1 s per tick
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
def test_samples_submitted_while_the_last_ones_finish_are_generated(delay: float) -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(delay)
        await stage.worker.submit([request("p1")])
        finished = [delta.sample_id for delta in await stage.deltas() if delta.finish]
        assert finished == [make_id("p0"), make_id("p1")]
        await stage.worker.close()

    run_virtual(main())


class LateResults(FakeCompute):
    """Returns results of polls late, after those of later submits."""

    async def run(self, function: Callable[[], T]) -> T:
        result = await super().run(function)
        if result is not None:
            await asyncio.sleep(0.5)
        return result


def test_a_worker_does_not_idle_after_a_submit_during_the_last_poll() -> None:
    async def main() -> None:
        stage = Stage()
        stage.compute = LateResults(0.1)
        stage.worker = stage.make_worker()
        stage.engine.per_poll = 100  # one poll finishes a sample
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(0.15)  # that poll is over, but its result is late
        await stage.worker.submit([request("p1")])
        assert {delta.sample_id for delta in await stage.deltas() if delta.finish} == {make_id("p0"), make_id("p1")}
        await stage.worker.close()

    run_virtual(main())


def test_aborted_samples_are_reported_and_siblings_continue() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0"), request("p1")])
        await stage.worker.next_report(5.0)
        await stage.worker.abort([make_id("p0"), make_id("unknown")])
        finishes = {delta.sample_id: delta.finish for delta in await stage.deltas() if delta.finish}
        assert finishes[make_id("p0")] == "aborted"
        assert finishes[make_id("p1")] in ("stop", "length")
        await stage.worker.abort([make_id("p0")])
        assert await stage.worker.next_report(1.0) is None  # nothing to report
        await stage.worker.close()

    run_virtual(main())


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


def test_a_queue_that_waits_for_a_later_version_is_polled_once_per_tick() -> None:
    class Waiting(FakeEngine):
        """Has a queued sample that waits for a later version."""

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
        assert 10 <= stage.polls <= 11
        await stage.worker.close()

    run_virtual(main())


def test_an_idle_worker_sends_heartbeats() -> None:
    async def main() -> None:
        stage = Stage()
        stage.worker = stage.make_worker(heartbeat_s=1.0)
        for second in (1, 2, 3):
            report = await stage.worker.next_report(5.0)
            assert report is not None and not report.deltas
            assert asyncio.get_running_loop().time() == pytest.approx(second)
        await stage.worker.submit([request("p0")])
        made = [report for _ in range(5) if (report := await stage.worker.next_report(5.0)) is not None]
        assert sum(bool(report.deltas) for report in made) >= 3
        tokens = sum(count(delta.token_ids) for report in made for delta in report.deltas)
        assert made[-1].status.tokens_generated == tokens > 0
        await asyncio.sleep(100.25)  # without a reader, heartbeats do not accumulate
        assert await stage.worker.next_report(0.0) is not None
        assert await stage.worker.next_report(0.0) is None
        await stage.worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_a_notice_is_reported_once_and_immediately() -> None:
    async def main() -> None:
        stage = Stage()
        stage.worker.notice(12.5)
        report = await stage.worker.next_report(0.1)
        assert report is not None and report.notice_s == 12.5
        await stage.worker.submit([request("p0")])
        later = await stage.worker.next_report(5.0)
        assert later is not None and later.notice_s is None
        await stage.worker.close()

    run_virtual(main())


class Memory:
    """Weights of 16 parts."""

    def __init__(self, expected: tuple[int, ...] = tuple(range(16))) -> None:
        self.expected, self.actual = expected, list(expected)

    def part_sum(self, number: int) -> int:
        return self.actual[number]


def test_every_part_of_the_weights_is_in_sixteen_reports() -> None:
    async def main() -> None:
        stage, memory = Stage(), Memory()
        stage.worker = EngineWorker(
            stage.engine,
            FakeCompute(0.0),
            clock=LoopClock(),
            tick_s=0.1,
            heartbeat_s=1.0,
            check=memory,
            timer=lambda: 0.0,
        )
        idle = [await stage.worker.next_report(5.0) for _ in range(4)]
        await stage.worker.submit([request(f"p{at}") for at in range(12)])
        reports = idle + [await stage.worker.next_report(5.0) for _ in range(12)]
        sums = [report.status.weights for report in reports if report is not None]
        assert sums == [WeightsSum(version=0, part=part, total=part) for part in range(16)]
        memory.actual[2] ^= 1 << 33
        later = [await stage.worker.next_report(5.0) for _ in range(16)]
        sums = [report.status.weights for report in later if report is not None]
        assert [each.part for each in sums if each is not None and each.total != each.part] == [2]
        await stage.worker.close()

    run_virtual(main())


def test_the_replaced_weights_are_summed_at_a_load() -> None:
    async def main() -> None:
        stage, memory = Stage(), Memory()
        stage.worker = EngineWorker(
            stage.engine,
            FakeCompute(0.0),
            clock=LoopClock(),
            tick_s=0.1,
            heartbeat_s=1.0,
            source=SlowSource(stage.engine),
            check=memory,
            timer=lambda: 0.0,
        )
        await stage.worker.next_report(5.0)
        memory.actual[7] = 70
        loaded = await stage.worker.load(V1)
        assert loaded.last_sums == (0, 1, 2, 3, 4, 5, 6, 70, 8, 9, 10, 11, 12, 13, 14, 15)
        assert loaded.part_sums == memory.expected
        await stage.worker.close()

    run_virtual(main())


def test_large_weights_are_summed_in_a_small_share_of_the_time() -> None:
    """A sum of 0.01 s is taken every 2 s at most, and a load does not sum 16 parts after 1 s."""

    class Slow(Memory):
        now_s = 0.0

        def part_sum(self, number: int) -> int:
            self.now_s += 0.01
            return super().part_sum(number)

    async def main() -> None:
        stage, memory = Stage(), Slow()
        stage.worker = EngineWorker(
            stage.engine,
            FakeCompute(0.0),
            clock=LoopClock(),
            tick_s=0.1,
            heartbeat_s=0.5,
            source=SlowSource(stage.engine),
            check=memory,
            timer=lambda: asyncio.get_running_loop().time() + memory.now_s,
        )
        reports = [await stage.worker.next_report(5.0) for _ in range(20)]  # 10 s
        summed = [report for report in reports if report is not None and report.status.weights is not None]
        assert len(summed) == 5
        assert len((await stage.worker.load(V1)).last_sums) == 0
        await stage.worker.close()

    run_virtual(main())


def test_the_probe_is_computed_with_the_weights_in_use() -> None:
    async def main() -> None:
        stage = Stage()
        assert await stage.worker.run_probe(PROBE) == stage.engine.probe(PROBE)
        await stage.worker.close()

    run_virtual(main())
