"""Publishing: whole or not at all, two versions and what is pinned, nothing left over."""

from __future__ import annotations

import asyncio

import pytest

from tests.doubles.transport import FaultyTransport, corrupt, torn
from tests.published import PROBE_IDS, PROBE_LOGPROBS, compute, layout, publish, snapshot, tensors_of, version
from tests.virtual_time import run_virtual
from tidemill.core.errors import WeightsError
from tidemill.weights.snapshot import Blob, Damaged, digest_of, verify
from tidemill.weights.store import DELTAS_KEPT, WeightStore, manifest_name, snapshot_name, unpack_manifest


class Cable(FaultyTransport):
    """Breaks at the n-th put, counting from 0, for good or as a cancellation."""

    def __init__(self, *, breaks_at: int, fault: BaseException, zero_copy: bool = False) -> None:
        super().__init__(zero_copy=zero_copy)
        self.breaks_at, self.fault, self.puts = breaks_at, fault, 0

    async def put(self, name: str, blob: Blob) -> None:
        self.puts += 1
        if self.puts == self.breaks_at + 1:
            await super().put(name, blob[: len(blob) // 2])  # what a torn write leaves
            raise self.fault
        await super().put(name, blob)


def kinds(transport: FaultyTransport) -> dict[str, list[int]]:
    """Version numbers by kind of blob."""
    found: dict[str, list[int]] = {}
    for name in sorted(transport.blobs):
        found.setdefault(name.rsplit(".", 1)[1], []).append(int(name.split("-")[0]))
    return found


def test_manifest_contents() -> None:
    async def main() -> None:
        transport = FaultyTransport(zero_copy=False)
        store = WeightStore(transport, compute=compute())
        await publish(store, 1)
        manifest = await publish(store, 2)
        assert store.latest == manifest
        assert manifest.version == version(2)
        assert (manifest.probe_ids, manifest.probe_logprobs) == (PROBE_IDS, PROBE_LOGPROBS)
        assert manifest.digest == digest_of(manifest.tensors)
        assert manifest.delta is not None
        assert manifest.delta.base == version(1)
        assert manifest.delta.nbytes < manifest.nbytes / 5
        assert unpack_manifest(transport.blobs[manifest_name(version(2))], of="2") == manifest
        stored = transport.blobs[snapshot_name(version(2))]
        verify(manifest, stored)
        assert tensors_of(stored) == tensors_of(snapshot(2))

    run_virtual(main())


def test_a_torn_base_snapshot_only_skips_the_delta() -> None:
    async def main() -> None:
        transport = FaultyTransport(zero_copy=False)
        store = WeightStore(transport, compute=compute())
        await publish(store, 1)
        transport.spoil("snapshot", torn)
        manifest = await publish(store, 2)
        assert manifest.delta is None
        verify(manifest, transport.blobs[snapshot_name(version(2))])

    run_virtual(main())


def test_verify_detects_changed_tensors_and_sizes() -> None:
    async def main() -> None:
        store = WeightStore(FaultyTransport(), compute=compute())
        manifest = await publish(store, 1)
        for entry in layout():
            wrong = snapshot(1)
            wrong[entry.offset + entry.nbytes - 1] ^= 1
            with pytest.raises(Damaged, match=f"version 1: tensor {entry.name} has a different checksum"):
                verify(manifest, wrong)
        with pytest.raises(Damaged, match="version 1: the snapshot has 100 bytes, not"):
            verify(manifest, snapshot(1)[:100])

    run_virtual(main())


def test_the_newest_two_snapshots_and_eight_deltas_are_kept() -> None:
    async def main() -> None:
        transport = FaultyTransport(zero_copy=False)
        store = WeightStore(transport, compute=compute())
        for number in range(1, 12):
            await publish(store, number)
        kept = sorted(range(12 - DELTAS_KEPT, 12), key=str)
        assert kinds(transport) == {"snapshot": [10, 11], "manifest": kept, "delta": kept}
        await store.make_room()
        assert kinds(transport)["snapshot"] == [11]
        await store.close()
        assert not transport.blobs

    run_virtual(main())


def test_a_pinned_version_stays_until_its_last_reader_is_done() -> None:
    async def main() -> None:
        transport = FaultyTransport()
        store = WeightStore(transport, compute=compute())
        await publish(store, 1)
        with store.pinned(version(1)):
            with store.pinned(version(1)):
                for number in range(2, 15):
                    await publish(store, number)
            await publish(store, 15)
            assert kinds(transport)["snapshot"] == [1, 14, 15]
            assert 1 in kinds(transport)["manifest"]
        await publish(store, 16)
        assert kinds(transport)["snapshot"] == [15, 16]
        assert 1 not in kinds(transport)["manifest"]

    run_virtual(main())


@pytest.mark.parametrize("fault", [OSError("no space left"), asyncio.CancelledError()])
@pytest.mark.parametrize(("zero_copy", "at"), [(True, 0), (True, 1), (False, 0), (False, 1), (False, 2)])
def test_an_interrupted_publish_is_invisible_and_is_cleaned_up(zero_copy: bool, at: int, fault: BaseException) -> None:
    """In the snapshot, in the delta where there is one, in the manifest."""

    async def main() -> None:
        puts_of_the_first = 2  # snapshot, manifest
        transport = Cable(breaks_at=puts_of_the_first + at, fault=fault, zero_copy=zero_copy)
        store = WeightStore(transport, compute=compute())
        first = await publish(store, 1)
        with pytest.raises(type(fault)):
            await publish(store, 2)

        assert store.latest == first
        readable = unpack_manifest(transport.blobs[manifest_name(version(1))], of="1")
        assert readable == first
        verify(readable, transport.blobs[snapshot_name(readable.version)])
        second = await publish(store, 3)
        expected = {"snapshot": [1, 3], "manifest": [1, 3]} | ({} if zero_copy else {"delta": [3]})
        assert kinds(transport) == expected
        assert zero_copy or (second.delta is not None and second.delta.base == version(1))

    run_virtual(main())


def test_no_delta_when_it_saves_nothing() -> None:
    async def main() -> None:
        store = WeightStore(FaultyTransport(zero_copy=True), compute=compute())
        await publish(store, 1)
        assert (await publish(store, 2)).delta is None  # nothing is copied anyway

        transport = FaultyTransport(zero_copy=False)
        store = WeightStore(transport, compute=compute())
        assert (await publish(store, 1)).delta is None  # the first
        other = await store.publish(version(2), layout("float32"), snapshot(2, "float32"))
        assert other.delta is None  # another layout
        noise = snapshot(3, "float32")
        noise[:] = corrupt(noise[::-1])
        assert (await store.publish(version(3), layout("float32"), noise)).delta is None  # larger than the snapshot

        transport.spoil("snapshot", _refuse)
        assert (await store.publish(version(4), layout("float32"), snapshot(4, "float32"))).delta is None

    run_virtual(main())


def _refuse(blob: Blob) -> Blob:
    raise WeightsError("the cable is cut")


def test_a_published_snapshot_is_read_only() -> None:
    async def main() -> None:
        transport = FaultyTransport()
        await publish(WeightStore(transport, compute=compute()), 1)
        stored = await transport.get(snapshot_name(version(1)))
        with pytest.raises(ValueError, match="read-only"):
            stored[0] = 1
        with pytest.raises(WeightsError, match=r"2-d2\.snapshot"):
            await transport.get(snapshot_name(version(2)))

    run_virtual(main())
