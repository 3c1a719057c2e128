"""Weights to publish and pull: a few small tensors that change a little from version to version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tests.doubles.engine import FakeCompute
from tidemill.core.records import PolicyVersion, TensorEntry, WeightManifest, pack_logprobs, pack_tokens
from tidemill.weights.snapshot import Blob, allocate
from tidemill.weights.store import WeightStore

SHAPES = {"embed": (64, 16), "norm": (16,), "head": (10, 16)}
PROBE_IDS, PROBE_LOGPROBS = pack_tokens([1, 2, 3]), pack_logprobs([-1.0, -2.0])


def layout(dtype: str = "bfloat16") -> tuple[TensorEntry, ...]:
    """Each tensor at the next multiple of 64 bytes."""
    entries, offset, width = [], 0, 4 if dtype == "float32" else 2
    for name, shape in SHAPES.items():
        nbytes = int(np.prod(shape)) * width
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes, checksum=0))
        offset += -(-nbytes // 64) * 64
    return tuple(entries)


def version(number: int) -> PolicyVersion:
    return PolicyVersion(number=number, digest=f"d{number}")


def snapshot(number: int, dtype: str = "bfloat16") -> Blob:
    """Version 0 is noise; each later one differs from the previous one in about one element of twenty, by one unit."""
    entries = layout(dtype)
    buffer = allocate(entries[-1].offset + entries[-1].nbytes)
    elements: npt.NDArray[Any] = buffer.view(np.uint32 if dtype == "float32" else np.uint16)
    elements[:] = np.random.default_rng(0).integers(0, 1 << 16, len(elements))
    for step in range(1, number + 1):
        elements[np.random.default_rng(step).integers(0, len(elements), len(elements) // 20)] += 1
    return buffer


def rewritten(buffer: Blob, seed: int) -> Blob:
    """Three elements of ten are replaced: the delta has more than a third of the bytes."""
    rng, copy = np.random.default_rng(seed), allocate(len(buffer))
    old, new = buffer.view(np.uint16), copy.view(np.uint16)
    new[:] = np.where(rng.random(len(old)) < 0.3, rng.integers(0, 1 << 16, len(old)), old)
    return copy


async def publish(store: WeightStore, number: int) -> WeightManifest:
    return await store.publish(
        version(number), layout(), snapshot(number), probe_ids=PROBE_IDS, probe_logprobs=PROBE_LOGPROBS
    )


def tensors_of(buffer: Blob) -> list[bytes]:
    """The tensors of a snapshot, without the padding."""
    return [buffer[entry.offset : entry.offset + entry.nbytes].tobytes() for entry in layout()]


def rows_of_rank(
    entries: Sequence[TensorEntry], buffer: Blob, index: int, size: int
) -> tuple[tuple[TensorEntry, ...], Blob]:
    """Layout and bytes of one rank's rows; as FSDP's, they are one of `size` chunks, the last ones shorter or empty."""
    layout, rows, offset = list[TensorEntry](), list[Blob](), 0
    for entry in entries:
        most = -(-entry.shape[0] // size)
        first, last = (min(entry.shape[0], most * at) for at in (index, index + 1))
        width = entry.nbytes // entry.shape[0]
        rows.append(buffer[entry.offset + width * first : entry.offset + width * last])
        shape, nbytes = (last - first, *entry.shape[1:]), len(rows[-1])
        layout.append(msgspec.structs.replace(entry, shape=shape, offset=offset, nbytes=nbytes))
        offset += -(-nbytes // 64) * 64
    own = allocate(max(entry.offset + entry.nbytes for entry in layout))
    own[:] = 0
    for entry, source in zip(layout, rows, strict=True):
        own[entry.offset : entry.offset + entry.nbytes] = source
    return tuple(layout), own


def compute() -> FakeCompute:
    return FakeCompute(0.01)
