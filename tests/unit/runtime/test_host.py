"""Workers in the trainer's process use published weights and generate the trainer's tokens."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.char_codec import make_prompt
from tests.engine_requests import prompts, request
from tests.model_folders import save_folder
from tests.model_shapes import llama
from tidemill.config.schema import RunSpec
from tidemill.core.errors import WorkerLost
from tidemill.core.protocols import LoopClock, Worker
from tidemill.core.records import (
    Lease,
    PolicyVersion,
    Prompt,
    SampleId,
    count,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from tidemill.models.lora import learned_parameters
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.local import InProcessHost
from tidemill.runtime.model_bundle import NO_VERSION, ModelBundle, load_model_bundle
from tidemill.runtime.publishers import ModelPublisher, probe_sequence
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore

PROBE = pack_tokens(range(2, 20))
V1, V2 = PolicyVersion(number=1, digest="one"), PolicyVersion(number=2, digest="two")
REQUESTS = [request(text, index=index) for text in prompts(3, length=9, shared=5) for index in range(2)]


def lease(name: str) -> Lease:
    return Lease(lease_id=f"lease-{name}", worker_id=name, kind="preemptible", price_usd_per_hour=0.1, start_s=0.0)


class Stage:
    """A trained model, the worker of its engine, its publisher and its host."""

    def __init__(self, parts: ModelBundle, compute: ComputeThread, weights_compute: ComputeThread) -> None:
        self.parts, self.transport = parts, MemoryTransport()
        store = WeightStore(self.transport, compute=weights_compute)
        self.publisher = ModelPublisher(
            parts.model,
            store,
            compute=compute,
            rollout_model=parts.rollout_model,
            probe_ids=PROBE,
        )
        clock = LoopClock()
        self.host = InProcessHost(
            parts, store, compute=compute, weights_compute=weights_compute, clock=clock, prompt_tokens=9
        )
        engine = parts.engine(NO_VERSION, prompt_tokens=9)
        self.local = EngineWorker(engine, compute, clock=clock, tick_s=0.01)

    def learn(self) -> None:
        with torch.no_grad():
            for parameter in learned_parameters(self.parts.model).values():
                parameter.mul_(1.01).add_(0.001)


@pytest.fixture(
    params=[
        ("fp32", 0),
        ("bf16", 4),
        *(pytest.param(both, marks=pytest.mark.slow) for both in (("bf16", 0), ("fp32", 4))),
    ],
    ids=lambda both: f"{both[0]}-rank{both[1]}",
)
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    precision, rank = request.param
    spec = RunSpec.model_validate(
        {
            "model": {"source": str(save_folder(llama(), tmp_path)), "lora": {"rank": rank}},
            "sampling": {"max_new_tokens": 12},
            "engine": {"slots": 4, "batch_invariant": True, "tick_s": 0.01},
            "trainer": {"threads": 1, "precision": precision, "device": "cpu"},
        }
    )
    async with AsyncExitStack() as stack:
        compute, weights_compute = ComputeThread(), ComputeThread("weights")
        stack.push_async_callback(compute.close)
        stack.push_async_callback(weights_compute.close)
        subject = Stage(load_model_bundle(spec, progress=lambda _: None), compute, weights_compute)
        stack.push_async_callback(subject.local.close)
        stack.push_async_callback(subject.host.close)
        yield subject


async def generate(worker: Worker) -> dict[SampleId, tuple[list[int], list[float]]]:
    """Tokens and logprobs of every request."""
    await worker.submit(REQUESTS)
    made: dict[SampleId, tuple[list[int], list[float]]] = {one.sample_id: ([], []) for one in REQUESTS}
    finished = 0
    while finished < len(REQUESTS):
        report = await worker.next_report(10.0)
        assert report is not None
        for delta in report.deltas:
            tokens, logprobs = made[delta.sample_id]
            tokens.extend(unpack_tokens(delta.token_ids))
            logprobs.extend(unpack_logprobs(delta.logprobs))
            finished += delta.finish is not None
    return made


async def test_a_pulled_version_generates_the_same_bits_as_the_trainers_engine(stage: Stage) -> None:
    worker = await stage.host.start(lease("spot-1"))
    for version in (V1, V2):
        manifest = await stage.publisher.publish(version)
        await stage.local.load(version)
        loaded = await worker.load(version)
        assert (loaded.version, loaded.full, loaded.retries) == (version, True, 0)
        assert loaded.swap_s > 0
        assert loaded.probe_logprobs == manifest.probe_logprobs
        assert count(loaded.probe_logprobs) == count(PROBE) - 1
        assert await generate(worker) == await generate(stage.local)
        stage.learn()


async def test_training_does_not_change_a_worker_before_it_loads(stage: Stage) -> None:
    await stage.publisher.publish(V1)
    worker = await stage.host.start(lease("spot-1"))
    await worker.load(V1)
    before = await generate(worker)
    for _ in range(20):
        stage.learn()
    assert await generate(worker) == before
    await stage.publisher.publish(V2)
    assert await generate(worker) == before
    await worker.load(V2)
    assert await generate(worker) != before


async def test_workers_of_a_version_share_its_memory_and_reports_name_the_lease(stage: Stage) -> None:
    await stage.publisher.publish(V1)
    workers = [await stage.host.start(lease(name)) for name in ("spot-1", "spot-2")]
    for worker in workers:
        await worker.load(V1)
    assert len(stage.transport.blobs) == 2  # snapshot and manifest: both workers read the same
    sources = [worker._source for worker in workers]
    addresses = {next(source._user._model.parameters()).data_ptr() for source in sources}  # type: ignore[union-attr]
    assert len(addresses) == 1
    report = await workers[1].next_report(5.0)
    assert report is not None
    assert (report.lease_id, report.status.worker_id, report.status.version) == ("lease-spot-2", "spot-2", 1)


async def test_an_ended_worker_leaves_the_trainers_weights_intact(stage: Stage) -> None:
    """With an adapter both share a base."""
    await stage.publisher.publish(V1)
    await stage.local.load(V1)
    before = await generate(stage.local)
    worker = await stage.host.start(lease("spot-1"))
    await worker.load(V1)
    assert await generate(worker) == before
    await worker.close()
    await stage.local.load(V2)  # nothing cached: it computes again
    assert await generate(stage.local) == before


async def test_publishing_the_newest_version_again_does_nothing(stage: Stage) -> None:
    first = await stage.publisher.publish(V1)
    stage.learn()
    assert await stage.publisher.publish(V1) is first
    await stage.publisher.close()
    assert not stage.transport.blobs


async def test_a_killed_worker_frees_its_weights(stage: Stage) -> None:
    await stage.publisher.publish(V1)
    worker = await stage.host.start(lease("spot-1"))
    await worker.load(V1)
    await worker.submit(REQUESTS)
    memory = stage.transport.blobs["1-one.snapshot"]
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    held = weakref.ref(memory)
    del memory
    gc.disable()
    try:
        worker.kill()
        with pytest.raises(WorkerLost):
            await worker.next_report(1.0)
        del worker
        for version in (V2, PolicyVersion(number=3, digest="three")):
            await stage.publisher.publish(version)
        await asyncio.sleep(0.1)
        assert held() is None  # without waiting for the garbage collector: a snapshot is large
    finally:
        gc.enable()


async def test_garbage_collection_scans_only_objects_created_after_the_first_worker(stage: Stage) -> None:
    gc.unfreeze()  # what the test session has frozen
    try:
        for name in ("spot-1", "spot-2"):
            await stage.host.start(lease(name))
            assert len(gc.get_objects()) < gc.get_freeze_count()  # modules and the trainer: not scanned at every join
        await stage.host.close()
        assert gc.get_freeze_count() == 0
    finally:
        gc.collect()
        gc.freeze()


async def test_what_the_application_has_frozen_stays_frozen(stage: Stage) -> None:
    gc.freeze()
    await stage.host.start(lease("spot-1"))
    await stage.host.close()
    assert gc.get_freeze_count() > len(gc.get_objects())


async def test_closing_ends_the_workers(stage: Stage) -> None:
    await stage.publisher.publish(V1)
    worker = await stage.host.start(lease("spot-1"))
    await worker.load(V1)
    await worker.submit(REQUESTS)
    await stage.host.close()
    with pytest.raises(WorkerLost, match="spot-1 was killed"):
        await worker.next_report(1.0)


def test_the_probe_is_the_start_of_the_first_prompt() -> None:
    class Source:
        def __init__(self, text: str) -> None:
            self.text = text

        def train_batch(self, step: int) -> list[tuple[int, Prompt]]:
            return [(0, make_prompt(self.text))]

        def held_out(self, limit: int | None = None) -> list[Prompt]:
            return []

    assert unpack_tokens(probe_sequence(Source("12+3="))) == [ord(char) for char in "12+3="]
    assert count(probe_sequence(Source("x" * 1000))) == 64
    assert unpack_tokens(probe_sequence(Source("x"))) == [ord("x")] * 2
