"""The cluster a run uses: one that is there, or one of its own on this machine."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import ray
import ray._private.worker
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import RayError

from tidemill.config.pool import PoolConfig, RayConfig, RayPool, StaticPool, SyntheticPool
from tidemill.config.schema import RunSpec
from tidemill.core.errors import DeadlineError, UserError
from tidemill.runtime.cluster import keeper
from tidemill.runtime.cluster.actors import HOOK
from tidemill.runtime.cluster.keeper import Keep, Kept, LocalNode
from tidemill.runtime.cluster.nodes import NodeWatch
from tidemill.runtime.cluster.ray_calls import blocking, let_go

START_S = 120.0
CONNECT_S = 60.0
STOP_S = 30.0
MOST_NODES = 2
"""Preemptible nodes of a cluster on one machine: enough that one can die and another stay."""

# Loopback is the machine's address then, and nothing listens elsewhere. Read when Ray is imported; see `connect`.
_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def selector_of(pool: PoolConfig) -> dict[str, str]:
    """Labels of the nodes that preemptible workers may run on."""
    return pool.selector if isinstance(pool, RayPool) else RayPool(kind="ray").selector


def reserved_selector(config: RayConfig, preemptible: dict[str, str]) -> dict[str, str]:
    """Labels of the node that trains: as configured, or not those of preemptible nodes."""
    if config.reserved_selector:
        return config.reserved_selector
    key, value = next(iter(preemptible.items()), ("", ""))
    return {key: value.removeprefix("!") if value.startswith("!") else f"!{value}"} if key else {}


def local_nodes(spec: RunSpec) -> tuple[LocalNode, ...]:
    """A reserved node with the trainer and what has an actor beside it, and preemptible ones with room for the pool's
    workers."""
    config, selector, placement = spec.ray, selector_of(spec.pool), spec.placement
    further = len(spec.scoring.model_folders[1:]) if placement.reward_model == "actor" else 0
    beside = len(placement.on_actors) + further
    reserved = {key: value for key, value in config.reserved_selector.items() if not value.startswith(("!", "in("))}
    head = LocalNode(
        name="reserved",
        cpus=math.ceil(config.trainer_cpus + beside * placement.actor_cpus),  # a node has whole ones
        gpus=math.ceil(config.trainer_gpus + beside * placement.actor_gpus),
        labels=reserved,
        visible_gpus=None,
    )
    workers = _most_workers(spec.pool)
    if not workers:
        return (head,)
    count = min(workers, MOST_NODES)
    labels = {key: value for key, value in selector.items() if not value.startswith(("!", "in("))}
    # A killed worker that does not react keeps its place for some seconds: one more, unless the pool counts places.
    places = math.ceil(workers / count) + (0 if isinstance(spec.pool, RayPool) else 1)
    spot = [
        LocalNode(
            name=f"spot-node-{index}",
            cpus=math.ceil(places * config.worker_cpus),
            gpus=math.ceil(math.ceil(workers / count) * config.worker_gpus),
            labels=labels,
        )
        for index in range(count)
    ]
    return _with_gpus((head, *spot))


def _most_workers(pool: PoolConfig) -> int:
    if isinstance(pool, RayPool):
        return min(pool.max_workers, max(1, (os.cpu_count() or 1) - 1))
    return pool.workers if isinstance(pool, (StaticPool, SyntheticPool)) else pool.max_workers


def _with_gpus(nodes: tuple[LocalNode, ...]) -> tuple[LocalNode, ...]:
    """Every node sees GPUs of its own: each Ray node counts from the first that it sees."""
    given, first = [], 0
    for node in nodes:
        count = math.ceil(node.gpus)
        visible = ",".join(map(str, range(first, first + count))) if count else None
        given.append(msgspec.structs.replace(node, visible_gpus=visible))
        first += count
    return tuple(given)


@asynccontextmanager
async def connected(spec: RunSpec, *, model_bytes: int, tell: Callable[[str], None]) -> AsyncIterator[NodeWatch]:
    """Connect this process to the cluster of `spec.ray.address`, or to one made here that ends with the block, or with
    this process however it ends.

    Args:
        model_bytes: of all weights; object stores of a cluster made here hold a few versions.
        tell: told, in words, what takes long.

    Raises:
        UserError: there is no cluster at that address, or none can be started here.
    """
    kept, environment = None, {name: os.environ.get(name) for name in _authentication("")}
    if not spec.ray.address:
        nodes = local_nodes(spec)
        tell(f"starting Ray on this machine: {', '.join(node.name for node in nodes)}")
        kept = await start_keeper(Keep(nodes=nodes, object_store_bytes=object_store_bytes(model_bytes)))
    try:
        if kept is None:
            await connect(spec.ray.address)
        else:
            await connect(kept.address, token=kept.token)
        async with _watching() as watch:
            yield watch
    finally:
        os.environ.update({name: value for name, value in environment.items() if value is not None})
        for name in (name for name, value in environment.items() if value is None):
            os.environ.pop(name, None)
        if kept is not None:
            await kept.close()


@asynccontextmanager
async def _watching() -> AsyncIterator[NodeWatch]:
    """Connected until the end of the block, which ends early if the cluster does not answer any more.

    Raises:
        ClusterLost: it does not.
    """
    inside = asyncio.current_task()
    assert inside is not None
    watch = NodeWatch(on_lost=inside.cancel)
    try:
        await watch.start()
        yield watch
    except asyncio.CancelledError:
        if watch.lost is None or inside.uncancel() > 0:  # somebody else wants the end, too
            raise
        raise watch.lost from None
    finally:
        await watch.close()
        await let_go(ray.shutdown, awaited="Ray to let go")


def object_store_bytes(model_bytes: int) -> int:
    """Room for two snapshots, one being written and the deltas, in float32 at most; Ray wants 80 MB at least."""
    return max(128 << 20, 4 * model_bytes)


class KeptCluster:
    """A running keeper."""

    def __init__(self, process: subprocess.Popen[bytes], *, token: str) -> None:
        self.process, self.token = process, token
        self.address = self.folder = ""

    async def close(self) -> None:
        """End the cluster; returns when no process of it is left."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await blocking(self._ended, awaited="Ray on this machine to stop", timeout_s=STOP_S + 5)

    def _ended(self) -> None:
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its servers die with it
            self.process.wait(5)
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()
            if self.process.returncode:  # it was killed: what it would have ended and removed is still there
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own, see `_keeper_process`
                shutil.rmtree(self.folder, ignore_errors=True)


async def start_keeper(keep: Keep) -> KeptCluster:
    """Start a cluster here.

    Raises:
        UserError: Ray said why it does not start.
        DeadlineError: it neither started nor failed.
    """
    token = secrets.token_hex(32)
    process = _keeper_process(token)
    assert process.stdin is not None
    assert process.stdout is not None
    cluster = KeptCluster(process, token=token)
    try:
        process.stdin.write(msgspec.json.encode(keep) + b"\n")
        process.stdin.flush()
        line = await blocking(process.stdout.readline, awaited="Ray to start on this machine", timeout_s=START_S)
        kept = msgspec.json.decode(line, type=Kept) if line else Kept(error="it ended without a word")
        if kept.error:
            raise UserError(
                f"Ray does not start on this machine: {kept.error}",
                where="ray",
                hint="see that there is memory and room in the temporary folder, or give ray.address",
            )
    except BaseException:
        await cluster.close()
        raise
    cluster.address, cluster.folder = kept.address, kept.folder
    return cluster


def _keeper_process(token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", keeper.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ENVIRONMENT | _authentication(token),
        start_new_session=True,  # Ctrl-C is for the run to heed, not for the cluster under it
    )


def _authentication(token: str) -> dict[str, str]:
    """Other users of this machine can reach its loopback too: only who knows the token is let in."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


async def connect(address: str, *, token: str | None = None) -> None:
    """Make this process a driver of a cluster.

    Args:
        token: of a cluster that a keeper holds; for another one Ray finds its own, as its documentation says.

    Raises:
        UserError: there is none at that address.
    """

    def connect() -> None:
        ray_constants.ENABLE_RAY_CLUSTER = token is None  # as the environment of a cluster made here says
        if token is not None:
            os.environ.update(_authentication(token))
        Config.initialize("")  # both are read once, and there may have been another cluster before
        AuthenticationTokenLoader.instance().reset_cache()
        ray.init(
            address=address,
            namespace=f"tidemill-{uuid.uuid4().hex}",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"worker_process_setup_hook": HOOK},
        )

    # Ray prints what its servers say to standard output, which belongs to the command's own result.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        await blocking(connect, awaited=f"the Ray cluster at {address}", timeout_s=CONNECT_S)
    except (ConnectionError, ValueError, RuntimeError, DeadlineError, RayError) as error:
        raise UserError(
            f"there is no Ray cluster at {address!r} that can be joined: {str(error).strip().splitlines()[0]}",
            where="ray.address",
            hint="give the address of a running cluster (`ray status` shows it), or leave it empty to start one here",
        ) from error
