"""The worker around an engine: ticks, failures, ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest

from tests.fake_fleet import SAMPLING, FakeCompute, FakeEngine, completion, make_id, make_prompt
from tests.virtual_time import run_virtual
from tidemill.core.buffers import count, pack_tokens, unpack_tokens
from tidemill.core.clock import LoopClock
from tidemill.core.errors import DeadlineError, WeightsError, WorkerLost
from tidemill.core.protocols import WeightSource
from tidemill.core.records import (
    GenerateRequest,
    Loaded,
    PolicyVersion,
    Pulled,
    TokenDelta,
    WeightManifest,
    WorkerReport,
)
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
        self.worker = self.make_worker()

    def make_worker(self, heartbeat_s: float = 1e6, source: WeightSource | None = None) -> EngineWorker:
        """Its heartbeat is out of the way unless asked for."""
        return EngineWorker(
            self.engine,
            self.compute,
            clock=LoopClock(),
            tick_s=0.1,
            worker_id="w1",
            lease_id="lease",
            source=source,
            heartbeat_s=heartbeat_s,
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
        stage.compute = LateNews(0.1)
        stage.worker = stage.make_worker()
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


PROBE = pack_tokens([3, 1, 4, 1, 5])


class SlowSource:
    """A pull takes `seconds`; notes what the engine did when it swapped."""

    def __init__(self, engine: FakeEngine, seconds: float = 1.0) -> None:
        self.engine, self.seconds = engine, seconds
        self.prepared: list[PolicyVersion] = []
        self.swapped: list[tuple[PolicyVersion, PolicyVersion]] = []  # from the engine's version, to
        self.closed = 0
        self.fault: Exception | None = None

    async def prepare(self, version: PolicyVersion) -> Pulled:
        await asyncio.sleep(self.seconds)
        if self.fault is not None:
            raise self.fault
        self.prepared.append(version)
        manifest = WeightManifest(version=version, digest=version.digest, nbytes=100, tensors=(), probe_ids=PROBE)
        return Pulled(manifest=manifest, nbytes=10, full=False, pull_s=self.seconds, retries=2)

    def swap(self, pulled: Pulled) -> None:
        self.swapped.append((self.engine.version, pulled.manifest.version))

    def close(self) -> None:
        self.closed += 1


def test_generation_goes_on_while_a_version_is_pulled() -> None:
    async def main() -> None:
        stage = Stage()
        source = SlowSource(stage.engine)
        stage.worker = stage.make_worker(source=source)
        loading = asyncio.create_task(stage.worker.load(V1))
        await stage.worker.submit([request("p0")])
        made = await stage.deltas()
        assert {delta.version for delta in made} == {V0}
        assert made[-1].finish is not None

        loaded = await loading

        assert source.swapped == [(V0, V1)]
        expected = stage.engine.probe(PROBE)
        assert count(expected) == 4
        assert loaded == Loaded(
            version=V1,
            nbytes=10,
            full=False,
            pull_s=1.0,
            swap_s=loaded.swap_s,
            retries=2,
            probe_logprobs=expected,
        )
        assert 0 <= loaded.swap_s < 1.0
        await stage.worker.close()
        assert source.closed

    run_virtual(main())


def test_without_a_source_the_engine_has_the_weights_already() -> None:
    async def main() -> None:
        stage = Stage()
        loaded = await stage.worker.load(V1)
        assert (loaded.version, loaded.nbytes, loaded.probe_logprobs) == (V1, 0, b"")
        assert stage.engine.version == V1
        await stage.worker.close()

    run_virtual(main())


def test_a_version_that_cannot_be_had_leaves_the_worker_at_work() -> None:
    async def main() -> None:
        stage = Stage()
        source = SlowSource(stage.engine)
        source.fault = WeightsError("version 1 is gone")
        stage.worker = stage.make_worker(source=source)
        with pytest.raises(WeightsError, match="version 1 is gone"):
            await stage.worker.load(V1)
        await stage.worker.submit([request("p0")])
        assert {delta.version for delta in await stage.deltas()} == {V0}
        await stage.worker.close()

    run_virtual(main())


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.15, 0.5, 1.05])
def test_nothing_survives_a_kill(at_s: float) -> None:
    """Cut while idle, in a poll, between polls, in a pull, in a swap."""

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
        told = len(await waiting)
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
        assert told >= int(at_s / 0.1)
        stage.worker.kill()
        stage.worker.notice(1.0)
        await stage.worker.close()

    run_virtual(main())


async def _reports_until_lost(worker: EngineWorker) -> list[WorkerReport]:
    reports: list[WorkerReport] = []
    with suppress(WorkerLost):
        while report := await worker.next_report(100.0):
            reports.append(report)
        pytest.fail("it fell silent instead")
    return reports


def test_reports_not_taken_die_with_the_worker() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.submit([request("p0")])
        await asyncio.sleep(0.15)
        stage.worker.kill()
        with pytest.raises(WorkerLost):
            await stage.worker.next_report(1.0)

    run_virtual(main())


def test_a_caller_that_is_cancelled_is_not_told_of_a_kill() -> None:
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


def test_an_idle_worker_says_that_it_is_there() -> None:
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
        await asyncio.sleep(100.25)  # nobody listens: nothing piles up
        assert await stage.worker.next_report(0.0) is not None
        assert await stage.worker.next_report(0.0) is None
        await stage.worker.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


async def test_an_engine_that_does_not_come_back_is_silence() -> None:
    engine, compute, go_on = FakeEngine(V0), ComputeThread("stuck"), threading.Event()
    engine.on_poll = lambda: (go_on.wait(10.0), None)[1]
    worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=0.01, heartbeat_s=0.01)
    assert await worker.next_report(5.0) is not None
    await worker.submit([request("p0")])
    await asyncio.sleep(0.05)
    while await worker.next_report(0.0):
        pass  # said before the engine was stuck
    assert await worker.next_report(0.2) is None
    worker.kill()
    go_on.set()
    await compute.close(5.0)


def test_a_notice_is_told_once_and_at_once() -> None:
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
