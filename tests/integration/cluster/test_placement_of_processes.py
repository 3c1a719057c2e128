"""Ray's own scheduler places the processes of a recipe as its plan says: tiny actors on nodes with GPUs that do not
exist."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from tests.commands import run_here
from tests.tiny_actor import TinyActor
from tidemill.config.load import load_spec
from tidemill.config.pool import RayPool
from tidemill.config.processes import reserved_processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Lease, LeaseGranted
from tidemill.planner.placement.recipe import run_machines
from tidemill.runtime.cluster.connection import (
    LocalCluster,
    NodeWatch,
    check_nodes,
    connect,
    reserved_selector,
    selector_of,
    start_local_cluster,
)
from tidemill.runtime.cluster.keeper import LocalClusterPlan, LocalNode
from tidemill.runtime.cluster.ray_backend import RayProvider
from tidemill.runtime.cluster.ray_calls import ActorResources, Remote, placed
from tidemill.runtime.cluster.ray_worker import ActorHost, RayWorker

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("ray")]
GPUS = 8


class TinyHost(ActorHost):
    """`RayHost` with tiny workers."""

    def _actor(self) -> type:
        return TinyActor

    def _handle_of(self, remote: Remote, lease: Lease) -> RayWorker:
        return RayWorker(remote, owned=True)

    async def _begin(self, remote: Remote, lease: Lease, timeout_s: float) -> None:
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    labels = [{"pool": "reserved"}] * 3 + [{"ray.io/market-type": "spot"}] * 2
    nodes = tuple(
        LocalNode(name=f"machine-{index}", cpus=64, gpus=GPUS, labels=own) for index, own in enumerate(labels)
    )
    started = asyncio.run(start_local_cluster(LocalClusterPlan(nodes=nodes, object_store_bytes=100 << 20)))
    asyncio.run(connect(started.address, token=started.token))
    yield started
    ray.shutdown()
    asyncio.run(started.close())


@pytest.fixture
def recipe(tmp_path: Path) -> RunSpec:
    return load_spec(["@llama-70b", f"--run.dir={tmp_path}/run"], purpose="train")


def groups() -> dict[str, list[str]]:
    """The nodes of the bundles of each placement group that Ray has scheduled."""
    table = placement_group_table()
    return {name: list(row["bundles_to_node_id"].values()) for name, row in table.items() if row["state"] == "CREATED"}


async def places(spec: RunSpec) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Start tiny actors as a run starts its processes, and return the roles on each reserved and preemptible node."""
    preemptible = selector_of(spec.pool)
    reserved = reserved_selector(spec.ray, preemptible)
    pool, process, clock = spec.pool, worker_process(spec), LoopClock()
    assert isinstance(pool, RayPool)
    found: dict[str, Counter[str]] = {}
    watch = NodeWatch()
    await watch.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(watch.close)
        check_nodes(spec, watch, reserved, preemptible)
        host = TinyHost(
            process=process,
            nodes=watch,
            preemptible=preemptible,
            reserved=reserved,
            start_s=200.0,
            notify_drains=False,
        )
        stack.push_async_callback(host.close)
        for each in reserved_processes(spec):
            if each.role == "reserved engine":
                lease = Lease(
                    lease_id="reserved", worker_id="r", kind="reserved", price_usd_per_hour=0.0, start_s=clock.now()
                )
                await host.start(lease)
                (node,) = host._workers.values()
                found.setdefault(node, Counter())[each.role] += 1
                continue
            resources = ActorResources(each.cpus, each.gpus, each.key)
            before = groups()
            await stack.enter_async_context(placed(TinyActor, each.role, resources, reserved, size=each.count))
            for group in groups().keys() - before.keys():
                for node in groups()[group]:
                    found.setdefault(node, Counter())[each.role] += 1
        provider = RayProvider(pool, process, watch, clock=clock, session=1)
        stack.push_async_callback(provider.close)
        provider.request_workers(pool.max_workers)
        spot: dict[str, Counter[str]] = {}
        for _ in range(pool.max_workers):
            event = await provider.next_event(30.0)
            assert isinstance(event, LeaseGranted)
            await host.start(event.lease)
            assert [*host._workers.values()][-1] == event.lease.node
            spot.setdefault(event.lease.node, Counter())["worker"] += 1
        assert await provider.next_event(2.0) is None  # no more than the plan's workers fit
        names = {node: watch.name(node) for node in (*found, *spot)}
    order = sorted(names.items(), key=lambda item: item[1])
    return (
        [found[node] for node, _ in order if node in found],
        [spot[node] for node, _ in order if node in spot],
    )


def multiset(nodes: Any) -> Counter[tuple[tuple[str, int], ...]]:
    return Counter(tuple(sorted(node.items())) for node in nodes)


def test_a_cluster_of_40_gpus_holds_the_plan(cluster: LocalCluster, recipe: RunSpec) -> None:
    plan = run_machines(recipe, reserved_gpus=GPUS, worker_gpus=GPUS)
    assert plan == (
        [{"trainer": 8}, {"trainer": 8}, {"reserved engine": 1, "reference": 1, "reward model": 1}],
        [{"worker": 2}, {"worker": 2}],
    )
    reserved, spot = asyncio.run(places(recipe))
    assert multiset(reserved) == multiset(plan[0])
    assert multiset(spot) == multiset(plan[1])


@pytest.mark.slow  # the test above, with other numbers
def test_an_engine_of_a_whole_node(cluster: LocalCluster, recipe: RunSpec) -> None:
    """Fewer ranks of the trainer, larger engines, and no frozen model on an actor."""
    placement = recipe.placement.model_copy(update={"reference": "trainer", "reward_model": "driver"})
    spec = recipe.model_copy(
        update={
            "placement": placement,
            "trainer": recipe.trainer.model_copy(update={"shards": 12}),
            "engine": recipe.engine.model_copy(update={"tensor_parallel": 8}),
            "pool": recipe.pool.model_copy(update={"max_workers": 2}),
        }
    )
    plan = run_machines(spec, reserved_gpus=GPUS, worker_gpus=GPUS)
    assert plan == ([{"trainer": 8}, {"trainer": 4}, {"reserved engine": 1}], [{"worker": 1}, {"worker": 1}])
    reserved, spot = asyncio.run(places(spec))
    assert multiset(reserved) == multiset(plan[0])
    assert multiset(spot) == multiset(plan[1])


def test_what_no_node_can_hold_is_refused_before_anything_starts(cluster: LocalCluster, recipe: RunSpec) -> None:
    spec = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"tensor_parallel": 16})})
    with pytest.raises(UserError, match="the reserved engine needs 16 GPUs of one node") as caught:
        asyncio.run(places(spec))
    assert caught.value.where == "ray.worker_gpus"
    assert "with label pool=reserved the largest has 8" in caught.value.what
    many = recipe.model_copy(update={"ray": recipe.ray.model_copy(update={"trainer_gpus": 9})})
    with pytest.raises(UserError, match="the trainer needs 9 GPUs of one node"):
        asyncio.run(places(many))


def test_the_command_prints_the_same_machines(tmp_path: Path) -> None:
    out = run_here(
        "plan", "run", "@llama-70b", f"--run.dir={tmp_path}/run", "--machines", "aws-p5.48xlarge-block:3",
        "--preemptible", "rlboost-8xh100:2", "--price", "preemptible:rlboost-8xh100=21.28", "--seeds", "1",
        "--trainer.steps=2",
    ).out  # fmt: skip
    shown = " ".join(out.split())
    assert "reserved machine 1: 8 × trainer • reserved machine 2: 8 × trainer" in shown
    assert "reserved machine 3: 1 × reference, 1 × reward model, 1 × reserved engine" in shown
    assert "preemptible machine 1: 2 × worker • preemptible machine 2: 2 × worker" in shown
