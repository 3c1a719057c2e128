"""Pulling: by the fewest bytes, never wrong ones, never under the engine's feet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from tests.doubles.transport import FaultyTransport, corrupt, torn
from tests.published import compute, layout, publish, rewritten, snapshot, tensors_of, version
from tests.virtual_time import run_virtual
from tidemill.core.errors import WeightsError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Pulled
from tidemill.weights.puller import ATTEMPTS, Puller
from tidemill.weights.snapshot import ALIGNMENT, Blob, Snapshot
from tidemill.weights.store import WeightStore, delta_name, manifest_name, snapshot_name


class Stage:
    def __init__(self, *, zero_copy: bool = False) -> None:
        self.transport = FaultyTransport(zero_copy=zero_copy)
        self.store = WeightStore(self.transport, compute=compute())
        self.puller = self.new_puller()
        self.bound: list[Snapshot] = []

    def new_puller(self) -> Puller:
        return Puller(self.transport, compute(), clock=LoopClock(), timeout_s=60.0, pinned=self.store.pinned)

    async def load(self, number: int) -> Pulled:
        pulled = await self.puller.prepare(version(number))
        self.puller.swap(pulled, self.bound.extend)
        assert tensors_of(self.bound[-1].buffer) == tensors_of(snapshot(number))
        assert self.bound[-1].manifest.version == version(number)
        return pulled

    def forget_reads(self) -> list[str]:
        reads = list(self.transport.reads)
        self.transport.reads.clear()
        return reads


def test_full_first_then_deltas_in_two_buffers() -> None:
    async def main() -> None:
        stage = Stage()
        manifest = await publish(stage.store, 1)
        first = await stage.load(1)
        assert (first.full, first.retries) == (True, 0)
        assert first.nbytes > manifest.nbytes
        for number in range(2, 8):
            manifest = await publish(stage.store, number)
            stage.forget_reads()
            pulled = await stage.load(number)
            assert (pulled.full, pulled.retries) == (False, 0)
            assert manifest.delta is not None
            assert manifest.delta.nbytes < pulled.nbytes < manifest.nbytes
            assert stage.forget_reads() == [manifest_name(version(number)), delta_name(version(number))]
        buffers = {snapshot.buffer.ctypes.data for snapshot in stage.bound[1:]}
        assert len(buffers) == 2
        assert all(address % ALIGNMENT == 0 for address in buffers)

    run_virtual(main())


def test_prepare_does_not_touch_the_version_in_use() -> None:
    async def main() -> None:
        stage = Stage()
        for number in range(1, 6):
            await publish(stage.store, number)
            await stage.load(number)
            in_use = stage.bound[-1].buffer.tobytes()
            await publish(stage.store, number + 10)
            await stage.puller.prepare(version(number + 10))
            assert stage.bound[-1].buffer.tobytes() == in_use

    run_virtual(main())


def test_publishing_does_not_disturb_a_reader() -> None:
    async def main() -> None:
        for zero_copy in (True, False):
            stage = Stage(zero_copy=zero_copy)
            await publish(stage.store, 1)
            await stage.load(1)
            held = stage.bound[-1].buffer
            for number in range(2, 20):
                await stage.store.make_room()
                await publish(stage.store, number)
            assert tensors_of(held) == tensors_of(snapshot(1))

    run_virtual(main())


def test_a_puller_that_missed_versions_applies_a_chain() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        for number in (2, 3, 4):
            await publish(stage.store, number)
        stage.forget_reads()
        pulled = await stage.load(4)
        assert not pulled.full
        manifests = [manifest_name(version(number)) for number in (4, 3, 2)]
        assert stage.forget_reads() == [*manifests, *(delta_name(version(number)) for number in (2, 3, 4))]

        for number in range(5, 30):  # now it was away for too long
            await publish(stage.store, number)
        assert (await stage.load(29)).full

    run_virtual(main())


def test_a_chain_larger_than_the_snapshot_is_not_used() -> None:
    async def main() -> None:
        stage = Stage()
        manifest = await publish(stage.store, 1)
        await stage.load(1)
        away = stage.new_puller()
        away.swap(await away.prepare(version(1)), stage.bound.extend)
        costs, buffer = [], snapshot(1)
        for number in (2, 3, 4):
            buffer = rewritten(buffer, number)
            manifest = await stage.store.publish(version(number), layout(), buffer)
            assert manifest.delta is not None
            costs.append(manifest.delta.nbytes)
            if number == 3:
                assert not (await stage.puller.prepare(version(3))).full
        assert sum(costs[:2]) < manifest.nbytes < sum(costs)
        assert (await away.prepare(version(4))).full

    run_virtual(main())


def test_a_missing_delta_falls_back_to_the_snapshot() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        await publish(stage.store, 2)
        await stage.transport.delete(delta_name(version(2)))
        pulled = await stage.load(2)
        assert (pulled.full, pulled.retries) == (True, 2)

        await publish(stage.store, 3)
        await publish(stage.store, 4)
        await stage.transport.delete(manifest_name(version(3)))  # the chain is broken: seen before anything is taken
        pulled = await stage.load(4)
        assert (pulled.full, pulled.retries) == (True, 0)

    run_virtual(main())


@pytest.mark.parametrize("fault", [torn, corrupt])
@pytest.mark.parametrize(
    ("kind", "times", "full"),
    [("manifest", 1, False), ("manifest", 4, True), ("delta", 1, False), ("delta", 2, True)],
)
def test_damaged_blobs_are_pulled_again(fault: Callable[[Blob], Blob], kind: str, times: int, full: bool) -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        await publish(stage.store, 2)
        stage.transport.spoil(kind, fault, times=times)
        pulled = await stage.load(2)
        assert (pulled.full, pulled.retries) == (full, times)

    run_virtual(main())


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("fault", [torn, corrupt])
def test_a_damaged_snapshot_is_retried_and_then_fails(fault: Callable[[Blob], Blob], zero_copy: bool) -> None:
    async def main() -> None:
        stage = Stage(zero_copy=zero_copy)
        await publish(stage.store, 1)
        stage.transport.spoil("snapshot", fault, times=2)
        assert (await stage.load(1)).retries == 2

        await publish(stage.store, 2)
        stage.transport.spoil("snapshot", fault, times=100)
        stage.transport.spoil("delta", fault, times=100)
        what = r"tensor \w+" if fault is corrupt else "the snapshot has"
        with pytest.raises(WeightsError, match=rf"version 2: {ATTEMPTS} pulls failed: version 2: {what}"):
            await stage.puller.prepare(version(2))
        assert tensors_of(stage.bound[-1].buffer) == tensors_of(snapshot(1))

    run_virtual(main())


def test_a_damaged_held_version_falls_back_to_the_snapshot() -> None:
    """A delta applied to wrong bytes gives wrong bytes: seen by their checksums, and the full snapshot is taken."""

    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        stage.bound[-1].buffer[8] ^= 1
        await publish(stage.store, 2)
        assert (await stage.load(2)).full

    run_virtual(main())


def test_an_unknown_version_is_named_in_the_error() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        with pytest.raises(WeightsError, match=r"version 7.*7-d7\.manifest"):
            await stage.puller.prepare(version(7))

    run_virtual(main())


def test_a_pull_has_a_deadline() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        stage.transport.delay_s = 1000.0
        with pytest.raises(WeightsError, match="version 1: pull exceeded 60 s"):
            await stage.puller.prepare(version(1))
        assert asyncio.get_running_loop().time() < 61.0

    run_virtual(main())


def test_reloading_the_held_version_transfers_nothing() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        stage.forget_reads()
        pulled = await stage.load(1)
        assert not pulled.full
        assert stage.forget_reads() == [manifest_name(version(1))]
        await publish(stage.store, 2)
        assert not (await stage.load(2)).full

    run_virtual(main())


def test_a_snapshot_is_pinned_while_it_is_pulled() -> None:
    async def main() -> None:
        stage = Stage(zero_copy=True)
        await publish(stage.store, 1)
        stage.transport.delay_s = 1.0  # manifest, then snapshot
        pulling = asyncio.create_task(stage.load(1))
        await asyncio.sleep(0.5)
        for number in (2, 3, 4):
            await publish(stage.store, number)
        assert (await pulling).retries == 0
        await publish(stage.store, 5)
        assert snapshot_name(version(1)) not in stage.transport.blobs

    run_virtual(main())


def test_only_the_last_prepared_version_can_be_swapped_in() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await publish(stage.store, 2)
        first = await stage.puller.prepare(version(1))
        second = await stage.puller.prepare(version(2))
        with pytest.raises(WeightsError, match="version 1 is not the last"):
            stage.puller.swap(first, stage.bound.extend)
        stage.puller.swap(second, stage.bound.extend)
        assert [snapshot.manifest.version for snapshot in stage.bound] == [version(2)]
        stage.puller.close()
        with pytest.raises(WeightsError, match="version 2 is not the last"):
            stage.puller.swap(second, stage.bound.extend)

    run_virtual(main())


def test_a_failed_swap_keeps_the_version_in_use() -> None:
    async def main() -> None:
        stage = Stage()
        await publish(stage.store, 1)
        await stage.load(1)
        await publish(stage.store, 2)
        pulled = await stage.puller.prepare(version(2))

        def fail(_: Sequence[Snapshot]) -> None:
            raise WeightsError("of another model")

        with pytest.raises(WeightsError, match="another model"):
            stage.puller.swap(pulled, fail)
        assert not (await stage.load(2)).full  # still from version 1

    run_virtual(main())


def test_a_late_joiner_pulls_the_newest_version() -> None:
    async def main() -> None:
        stage = Stage()
        for number in range(1, 5):
            await publish(stage.store, number)
        await stage.load(4)
        late = stage.new_puller()
        pulled = await late.prepare(version(4))
        assert (pulled.manifest.version, pulled.full) == (version(4), True)

    run_virtual(main())
