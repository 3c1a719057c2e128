"""Pulling an adapter: its base is pulled once, with the first version."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.adapters import adapted, teach
from tests.published import rows_of_rank
from tidemill.core.errors import WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import PolicyVersion, TensorEntry, WeightManifest, pack_tokens
from tidemill.models.loading import probe_logprobs
from tidemill.models.snapshots import (
    Part,
    empty_copy,
    parameters_of,
    snapshot_bytes,
    snapshot_layout,
    write_snapshot,
)
from tidemill.rollout.weight_sources import EmptyModel, PulledWeights
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.publishers import ModelPublisher
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import (
    PARTS,
    MemoryTransport,
    Snapshot,
    allocate,
    joined_part_sums,
    part_ranges,
    part_sums,
)
from tidemill.weights.store import WeightStore

IDS = pack_tokens(range(2, 30))
FIRST, SECOND = (PolicyVersion(number=number, digest=f"d{number}") for number in (1, 2))


class Copying(MemoryTransport):
    """As between machines, where deltas are used."""

    zero_copy = False


class Stage:
    def __init__(self, model: PreTrainedModel, compute: ComputeThread) -> None:
        self.model, self.compute, self.transport = model, compute, Copying()
        self.store = WeightStore(self.transport, compute=compute)
        self.publisher = ModelPublisher(
            model, self.store, rollout_model=model, compute=compute, probe_ids=IDS, sends_base=True
        )
        self.hollow = empty_copy(model, torch.float32)
        puller, base = (Puller(self.transport, compute, clock=LoopClock()) for _ in range(2))
        self.pulled = PulledWeights(puller, EmptyModel(self.hollow), base=base)

    async def publish_and_load(self, version: PolicyVersion) -> tuple[WeightManifest, int]:
        """(manifest, bytes pulled)."""
        manifest = await self.publisher.publish(version)
        pulled = await self.pulled.prepare(version)
        self.pulled.swap(pulled)
        assert probe_logprobs(self.hollow, IDS) == probe_logprobs(self.model, IDS) == manifest.probe_logprobs
        return manifest, pulled.nbytes


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        yield Stage(adapted(), compute)


def base_bytes(model: PreTrainedModel) -> int:
    return snapshot_bytes(snapshot_layout(model, torch.float32, part="base"))


async def test_the_base_is_pulled_once(stage: Stage) -> None:
    first, nbytes = await stage.publish_and_load(FIRST)
    assert nbytes > first.nbytes + base_bytes(stage.model)
    teach(stage.model, seed=1)
    second, nbytes = await stage.publish_and_load(SECOND)
    assert first.base_digest == second.base_digest != ""
    assert second.nbytes == snapshot_bytes(snapshot_layout(stage.model, torch.float32))
    assert 0 < nbytes < second.nbytes + 10_000  # plus a manifest


async def test_the_base_is_kept_in_the_store(stage: Stage) -> None:
    for number in range(1, 13):
        await stage.publisher.publish(PolicyVersion(number=number, digest=f"d{number}"))
        teach(stage.model, seed=number)
    await stage.publish_and_load(PolicyVersion(number=13, digest="d13"))
    assert sum(name.endswith(".snapshot") for name in stage.transport.blobs) == 3  # two versions and the base


async def test_a_version_that_was_prepared_and_not_used_can_be_replaced(stage: Stage) -> None:
    await stage.publisher.publish(FIRST)
    await stage.pulled.prepare(FIRST)
    teach(stage.model, seed=1)
    await stage.publish_and_load(SECOND)


async def test_an_adapter_of_another_base_is_refused(stage: Stage) -> None:
    await stage.publish_and_load(FIRST)
    before = probe_logprobs(stage.hollow, IDS)
    tensors = snapshot_layout(stage.model, torch.float32, part="base")
    snapshot = allocate(snapshot_bytes(tensors))
    snapshot[:] = 0
    write_snapshot(stage.model, tensors, snapshot, part="base")
    snapshot[:4] ^= np.uint8(1)
    await stage.store.publish_base(tensors, snapshot)
    await stage.publisher.publish(SECOND)
    with pytest.raises(WeightsError, match="version 2 is an adapter of base"):
        await stage.pulled.prepare(SECOND)
    assert probe_logprobs(stage.hollow, IDS) == before


async def test_close_releases_the_snapshots(stage: Stage) -> None:
    await stage.publish_and_load(FIRST)
    stage.pulled.close()
    assert all(parameter.numel() == 0 for parameter in stage.hollow.parameters())
    assert all(parameter.numel() > 0 for parameter in stage.model.parameters())


def sums_in_memory(stage: Stage) -> tuple[int, ...]:
    return tuple(stage.pulled.part_sum(part) for part in range(PARTS))


async def test_sums_of_the_memory_are_those_of_the_published_base_and_adapter(stage: Stage) -> None:
    await stage.publish_and_load(FIRST)
    first = stage.pulled.expected
    assert sums_in_memory(stage) == first
    teach(stage.model, seed=1)
    await stage.publish_and_load(SECOND)
    assert sums_in_memory(stage) == stage.pulled.expected != first


@pytest.mark.parametrize("part", ["learned", "base"])
async def test_any_flipped_bit_is_found_in_one_part(stage: Stage, part: Part) -> None:
    await stage.publish_and_load(FIRST)
    rng = random.Random(part)
    for parameter in parameters_of(stage.hollow, part).values():
        words = parameter.detach().view(-1).view(torch.int32).numpy()
        at, mask = rng.randrange(len(words)), np.int32(1 << rng.randrange(31))
        words[at] ^= mask
        different = [one != two for one, two in zip(sums_in_memory(stage), stage.pulled.expected, strict=True)]
        assert sum(different) == 1
        words[at] ^= mask
    assert sums_in_memory(stage) == stage.pulled.expected


@pytest.mark.parametrize("sizes", [[6], [14, 10, 2, 1000], [0, 7, 4096, 0, 3], [8] * 3])
def test_the_parts_cover_every_byte_once(sizes: list[int]) -> None:
    covered = [np.zeros(size, int) for size in sizes]
    for part in range(PARTS):
        for tensor, start, end in part_ranges(sizes, part):
            assert start % 8 == 0
            covered[tensor][start:end] += 1
    assert all((each == 1).all() for each in covered)


@pytest.mark.parametrize("seed", range(8))
def test_the_sums_of_rows_of_ranks_are_those_of_whole_tensors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries, offset = list[TensorEntry](), 0
    for at in range(4):
        shape = tuple(int(size) for size in rng.integers(1, 30, rng.integers(1, 3)))
        nbytes = 2 * math.prod(shape)
        entries.append(
            TensorEntry(name=str(at), dtype="bfloat16", shape=shape, offset=offset, nbytes=nbytes, checksum=0)
        )
        offset += -(-nbytes // 64) * 64
    buffer = allocate(offset)
    buffer[:] = rng.integers(0, 256, offset)
    version = PolicyVersion(number=1, digest="1")
    for ranks in (1, 2, 3, 5, 40):
        parts = []
        for rank in range(ranks):
            layout, rows = rows_of_rank(entries, buffer, rank, ranks)
            manifest = WeightManifest(version=version, digest=str(rank), nbytes=len(rows), tensors=layout)
            parts.append(Snapshot(manifest=manifest, buffer=rows))
        assert joined_part_sums(parts) == part_sums(entries, buffer)


def test_tensors_of_odd_lengths_have_the_same_sums_in_both_implementations() -> None:
    model = torch.nn.Module()
    entries, offset = list[TensorEntry](), 0
    for at, length in enumerate((3, 1, 33, 260)):
        values = torch.randn(length, dtype=torch.bfloat16)
        setattr(model, f"w{at}", torch.nn.Parameter(values, requires_grad=False))
        entry = TensorEntry(
            name=f"w{at}", dtype="bfloat16", shape=(length,), offset=offset, nbytes=2 * length, checksum=0
        )
        entries.append(entry)
        offset += 64 * (2 * length // 64 + 1)
    buffer = allocate(offset)
    for entry in entries:
        own = getattr(model, entry.name).detach().view(torch.uint8).numpy()
        buffer[entry.offset : entry.offset + entry.nbytes] = own
    model.__dict__["device"] = torch.device("cpu")
    user = EmptyModel(cast("PreTrainedModel", model))
    assert tuple(user.part_sum("learned", part) for part in range(PARTS)) == part_sums(entries, buffer)
