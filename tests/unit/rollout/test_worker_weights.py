"""Loading weights into a worker: pulled during generation, swapped between ticks, or unavailable."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual_time import run_virtual
from tests.worker_stage import PROBE, V0, V1, SlowSource, Stage, request
from tidemill.core.errors import WeightsError, WorkerLost
from tidemill.core.records import Loaded, Pulled, count


def test_new_weights_are_used_from_the_next_sample() -> None:
    async def main() -> None:
        stage = Stage()
        await stage.worker.load(V1)
        await stage.worker.submit([request("p0", version=1)])
        assert {delta.version for delta in await stage.deltas()} == {V1}
        await stage.worker.close()

    run_virtual(main())


def test_generation_continues_while_a_version_is_pulled() -> None:
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


def test_without_a_source_nothing_is_pulled() -> None:
    async def main() -> None:
        stage = Stage()
        loaded = await stage.worker.load(V1)
        assert (loaded.version, loaded.nbytes, loaded.probe_logprobs) == (V1, 0, b"")
        assert stage.engine.version == V1
        await stage.worker.close()

    run_virtual(main())


def test_nothing_is_generated_after_half_a_swap() -> None:
    async def main() -> None:
        stage = Stage()
        source = SlowSource(stage.engine, seconds=0.15)  # the samples run for longer
        stage.worker = stage.make_worker(source=source)
        await stage.worker.submit([request("p0")])

        def half(pulled: Pulled) -> None:
            raise RuntimeError("rank 1 of the engine has ended")

        source.swap = half  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="rank 1 of the engine has ended"):
            await stage.worker.load(V1)
        polls = stage.polls
        assert stage.engine.status().running
        await asyncio.sleep(5.0)
        with pytest.raises(WorkerLost, match=r"did not load a version: .*rank 1"):
            await stage.worker.submit([request("p1")])
        assert stage.polls == polls
        await stage.worker.close()

    run_virtual(main())


def test_a_failed_pull_keeps_the_current_version() -> None:
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
