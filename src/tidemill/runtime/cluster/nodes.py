"""The nodes of the cluster as they come, drain and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import ray
from ray._private import state

from tidemill.core.errors import ClusterLost
from tidemill.core.records import Record
from tidemill.runtime.cluster.blocking import blocking

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
