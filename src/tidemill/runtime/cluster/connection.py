"""Connection to the Ray cluster of a run, an existing one or one started on this machine, and a watch on its nodes."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import ray
from ray.exceptions import RayError

from tidemill.config.pool import PoolConfig, RayConfig, RayPool, StaticPool, SyntheticPool
from tidemill.config.processes import reserved_processes, resources, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core import ipc
from tidemill.core.errors import ClusterLost, DeadlineError, UserError
from tidemill.core.records import Record
from tidemill.runtime.cluster import keeper
from tidemill.runtime.cluster.keeper import LocalClusterPlan, LocalNode, StartReport
from tidemill.runtime.cluster.ray_calls import RESUME_HINT, blocking, clean_up, resources_text
from tidemill.runtime.cluster.ray_internals import HOOK, drain_deadlines, free_resources, reset_driver

START_S = 120.0
CONNECT_S = 60.0
STOP_S = 30.0
MAX_SPOT_NODES = 2
"""Preemptible nodes of a local cluster: enough that one can die and another stays."""

# With the first, a local cluster uses only the loopback address. Ray reads both at import; see `connect`.
_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def selector_of(pool: PoolConfig) -> dict[str, str]:
    """Labels of the nodes that preemptible workers may run on."""
    return pool.selector if isinstance(pool, RayPool) else RayPool(kind="ray").selector


def reserved_selector(config: RayConfig, preemptible: dict[str, str]) -> dict[str, str]:
    """Labels of the node for the trainer: `ray.reserved_selector`, or the negation of `preemptible`."""
    if config.reserved_selector:
        return config.reserved_selector
    key, value = next(iter(preemptible.items()), ("", ""))
    return {key: value.removeprefix("!") if value.startswith("!") else f"!{value}"} if key else {}


def local_nodes(spec: RunSpec) -> tuple[LocalNode, ...]:
    """Nodes of a local cluster: a reserved one for the trainer and the other actors, and preemptible ones with room for
    the pool's workers."""
    selector, worker = selector_of(spec.pool), worker_process(spec)
    cpus, gpus = resources(reserved_processes(spec))
    head = LocalNode(
        name="reserved",
        cpus=math.ceil(cpus),  # Ray takes whole numbers only
        gpus=math.ceil(gpus),
        labels=_equal_labels(spec.ray.reserved_selector),
    )
    workers = _max_workers(spec.pool)
    if not workers:
        return (head,)
    count = min(workers, MAX_SPOT_NODES)
    # One extra place, because a killed worker may keep its CPUs for some seconds. A Ray pool counts places itself.
    places = math.ceil(workers / count) + (0 if isinstance(spec.pool, RayPool) else 1)
    spot = [
        LocalNode(
            name=f"spot-node-{index}",
            cpus=math.ceil(places * worker.cpus),
            gpus=math.ceil((workers // count + (index < workers % count)) * worker.gpus),
            labels=_equal_labels(selector),
        )
        for index in range(count)
    ]
    # Each Ray node counts GPUs from the first that it sees, so every node gets its own.
    nodes, first = [], 0
    for node in (head, *spot):
        gpus = math.ceil(node.gpus)
        visible = ",".join(map(str, range(first, first + gpus))) if gpus else None
        nodes.append(msgspec.structs.replace(node, visible_gpus=visible))
        first += gpus
    return tuple(nodes)


def _equal_labels(selector: Mapping[str, str]) -> dict[str, str]:
    """The labels that a selector requires to have one certain value."""
    return {key: value for key, value in selector.items() if not value.startswith(("!", "in("))}


def _max_workers(pool: PoolConfig) -> int:
    if isinstance(pool, RayPool):
        return min(pool.max_workers, max(1, (os.cpu_count() or 1) - 1))
    return pool.workers if isinstance(pool, (StaticPool, SyntheticPool)) else pool.max_workers


@asynccontextmanager
async def connected(spec: RunSpec, *, model_bytes: int, log: Callable[[str], None]) -> AsyncIterator[NodeWatch]:
    """Connect this process to the cluster at `spec.ray.address`, or to a local one that ends with the block or the
    process, whichever is first.

    Args:
        model_bytes: size of all weights; the object stores of a local cluster hold a few versions.
        log: gets a line before each slow operation.

    Raises:
        UserError: there is no cluster at that address, or no local one can be started.
        ClusterLost: the cluster stopped answering.
    """
    names = _authentication("").keys()
    before = {name: os.environ[name] for name in names & os.environ.keys()}
    async with AsyncExitStack() as stack:
        address, token = spec.ray.address, None
        if not address:
            nodes = local_nodes(spec)
            log(f"starting Ray on this machine: {', '.join(node.name for node in nodes)}")
            # Room for two snapshots, one being written and the deltas, in float32; Ray needs at least 80 MB.
            store_bytes = max(128 << 20, 4 * model_bytes)
            cluster = await start_local_cluster(LocalClusterPlan(nodes=nodes, object_store_bytes=store_bytes))
            stack.push_async_callback(cluster.close)
            address, token = cluster.address, cluster.token
        try:
            await connect(address, token=token)
            async with _watching() as watch:
                yield watch
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)


@asynccontextmanager
async def _watching() -> AsyncIterator[NodeWatch]:
    """Watch the nodes, and cancel the block when the cluster is lost. Raises ClusterLost."""
    inside = asyncio.current_task()
    assert inside is not None
    watch = NodeWatch(on_lost=inside.cancel)
    try:
        await watch.start()
        yield watch
    except asyncio.CancelledError:
        if watch.lost is None or inside.uncancel() > 0:  # cancelled by other code, too
            raise
        raise watch.lost from None
    finally:
        await watch.close()
        await clean_up(ray.shutdown, awaited="Ray to disconnect")


class LocalCluster:
    """A local cluster, held by a keeper process."""

    def __init__(self, process: subprocess.Popen[bytes], *, token: str) -> None:
        self.process, self.token = process, token
        self.address = self.folder = ""

    async def close(self) -> None:
        """End the cluster; returns when none of its processes is left."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await blocking(self._wait, awaited="Ray on this machine to stop", timeout_s=STOP_S + 5)

    def _wait(self) -> None:
        try:
            ipc.wait_or_kill(self.process, STOP_S)  # its servers die with it
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
            if self.process.returncode:  # killed before it could clean up
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # the keeper leads its own session
                shutil.rmtree(self.folder, ignore_errors=True)


async def start_local_cluster(plan: LocalClusterPlan) -> LocalCluster:
    """
    Raises:
        UserError: Ray reported why it cannot start.
        DeadlineError: Ray neither started nor failed in time.
    """
    token = secrets.token_hex(32)
    process = _keeper_process(token)
    assert process.stdin is not None
    assert process.stdout is not None
    cluster = LocalCluster(process, token=token)
    try:
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.flush()
        line = await blocking(process.stdout.readline, awaited="Ray to start on this machine", timeout_s=START_S)
        ended = StartReport(error="its keeper process ended without an error")
        report = msgspec.json.decode(line, type=StartReport) if line else ended
        if report.error:
            raise UserError(
                f"Ray does not start on this machine: {report.error}",
                where="ray",
                hint="check free memory and the temporary folder, or set ray.address",
            )
    except BaseException:
        await cluster.close()
        raise
    cluster.address, cluster.folder = report.address, report.folder
    return cluster


def _keeper_process(token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", keeper.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ENVIRONMENT | _authentication(token),
        start_new_session=True,  # Ctrl-C must reach the run only, not its cluster
    )


def _authentication(token: str) -> dict[str, str]:
    """Environment with a token, because other users of this machine can reach its loopback address too."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


async def connect(address: str, *, token: str | None = None) -> None:
    """Make this process a driver of a cluster.

    Args:
        token: of a local cluster; for other clusters Ray finds the token as its documentation describes.

    Raises:
        UserError: there is no cluster at that address.
    """

    def init() -> None:
        if token is not None:
            os.environ.update(_authentication(token))
        reset_driver(allow_remote_address=token is None)
        ray.init(
            address=address,
            namespace=f"tidemill-{uuid.uuid4().hex}",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"worker_process_setup_hook": HOOK},
        )

    try:
        await blocking(init, awaited=f"the Ray cluster at {address}", timeout_s=CONNECT_S)
    except (ConnectionError, ValueError, RuntimeError, DeadlineError, RayError) as error:
        raise UserError(
            f"there is no Ray cluster at {address!r} that can be joined: {str(error).strip().splitlines()[0]}",
            where="ray.address",
            hint="give the address of a running cluster (`ray status` shows it), or leave it empty to start one here",
        ) from error


LOOK_S = 1.0
LOOK_TIMEOUT_S = 10.0
LOST_S = 20.0
"""The cluster is lost after this time without an answer; after 60 s Ray would end this process without a message."""


class NodeView(Record):
    """One live node."""

    node_id: str
    name: str  # for messages
    labels: dict[str, str]
    free: dict[str, float]  # resources
    gpus: float = 0.0  # free or not
    drains_unix_s: float | None = None  # when it will be taken away

    def fits(self, selector: Mapping[str, str]) -> bool:
        """Whether its labels match a selector in Ray's syntax: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
        return all(_matches(self.labels.get(key), wanted) for key, wanted in selector.items())

    def places(self, cpus: float, gpus: float) -> int:
        """Number of workers that fit into the free resources."""
        counts = [
            int((self.free.get(resource, 0.0) + 1e-6) / need)
            for resource, need in (("CPU", cpus), ("GPU", gpus))
            if need
        ]
        return min(counts, default=0)


def _matches(label: str | None, wanted: str) -> bool:
    wanted, negated = wanted.removeprefix("!"), wanted.startswith("!")
    values = [value.strip() for value in wanted[3:-1].split(",")] if wanted.startswith("in(") else [wanted]
    return (label in values) != negated


class NodeWatch:
    """Reads the nodes of the cluster every `LOOK_S` seconds, in a thread.

    Args:
        on_lost: called once, after `LOST_S` seconds without an answer; `lost` is then the error to raise.
    """

    def __init__(self, on_lost: Callable[[], object] = lambda: None) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.lost: ClusterLost | None = None
        self._on_lost = on_lost
        self._names: dict[str, str] = {}  # includes dead nodes
        self._looked = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.nodes = await blocking(list_nodes, awaited="the nodes of the cluster", timeout_s=LOOK_TIMEOUT_S)
        self._task = asyncio.create_task(self._watch(), name="nodes of the cluster")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def changed(self, timeout_s: float) -> None:
        """Wait until the nodes have been read again."""
        async with self._looked:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._looked.wait(), timeout_s)

    def fitting(self, selector: Mapping[str, str]) -> list[NodeView]:
        return [node for node in self.nodes.values() if node.fits(selector)]

    def name(self, node_id: str) -> str:
        """Name of a live or dead node."""
        return self._names.get(node_id, node_id[:8])

    async def _watch(self) -> None:
        seen_s = time.monotonic()
        while True:
            self._names |= {node.node_id: node.name for node in self.nodes.values()}
            await asyncio.sleep(LOOK_S)
            try:
                timeout_s = max(LOOK_S, min(LOOK_TIMEOUT_S, seen_s + LOST_S - time.monotonic()))
                self.nodes = await blocking(list_nodes, awaited="the nodes of the cluster", timeout_s=timeout_s)
            except Exception:  # noqa: BLE001 - the cluster is either busy or lost
                silent_s = time.monotonic() - seen_s
                if silent_s < LOST_S:
                    continue
                self.lost = ClusterLost(
                    f"the Ray cluster has not answered for {silent_s:.0f} s: its head (the process `gcs_server`) died "
                    f"or cannot be reached\n  check that its machine is up and has free memory; then {RESUME_HINT}"
                )
                self._on_lost()
                return
            seen_s = time.monotonic()
            async with self._looked:
                self._looked.notify_all()


def list_nodes() -> dict[str, NodeView]:
    """The live nodes by id. Blocks."""
    free, drains = free_resources(), drain_deadlines()
    return {
        node["NodeID"]: NodeView(
            node_id=node["NodeID"],
            name=node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else node["NodeManagerHostname"],
            labels=node["Labels"],
            free=free.get(node["NodeID"], {}),
            gpus=node["Resources"].get("GPU", 0.0),
            drains_unix_s=drains.get(node["NodeID"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def check_nodes(spec: RunSpec, nodes: NodeWatch, reserved: Mapping[str, str], preemptible: Mapping[str, str]) -> None:
    """Refuse a process with more GPUs than any node has. Nodes without GPUs tell nothing: others may join.

    Raises:
        UserError: names the process and the largest node.
    """
    processes = [(each, reserved) for each in reserved_processes(spec)]
    processes += [(worker_process(spec), preemptible)] if spec.is_elastic else []
    for process, selector in processes:
        largest = max((node.gpus for node in nodes.fitting(selector)), default=0.0)
        if process.gpus > largest > 0:
            labels, _ = resources_text({}, selector)
            what = f"the {process.role} needs {process.gpus:g} GPUs of one node, and of those with label {labels} "
            hint = "lower its number of ranks, or add larger nodes"
            raise UserError(f"{what}the largest has {largest:g}", where=f"{process.key}_gpus", hint=hint)
