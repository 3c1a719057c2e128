"""Damage to single parts of published deltas, and parts that are applied in another order.

A delta is damaged alone, or together with its manifest, which then has the lengths and the checksum of the damaged
delta, and a right mark, as from a publisher with faulty memory. The checksums of the tensors are always the right ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from tests.doubles.transport import FaultyTransport
from tests.fault_simulation.scenario import PartFault, PartFaultKind
from tidemill.core.records import WeightManifest
from tidemill.weights.delta import Threads
from tidemill.weights.snapshot import Blob, checksum
from tidemill.weights.store import delta_name, manifest_name, pack_manifest, unpack_manifest

T = TypeVar("T")
R = TypeVar("R")

NO_CHANGE = bytes(4)
"""A part without changed elements."""


class ShuffledThreads(Threads):
    """Stands for several threads: runs the items of a job in an order drawn from a seed, in the caller."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        jobs = list(items)
        results: dict[int, R] = {}
        errors: dict[int, Exception] = {}
        for at in self._rng.sample(range(len(jobs)), len(jobs)):
            if errors and self._rng.random() < 0.5:
                continue  # cancelled
            try:
                results[at] = function(jobs[at])
            except Exception as error:  # noqa: BLE001 - raised below
                errors[at] = error
        if errors:
            raise errors[min(errors)]
        return [results[at] for at in range(len(jobs))]


class PartFaultTransport(FaultyTransport):
    """Damages planned deltas when their manifest is written, until the manifest has been read often enough."""

    def __init__(self, faults: Sequence[PartFault]) -> None:
        super().__init__(zero_copy=False)
        self._planned = faults
        self._deltas = 0  # published so far
        self._right: dict[str, dict[str, Blob]] = {}  # the blobs to restore, by name of the manifest
        self._reads_left: dict[str, int] = {}

    async def put(self, name: str, blob: Blob) -> None:
        await super().put(name, blob)
        if not name.endswith(".manifest"):
            return
        manifest = unpack_manifest(blob, of=name)
        if manifest.delta is None:
            return
        fault = next((fault for fault in self._planned if fault.delta == self._deltas), None)
        self._deltas += 1
        if fault is not None:
            await self._damage(fault, manifest)

    async def get(self, name: str) -> Blob:
        if name in self._right and not self._reads_left[name]:
            right = self._right.pop(name)
            self.blobs |= {each: blob for each, blob in right.items() if each in self.blobs}
        if name in self._right:
            self._reads_left[name] -= 1
        return await super().get(name)

    async def _damage(self, fault: PartFault, manifest: WeightManifest) -> None:
        name, delta = manifest_name(manifest.version), delta_name(manifest.version)
        self._right[name] = {each: self.blobs[each] for each in (name, delta)}
        self._reads_left[name] = fault.reads
        wrong, blob = damaged(fault, manifest, self.blobs[delta])
        await super().put(delta, blob)
        await super().put(name, pack_manifest(wrong))


def damaged(fault: PartFault, manifest: WeightManifest, delta: Blob) -> tuple[WeightManifest, Blob]:
    """The manifest and the delta after a fault."""
    entry, rng = manifest.delta, random.Random(fault.seed)
    assert entry is not None
    at = fault.part % len(entry.parts)
    if fault.kind == "wrong checksum":
        entry = msgspec.structs.replace(entry, checksum=entry.checksum ^ 1 << rng.randrange(64))
    elif fault.kind == "wrong length":
        entry = msgspec.structs.replace(entry, parts=_moved(entry.parts, at, rng))
    else:
        ends = itertools.accumulate(entry.parts)
        parts = [delta[end - length : end].tobytes() for length, end in zip(entry.parts, ends, strict=True)]
        _change(parts, at, fault.kind, rng)
        delta = np.frombuffer(b"".join(parts), np.uint8)
        if fault.sealed:
            lengths = tuple(map(len, parts))
            entry = msgspec.structs.replace(entry, nbytes=len(delta), checksum=checksum(delta), parts=lengths)
    return msgspec.structs.replace(manifest, delta=entry), delta


def _moved(lengths: Sequence[int], at: int, rng: random.Random) -> tuple[int, ...]:
    """The lengths with another end of a part, which may be before its start or beyond the next part."""
    changed = list(lengths)
    step = rng.choice([-1, 1]) * rng.randint(1, 2 * lengths[at])
    changed[at] += step
    if at + 1 < len(changed):
        changed[at + 1] -= step
    return tuple(changed)


def _change(parts: list[bytes], at: int, kind: PartFaultKind, rng: random.Random) -> None:
    part = parts[at]
    if kind == "wrong byte":
        place = rng.randrange(len(part))
        parts[at] = part[:place] + bytes([part[place] ^ 1 << rng.randrange(8)]) + part[place + 1 :]
    elif kind == "torn":
        parts[at] = part[: rng.randrange(1, len(part))]
    elif kind == "no change":
        parts[at] = NO_CHANGE
    elif kind == "exchanged":
        other = (at + rng.randrange(1, max(2, len(parts)))) % len(parts)
        parts[at], parts[other] = parts[other], part
    elif kind == "missing" and len(parts) > 1:  # an empty blob cannot be spoiled
        del parts[at]
