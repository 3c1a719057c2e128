"""Workers as actors on a local Ray cluster of several nodes: killed, stopped, drained and orphaned."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state as ray_state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from tests.processes import command_lines, listening, processes_below
from tidemill.config.model import ModelConfig
from tidemill.config.pool import FleetConfig, RayPool
from tidemill.config.processes import Processes
from tidemill.config.schema import RunSpec
from tidemill.core.errors import TrainerLost, UserError, WorkerLost
from tidemill.core.protocols import LoopClock
from tidemill.core.records import (
    Completion,
    GenerateRequest,
    Lease,
    LeaseEnded,
    LeaseGranted,
    LeaseNoticed,
    PolicyVersion,
    SampleId,
    SamplingParams,
    TokenDelta,
    pack_tokens,
    unpack_logprobs,
)
from tidemill.models.catalog import resolve
from tidemill.models.snapshots import files_without_weights
from tidemill.runtime.cluster.connection import LocalCluster, NodeWatch, connect, start_local_cluster
from tidemill.runtime.cluster.keeper import LocalClusterPlan, LocalNode
from tidemill.runtime.cluster.ray_backend import RayProvider
from tidemill.runtime.cluster.ray_calls import Remote, trainer_lost
from tidemill.runtime.cluster.ray_trainer import (
    RayTrainer,
    TrainerActor,
    TrainerPlan,
)
from tidemill.runtime.cluster.ray_worker import RayHost, RayWorker, WorkerPlan
from tidemill.runtime.cluster.wire import invoke

pytestmark = pytest.mark.xdist_group("ray")

SPOT = {"ray.io/market-type": "spot"}
RESERVED = {"ray.io/market-type": "!spot"}
WORKER = Processes("worker", 1, 1.0, 0.0, "ray.worker")
SPEC = RunSpec.model_validate(
    {
        "runtime": "ray",
        "model": {"source": "char", "char": {"hidden_size": 32, "layers": 2, "context": 128}},
        "engine": {"slots": 4, "batch_invariant": True, "tick_s": 0.05},
        "sampling": {"max_new_tokens": 100},
        "trainer": {"threads": 1},
    }
)
PROMPT = pack_tokens([5, 6, 7, 8])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    nodes = (
        LocalNode(name="reserved", cpus=1, gpus=0, labels={}),
        *(LocalNode(name=f"spot-{index}", cpus=2, gpus=0, labels=SPOT) for index in range(3)),
    )
    started = asyncio.run(start_local_cluster(LocalClusterPlan(nodes=nodes, object_store_bytes=100 << 20)))
    asyncio.run(connect(started.address, token=started.token))
    yield started
    ray.shutdown()
    asyncio.run(started.close())
    assert started.process.returncode == 0


def _trainer_process() -> tuple[Any, Remote]:
    handle = ray.remote(TrainerActor).options(num_cpus=0.5, label_selector=RESERVED).remote()
    return handle, Remote(handle, lost=trainer_lost)


def _trainer_plan(checkpoints: Path, spec: RunSpec = SPEC) -> TrainerPlan:
    return TrainerPlan(
        spec=spec.model_dump_json(), checkpoints=str(checkpoints), prompt_tokens=4, identities={}, probe_ids=PROMPT
    )


@dataclass
class Trainer:
    handle: Any
    remote: Remote
    version: PolicyVersion
    local: RayWorker


@pytest.fixture(scope="module")
def trainer(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer whose weights are published as version 0."""
    handle, remote = _trainer_process()
    plan = _trainer_plan(tmp_path_factory.mktemp("checkpoints"))

    async def start() -> PolicyVersion:
        started = await invoke(remote, 60, TrainerActor.start, plan)
        await RayTrainer(remote, started.version, warn=pytest.fail).publish(started.version)
        return started.version

    return Trainer(handle, remote, asyncio.run(start()), RayWorker(remote, owned=False))


@dataclass
class Workplace:
    """Starts workers for a test, and ends them with it."""

    trainer: Trainer
    nodes: NodeWatch
    hosts: list[RayHost] = field(default_factory=list)
    leases: int = 0

    def host(
        self,
        *,
        start_s: float = 60.0,
        selector: dict[str, str] = SPOT,
        orphan_s: float = 60.0,
        broken: bool = False,
        heartbeat_timeout_s: float = 15.0,
    ) -> RayHost:
        spec = SPEC.model_copy(update={"fleet": FleetConfig(heartbeat_timeout_s=heartbeat_timeout_s)})
        plan = WorkerPlan(
            spec="{" if broken else spec.model_dump_json(),
            prompt_tokens=4,
            dtype="float32",
            threads=1,
            session="test",
            share_memory=False,
            cloud_notices=False,
            orphan_s=orphan_s,
        )
        host = RayHost(
            plan=plan,
            process=WORKER,
            nodes=self.nodes,
            files=files_without_weights(resolve(SPEC.model, progress=lambda _: None)),
            publishers=[self.trainer.handle],
            preemptible=selector,
            reserved=RESERVED,
            start_s=start_s,
            notify_drains=True,
            warn=print,
        )
        self.hosts.append(host)
        return host

    async def worker(self, node: str = "", *, host: RayHost | None = None) -> tuple[RayWorker, int]:
        """A worker with the weights of version 0, and its process id."""
        before = _pids()
        worker = await (host or self.host()).start(self.lease(node))
        assert isinstance(worker, RayWorker)
        (pid,) = _pids() - before
        await worker.load(self.trainer.version)
        return worker, pid

    def lease(self, node: str = "") -> Lease:
        self.leases += 1
        return Lease(
            lease_id=f"lease-{self.leases}",
            worker_id=f"w{self.leases}",
            kind="preemptible",
            price_usd_per_hour=0.0,
            start_s=0.0,
            node=node,
        )


@pytest.fixture
async def workplace(trainer: Trainer) -> AsyncIterator[Workplace]:
    nodes = NodeWatch()
    await nodes.start()
    place = Workplace(trainer, nodes)
    yield place
    for host in place.hosts:
        await host.close()
    await nodes.close()


def _pids() -> set[int]:
    """Process ids of all live actors."""
    return {actor["Pid"] for actor in ray_state.actors().values() if actor["State"] == "ALIVE"}


def _request(index: int, version: PolicyVersion, tokens: int = 100) -> GenerateRequest:
    return GenerateRequest(
        sample_id=SampleId(run_seed=0, purpose="train", prompt_id="p", epoch=0, index=index),
        lease_id="any",
        attempt=1,
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_new_tokens=tokens),
        exact_version=version.number,
    )


async def _finished(worker: RayWorker, samples: int) -> dict[SampleId, bytes]:
    """Completions by sample, once all have finished."""
    tokens: dict[SampleId, bytes] = {}
    ended = 0
    async with asyncio.timeout(30):
        while ended < samples:
            report = await worker.next_report(5.0)
            for delta in report.deltas if report else ():
                tokens[delta.sample_id] = tokens.get(delta.sample_id, b"") + delta.token_ids
                ended += delta.finish is not None
    return tokens


async def _first_tokens(worker: RayWorker) -> TokenDelta:
    async with asyncio.timeout(30):
        while True:
            report = await worker.next_report(5.0)
            for delta in report.deltas if report else ():
                if delta.token_ids:
                    return delta


async def _notice_s(worker: RayWorker) -> float:
    async with asyncio.timeout(20):
        while True:
            report = await worker.next_report(5.0)
            if report is not None and report.notice_s is not None:
                return report.notice_s


async def _lost(worker: RayWorker, timeout_s: float = 20.0) -> tuple[WorkerLost, float]:
    """The error of its loss, and after how many seconds it was raised."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        try:
            await worker.next_report(1.0)
        except WorkerLost as error:
            return error, time.monotonic() - began
    raise AssertionError("the loss of the worker was not reported")


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of processes, not of this loop
            await asyncio.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def _stat(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)


def test_the_cluster_listens_on_loopback_and_needs_a_token(cluster: LocalCluster) -> None:
    below = [cluster.process.pid, *processes_below(cluster.process.pid)]
    addresses = listening(below)
    assert len(addresses) >= 5  # one server of the head, and two of each node
    assert {address.partition(":")[0] for address in addresses} == {"127.0.0.1"}
    stranger = f"from ray._raylet import GcsClient; GcsClient(address={cluster.address!r})"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    said = subprocess.run(
        [sys.executable, "-c", stranger],
        env={**environment, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode != 0
    assert "AuthenticationError" in said.stderr


def test_the_clusters_files_are_private_to_the_user(cluster: LocalCluster) -> None:
    folder = Path(cluster.folder)
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
    below = command_lines([cluster.process.pid, *processes_below(cluster.process.pid)])
    paths = {path for line in below.values() for path in re.findall(r"=(/[^ ]*tidemill-ray[^ ]*)", line)}
    assert len(paths) > 3  # sockets, logs, session folders
    assert all(path.startswith(f"{folder}/ray") for path in paths)


async def test_a_worker_generates_gets_a_notice_continues_and_is_killed(workplace: Workplace) -> None:
    trainer = workplace.trainer
    before = _pids()
    worker = await workplace.host().start(workplace.lease())
    assert isinstance(worker, RayWorker)
    (pid,) = _pids() - before
    loaded = await worker.load(trainer.version)
    publisher = RayTrainer(trainer.remote, trainer.version, warn=pytest.fail)
    manifest = await publisher.publish(trainer.version)  # returns the published one
    assert (loaded.version, loaded.full) == (trainer.version, True)
    assert loaded.nbytes >= manifest.nbytes
    assert loaded.probe_logprobs == manifest.probe_logprobs == await worker.run_probe(manifest.probe_ids)
    assert loaded.part_sums == manifest.part_sums != ()
    weights = None
    while weights is None:
        report = await worker.next_report(10.0)
        assert report is not None
        weights = report.status.weights
    assert (weights.version, weights.total) == (trainer.version.number, manifest.part_sums[weights.part])

    requests = [_request(index, trainer.version, tokens=20) for index in range(3)]
    await worker.submit(requests)
    await trainer.local.submit(requests)
    theirs, ours = await _finished(worker, 3), await _finished(trainer.local, 3)
    assert theirs == ours
    assert len(theirs) == 3

    os.kill(pid, signal.SIGTERM)
    assert await _notice_s(worker) == 5.0
    await worker.submit([_request(3, trainer.version)])
    await _first_tokens(worker)

    os.kill(pid, signal.SIGKILL)
    error, after_s = await _lost(worker)
    assert error.cause == "its process was killed (SIGKILL or out of memory)"
    assert after_s < 1.0
    with pytest.raises(WorkerLost, match="was killed"):
        await worker.submit(requests)


async def test_a_stopped_worker_times_out_and_its_process_ends_with_the_lease(workplace: Workplace) -> None:
    worker, pid = await workplace.worker()
    await worker.submit([_request(0, workplace.trainer.version)])
    await _first_tokens(worker)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    while await worker.next_report(0.3) is not None:  # earlier reports
        assert time.monotonic() - began < 5
    assert await worker.next_report(0.5) is None
    worker.kill()
    error, after_s = await _lost(worker)
    assert error.cause == "it was ended"
    assert after_s < 1.0
    await _until(lambda: not _alive(pid), timeout_s=15)


async def test_an_idle_worker_reports_within_a_short_heartbeat_timeout_and_ends_without_calls(
    workplace: Workplace,
) -> None:
    worker, pid = await workplace.worker(host=workplace.host(heartbeat_timeout_s=1.0, orphan_s=3.0))
    while await worker.next_report(0.0) is not None:
        pass  # earlier reports
    began = time.monotonic()
    for _ in range(8):  # four reports a second
        assert await worker.next_report(1.0) is not None
    assert 1.5 < time.monotonic() - began < 4
    assert _alive(pid)
    await _until(lambda: not _alive(pid), timeout_s=10)


async def test_a_worker_without_a_matching_node_is_lost(workplace: Workplace) -> None:
    with pytest.raises(WorkerLost) as caught:
        await workplace.host(start_s=1.0, selector={"disk": "huge"}).start(workplace.lease())
    assert caught.value.cause == "no node with label disk=huge has 1 free CPU"
    assert "ray start --labels" in caught.value.hint


async def test_a_worker_that_fails_to_start_leaves_no_process(workplace: Workplace) -> None:
    before = _pids()
    with pytest.raises(WorkerLost, match=r"it does not start: ValidationError: .*"):
        await workplace.host(broken=True).start(workplace.lease())
    await _until(lambda: _pids() == before, timeout_s=10)


async def test_a_cancelled_start_leaves_no_process(workplace: Workplace) -> None:
    before = _pids()
    starting = asyncio.create_task(workplace.host().start(workplace.lease()))
    await _until(lambda: _pids() != before, timeout_s=20)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await _until(lambda: _pids() == before, timeout_s=10)


async def test_a_trainer_raises_user_errors_and_reports_its_death_with_a_hint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    handle, remote = _trainer_process()
    missing = SPEC.model_copy(update={"model": ModelConfig(source=str(tmp_path / "nothing"))})
    with pytest.raises(UserError) as fault:
        await invoke(remote, 60, TrainerActor.start, _trainer_plan(tmp_path, missing))
    assert str(tmp_path / "nothing") in str(fault.value)

    started = await invoke(remote, 60, TrainerActor.start, _trainer_plan(tmp_path))
    trainer = RayTrainer(remote, started.version, warn=pytest.fail)
    assert await trainer.restore_latest() == 0
    await trainer.save(0, score=None)
    assert (tmp_path / "step_0").is_dir()

    asked = [Completion(prompt_ids=PROMPT, token_ids=pack_tokens([3] * tokens)) for tokens in (2, 1)]
    said = [unpack_logprobs(one) for one in await trainer.logprobs(asked)]
    assert [len(one) for one in said] == [2, 1]
    assert said[0][:1] == pytest.approx(said[1])

    os.kill((ray_state.actors(handle._actor_id.hex()))["Pid"], signal.SIGKILL)
    with pytest.raises(TrainerLost) as lost:
        await trainer.commit(1)
    assert "the trainer died: its process was killed (SIGKILL or out of memory)" in str(lost.value)
    assert "run the same command again" in str(lost.value)


async def test_leases_of_a_node_that_drains_and_dies(cluster: LocalCluster, workplace: Workplace) -> None:
    pool = RayPool(kind="ray", max_workers=5, selector=SPOT)
    provider = RayProvider(pool, WORKER, workplace.nodes, clock=LoopClock(), session=1, price_usd_per_hour=0.5)
    leases = [await provider.next_event(5.0) for _ in range(5)]  # three nodes of two CPUs have room for six
    granted = [event.lease for event in leases if isinstance(event, LeaseGranted)]
    assert len({lease.lease_id for lease in granted}) == 5
    assert await provider.next_event(0.1) is None
    victim = next(node for node in workplace.nodes.fitting(SPOT) if node.name == "spot-2")
    on_victim = {lease.lease_id for lease in granted if lease.node == victim.node_id}
    assert on_victim

    worker, pid = await workplace.worker(victim.node_id)
    await worker.submit([_request(0, workplace.trainer.version)])
    await _first_tokens(worker)
    raylet = _stat(pid)[1]

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs = GcsClient(address=cluster.address)
    assert gcs.drain_node(victim.node_id, reason, "reclaimed", int((time.time() + 30) * 1000))[0]
    noticed = [await provider.next_event(5.0) for _ in on_victim]
    assert {event.lease_id for event in noticed if isinstance(event, LeaseNoticed)} == on_victim
    left_s = [event.deadline_s - LoopClock().now() for event in noticed if isinstance(event, LeaseNoticed)]
    assert all(20 < seconds < 31 for seconds in left_s)
    assert 20 < await _notice_s(worker) < 31

    os.kill(raylet, signal.SIGKILL)
    error, after_s = await _lost(worker)
    assert "its node spot-2" in error.cause
    assert after_s < 5
    await _until(lambda: not _alive(pid), timeout_s=2)  # it ends with its node
    ended = [await provider.next_event(10.0) for _ in on_victim]
    assert {event.lease_id for event in ended if isinstance(event, LeaseEnded)} == on_victim
    await provider.close()
