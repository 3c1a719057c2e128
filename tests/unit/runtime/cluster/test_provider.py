"""Leases follow the nodes of a (fake) Ray cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from tests.virtual_time import run_virtual
from tidemill.config.pool import RayPool
from tidemill.config.processes import Processes
from tidemill.core.protocols import LoopClock
from tidemill.core.records import LeaseEnded, LeaseEvent, LeaseGranted, LeaseNoticed
from tidemill.pool.provider import BackOff
from tidemill.runtime.cluster import ray_backend as module
from tidemill.runtime.cluster.connection import NodeView, NodeWatch
from tidemill.runtime.cluster.launch_node import ENDS_LABEL
from tidemill.runtime.cluster.ray_backend import RayProvider

UNIX_S = 1_000_000.0


class FakeNodes:
    """A cluster with nodes set by the test."""

    lost = None

    def __init__(self) -> None:
        self.nodes: dict[str, NodeView] = {}

    def put(self, name: str, cpus: float, drains_unix_s: float | None = None, **labels: str) -> None:
        free = {"CPU": cpus}
        labels = labels or {"market": "spot"}
        self.nodes[name] = NodeView(node_id=name, name=name, labels=labels, free=free, drains_unix_s=drains_unix_s)

    def fitting(self, selector: Mapping[str, str]) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.fits(selector)]

    def name(self, node_id: str) -> str:
        return f"node {node_id}"

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(1.0, timeout_s))


class Case:
    def __init__(self, *, max_workers: int = 8) -> None:
        self.nodes = FakeNodes()
        self.provider = RayProvider(
            RayPool(kind="ray", max_workers=max_workers, selector={"market": "spot"}),
            Processes("worker", 1, 2.0, 0.0, "ray.worker"),
            cast("NodeWatch", self.nodes),
            clock=LoopClock(),
            session=4,
            price_usd_per_hour=0.5,
            back_off=BackOff(first_s=3.0),
            unix_s=lambda: UNIX_S,
        )

    async def events(self) -> list[LeaseEvent]:
        """All pending events."""
        found = []
        while (event := await self.provider.next_event(0.0)) is not None:
            found.append(event)
        return found

    async def granted(self) -> list[tuple[str, str]]:
        """(lease, node) of pending events, all of which are grants."""
        events = await self.events()
        assert all(isinstance(event, LeaseGranted) for event in events), events
        return [(event.lease.lease_id, event.lease.node) for event in events if isinstance(event, LeaseGranted)]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, object]]:
    """Requests to the autoscaler: number of bundles, and selectors."""
    found: list[tuple[int, object]] = []

    def request(*, bundles: list[dict[str, float]], bundle_label_selectors: list[dict[str, str]]) -> None:
        assert bundles == [{"CPU": 2.0}] * len(bundles)
        found.append((len(bundles), bundle_label_selectors))

    monkeypatch.setattr(module, "request_resources", request)
    return found


def test_one_lease_for_each_worker_that_fits_on_a_matching_node() -> None:
    async def case() -> None:
        one = Case()
        one.nodes.put("a", 5)  # 5 CPUs, 2 each: 2 workers
        one.nodes.put("b", 2)
        one.nodes.put("c", 8, market="on-demand")
        assert await one.granted() == [("lease-4-1", "a"), ("lease-4-2", "a"), ("lease-4-3", "b")]
        one.nodes.put("a", 1)  # the workers run there
        assert await one.granted() == []

    run_virtual(case())


def test_leases_are_limited_by_the_wanted_workers(asked: list[tuple[int, object]]) -> None:
    async def case() -> None:
        one = Case(max_workers=3)
        one.nodes.put("a", 12)
        one.provider.request_workers(1)
        assert len(await one.granted()) == 1
        one.provider.request_workers(9)
        assert len(await one.granted()) == 2  # three at most
        one.provider.request_workers(0)
        assert await one.events() == []  # no lease ends

    run_virtual(case())


def test_a_lease_ends_with_the_job_of_its_node() -> None:
    async def case() -> None:
        one = Case()
        one.nodes.put("a", 2, market="spot")
        one.nodes.put("b", 2, None, market="spot", **{ENDS_LABEL: str(int(UNIX_S) + 60)})
        now_s = LoopClock().now()
        events = await one.events()
        assert [event.lease.ends_s for event in events if isinstance(event, LeaseGranted)] == [None, now_s + 60]

    run_virtual(case())


async def test_the_autoscaler_gets_the_wanted_workers(asked: list[tuple[int, object]]) -> None:
    one = Case(max_workers=3)
    one.provider.request_workers(2)
    one.provider.request_workers(2)
    await one.provider.close()
    assert asked == [(2, [{"market": "spot"}] * 2), (0, [])]


def test_a_draining_node_gives_notice_and_no_new_leases() -> None:
    async def case() -> None:
        one = Case()
        one.nodes.put("a", 2)
        ((lease, _),) = await one.granted()
        one.nodes.put("a", 4, drains_unix_s=UNIX_S + 20)
        now_s = LoopClock().now()
        assert await one.events() == [
            LeaseNoticed(lease_id=lease, deadline_s=now_s + 20, cause="its node a is being drained")
        ]
        assert await one.events() == []  # one notice
        one.nodes.nodes.clear()
        assert await one.events() == [LeaseEnded(lease_id=lease, cause="its node node a is gone")]

    run_virtual(case())


def test_a_released_lease_is_granted_again_with_back_off() -> None:
    async def case() -> None:
        one = Case()
        one.nodes.put("a", 2)
        ((first, _),) = await one.granted()
        await one.provider.release(first)
        assert await one.granted() == []
        await asyncio.sleep(3.1)
        ((second, _),) = await one.granted()
        assert second != first
        await one.provider.release(second)
        await asyncio.sleep(3.1)
        assert await one.granted() == []  # twice as long
        await asyncio.sleep(3.0)
        assert len(await one.granted()) == 1

    run_virtual(case())


def test_next_event_waits_for_a_new_node() -> None:
    async def case() -> None:
        one = Case()
        assert await one.provider.next_event(2.5) is None
        asyncio.get_running_loop().call_later(3.5, lambda: one.nodes.put("a", 2))
        began = LoopClock().now()
        event = await one.provider.next_event(10.0)
        assert isinstance(event, LeaseGranted)
        assert LoopClock().now() - began == pytest.approx(4.0)  # the next look

    run_virtual(case())


def test_an_avoided_node_gets_no_lease_for_a_time() -> None:
    async def case() -> None:
        one = Case()
        one.nodes.put("a", 2)
        assert await one.granted() == [("lease-4-1", "a")]
        one.provider.avoid("a", 60.0)
        await one.provider.release("lease-4-1")
        await asyncio.sleep(30.0)
        one.nodes.put("b", 2)
        assert await one.granted() == [("lease-4-2", "b")]
        await asyncio.sleep(30.0)
        assert await one.granted() == [("lease-4-3", "a")]

    run_virtual(case())


def test_the_nodes_are_looked_at_once_for_all_events() -> None:
    """The whole cost of granting is one look at each node, however many there are."""

    async def case() -> None:
        one = Case(max_workers=1000)
        looks = 0
        fitting = one.nodes.fitting

        def counted(selector: Mapping[str, str]) -> list[NodeView]:
            nonlocal looks
            looks += 1
            return fitting(selector)

        one.nodes.fitting = counted  # type: ignore[method-assign]
        for number in range(500):
            one.nodes.put(f"node-{number}", 4)
        assert len(await one.granted()) == 1000
        assert looks == 2  # the second finds no more
        one.nodes.nodes.clear()
        ended = await one.events()
        assert len(ended) == 1000
        assert all(isinstance(event, LeaseEnded) for event in ended)
        one.nodes.put("node-0", 4)
        assert len(await one.granted()) == 2

    run_virtual(case())
