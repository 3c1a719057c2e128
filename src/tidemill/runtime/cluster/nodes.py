"""The nodes of a cluster as they join, drain and leave, and the leases on them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import ray
from ray._private import state
from ray.autoscaler.sdk import request_resources

from tidemill.config.pool import RayConfig, RayPool
from tidemill.core.errors import ClusterLost
from tidemill.core.protocols import Clock
from tidemill.core.records import Lease, LeaseEnded, LeaseEvent, LeaseGranted, LeaseNoticed, Record
from tidemill.pool.provider import BackOff
from tidemill.runtime.cluster.ray_calls import blocking

LOOK_S = 1.0
LOOK_TIMEOUT_S = 10.0
LOST_S = 20.0
"""Without a look that succeeded: the cluster is lost. Ray would end this whole process, without a word, after 60."""


class NodeView(Record):
    """One node that is alive."""

    node_id: str
    name: str  # for people
    labels: dict[str, str]
    total: dict[str, float]  # resources
    free: dict[str, float]
    drains_unix_s: float | None = None  # it will be taken then

    def fits(self, selector: Mapping[str, str]) -> bool:
        """Whether its labels are what the selector asks for, in Ray's syntax: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
        return all(_fits(self.labels.get(key), wanted) for key, wanted in selector.items())

    def places(self, cpus: float, gpus: float) -> int:
        """Workers that fit into what is free."""
        counts = [
            int((self.free.get(resource, 0.0) + 1e-6) / need)
            for resource, need in (("CPU", cpus), ("GPU", gpus))
            if need
        ]
        return min(counts, default=0)


def _fits(label: str | None, wanted: str) -> bool:
    wanted, negated = wanted.removeprefix("!"), wanted.startswith("!")
    values = [value.strip() for value in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (label in values) != negated


class NodeWatch:
    """Asks Ray which nodes there are, in a thread, once every `LOOK_S` seconds.

    Args:
        on_lost: called once when there has been no answer for `LOST_S` seconds; `lost` then says so in words.
    """

    def __init__(self, on_lost: Callable[[], object] = lambda: None) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.lost: ClusterLost | None = None
        self._on_lost = on_lost
        self._names: dict[str, str] = {}  # of nodes that are gone, too
        self._looked = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.nodes = await blocking(look, awaited="the nodes of the cluster", timeout_s=LOOK_TIMEOUT_S)
        self._task = asyncio.create_task(self._watch(), name="nodes of the cluster")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next look."""
        async with self._looked:
            try:
                await asyncio.wait_for(self._looked.wait(), timeout_s)
            except TimeoutError:
                return

    def fitting(self, selector: Mapping[str, str]) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.fits(selector)]

    def name(self, node_id: str) -> str:
        """Of a node, also after its end."""
        return self._names.get(node_id, node_id[:8])

    async def _watch(self) -> None:
        seen_s = time.monotonic()
        while True:
            self._names |= {node.node_id: node.name for node in self.nodes.values()}
            await asyncio.sleep(LOOK_S)
            try:
                timeout_s = min(LOOK_TIMEOUT_S, seen_s + LOST_S - time.monotonic())
                self.nodes = await blocking(look, awaited="the nodes of the cluster", timeout_s=max(LOOK_S, timeout_s))
            except Exception:  # noqa: BLE001 - the cluster is busy or gone, which time tells
                if time.monotonic() - seen_s < LOST_S:
                    continue
                self.lost = cluster_lost(time.monotonic() - seen_s)
                self._on_lost()
                return
            seen_s = time.monotonic()
            async with self._looked:
                self._looked.notify_all()


def cluster_lost(silent_s: float) -> ClusterLost:
    return ClusterLost(
        f"the Ray cluster has not answered for {silent_s:.0f} s\n  its head (the process `gcs_server`) died, or its "
        "machine cannot be reached: see that the cluster is up and has memory\n  run the same command again: the run "
        "goes on from its last checkpoint, with the samples it has"
    )


def look() -> dict[str, NodeView]:
    """The nodes alive now, by id. Blocks."""
    free = state.available_resources_per_node()
    draining = state.state.get_draining_nodes()
    return {
        node["NodeID"]: NodeView(
            node_id=node["NodeID"],
            name=node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else node["NodeManagerHostname"],
            labels=node["Labels"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            drains_unix_s=_deadline(draining, node["NodeID"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def _deadline(draining: Mapping[str, int], node_id: str) -> float | None:
    """Ray says 0 where nobody said when."""
    if node_id not in draining:
        return None
    return draining[node_id] / 1000 if draining[node_id] else time.time()


ASK_S = 10.0


class RayProvider:
    """Implements `core.protocols.Provider`: one lease for every worker that fits on a matching node, in the order in
    which nodes appear. Wanting fewer takes none away.

    Args:
        session: which life of the run this is; lease ids hold it.
        unix_s: the wall clock, which draining deadlines are on.
    """

    def __init__(
        self,
        pool: RayPool,
        config: RayConfig,
        nodes: NodeWatch,
        *,
        clock: Clock,
        session: int,
        price_usd_per_hour: float = 0.0,
        back_off: BackOff | None = None,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._pool, self._config, self._nodes = pool, config, nodes
        self._clock, self._session, self._price, self._unix_s = clock, session, price_usd_per_hour, unix_s
        self._back_off = back_off or BackOff()
        self._wanted = pool.max_workers
        self._places: dict[str, int] = {}  # workers that fit, by node
        self._held: dict[str, Lease] = {}
        self._warned: set[str] = set()  # nodes
        self._failures: Counter[str] = Counter()  # leases given back in a row, by node
        self._retry_s: dict[str, float] = {}  # on the run's clock, by node
        self._events = deque[LeaseEvent]()
        self._granted = 0
        self._asking: asyncio.Task[None] | None = None

    def want(self, workers: int) -> None:
        wanted = min(workers, self._pool.max_workers)
        if wanted != self._wanted or self._asking is None:
            self._wanted = wanted
            self._asking = asyncio.create_task(self._ask_autoscaler(wanted), name="autoscaler")

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        deadline_s = self._clock.now() + timeout_s
        while True:
            self._catch_up()
            if self._events:
                return self._events.popleft()
            left_s = deadline_s - self._clock.now()
            if left_s <= 0:
                return None
            await self._nodes.changed(left_s)

    async def release(self, lease_id: str) -> None:
        lease = self._held.pop(lease_id, None)
        if lease is None:
            return  # its node went meanwhile
        now_s, node = self._clock.now(), lease.node
        if now_s - lease.start_s >= self._back_off.settled_s:
            self._failures[node] = 0
        self._retry_s[node] = now_s + self._back_off.after(self._failures[node])
        self._failures[node] += 1

    async def close(self) -> None:
        """Tells the autoscaler that nothing is wanted any more, if there is anybody to tell."""
        if self._asking is not None and self._nodes.lost is None:
            await asyncio.gather(self._asking, return_exceptions=True)
            await self._ask_autoscaler(0)

    def _catch_up(self) -> None:
        there = {node.node_id: node for node in self._nodes.fitting(self._pool.selector)}
        for lease in [lease for lease in self._held.values() if lease.node not in there]:
            cause = f"its node {self._nodes.name(lease.node)} is gone"
            self._events.append(LeaseEnded(lease_id=lease.lease_id, cause=cause))
            del self._held[lease.lease_id]
        for gone in self._places.keys() - there.keys():
            del self._places[gone]
        for node in there.values():
            if node.drains_unix_s is not None:
                self._warn(node, node.drains_unix_s)
            else:
                self._grant_on(node)

    def _warn(self, node: NodeView, drains_unix_s: float) -> None:
        if node.node_id in self._warned:
            return
        self._warned.add(node.node_id)
        deadline_s = self._clock.now() + drains_unix_s - self._unix_s()
        for lease in self._on(node):
            cause = f"its node {node.name} is being drained"
            self._events.append(LeaseNoticed(lease_id=lease.lease_id, deadline_s=deadline_s, cause=cause))

    def _grant_on(self, node: NodeView) -> None:
        held = len(self._on(node))
        if held == 0:  # what is free now, others use the rest
            self._places[node.node_id] = node.places(self._config.worker_cpus, self._config.worker_gpus)
        if self._clock.now() < self._retry_s.get(node.node_id, -math.inf):
            return
        for _ in range(self._places[node.node_id] - held):
            if len(self._held) >= self._wanted:
                return
            self._grant(node)

    def _grant(self, node: NodeView) -> None:
        self._granted += 1
        lease = Lease(
            lease_id=f"lease-{self._session}-{self._granted}",
            worker_id=f"{node.name}-{self._granted}",
            kind="preemptible",
            price_usd_per_hour=self._price,
            start_s=self._clock.now(),
            node=node.node_id,
        )
        self._held[lease.lease_id] = lease
        self._events.append(LeaseGranted(lease=lease))

    def _on(self, node: NodeView) -> list[Lease]:
        return [lease for lease in self._held.values() if lease.node == node.node_id]

    async def _ask_autoscaler(self, workers: int) -> None:
        """Harmless where there is no autoscaler: the request is noted, and nobody reads it."""
        need = {"CPU": self._config.worker_cpus, "GPU": self._config.worker_gpus}
        bundles = [{resource: amount for resource, amount in need.items() if amount}] * workers
        with suppress(Exception):  # a wish; the run goes on with what there is
            selectors = [self._pool.selector] * workers
            ask = partial(request_resources, bundles=bundles, bundle_label_selectors=selectors)
            await blocking(ask, awaited="the autoscaler to be asked", timeout_s=ASK_S)
