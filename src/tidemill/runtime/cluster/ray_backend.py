"""The Ray runtime: the driver runs the controller, actors compute, and workers run on leases of the cluster's nodes."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.autoscaler.sdk import request_resources

from tidemill.config.pool import RayPool
from tidemill.config.processes import Processes, worker_process
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.protocols import Clock, FrozenScorer, Provider, Worker
from tidemill.core.records import Lease, LeaseEnded, LeaseEvent, LeaseGranted, LeaseNoticed
from tidemill.extensions.registry import session_functions
from tidemill.models.auto import load_config
from tidemill.models.catalog import present, resolve
from tidemill.models.codec import load_codec
from tidemill.models.folder import refuse_reward_model, weight_files
from tidemill.models.model_source import locate
from tidemill.models.snapshots import check_shardable, files_without_weights, stored_context_limit
from tidemill.pool.provider import BackOff
from tidemill.rollout.engines.vllm import check_family, check_version
from tidemill.rollout.worker_group import WorkerGroup
from tidemill.runtime.backend import Runtime, RuntimeBackend, scheduled_provider, scorers
from tidemill.runtime.cluster.connection import (
    NodeView,
    NodeWatch,
    check_nodes,
    connected,
    local_nodes,
    reserved_selector,
    selector_of,
)
from tidemill.runtime.cluster.lane import LanePlan, LaneSender
from tidemill.runtime.cluster.launch_node import ENDS_LABEL
from tidemill.runtime.cluster.rank_group import RankGroup, meeting_file, rank_remotes
from tidemill.runtime.cluster.ray_calls import ActorResources, Remote, blocking, placed, spec_to_send, trainer_lost
from tidemill.runtime.cluster.ray_critic import CriticActor
from tidemill.runtime.cluster.ray_frozen_scorer import FrozenScorerProcess, RayFrozenScorer
from tidemill.runtime.cluster.ray_trainer import NO_DEADLINE, RayTrainer, Started, TrainerActor, TrainerPlan
from tidemill.runtime.cluster.ray_worker import RayHost, RayWorker, WorkerPlan
from tidemill.runtime.cluster.weight_transports import serving_token
from tidemill.runtime.cluster.wire import Caller, invoke
from tidemill.runtime.compute import collected_rarely
from tidemill.runtime.extension_checks import identities, run_extensions
from tidemill.runtime.frozen_scorers import FrozenScorers, check_reward_models, local_reward_model
from tidemill.runtime.model_bundle import check_sharded_models, check_vocabularies, engine_context, fitting_task
from tidemill.runtime.publishers import published_probe
from tidemill.runtime.vllm_scorers import check_vllm_scoring
from tidemill.telemetry.events import READER_RESTART
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

LOAD_S = 900.0


@asynccontextmanager
async def on_ray(spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock) -> AsyncIterator[RuntimeBackend]:
    """Implements `OpenBackend`.

    Raises:
        UserError: the model, the task, a reward, the pool or the cluster cannot be used.
    """
    check_reward_models(spec, progress=recorder.note)
    refuse_reward_model(locate(spec.model.source).source)
    folder = resolve(spec.model, progress=recorder.note)
    if spec.engine.kind == "vllm":
        if not spec.ray.address:  # the workers are on this machine
            check_version()
        check_family(load_config(folder).model_type)
    check_vllm_scoring(spec, folder)
    if spec.trainer.shards > 1:  # again: it may have been built or downloaded
        check_sharded_models(spec, folder, recorder.note)
    codec, limit = load_codec(folder), stored_context_limit(folder)
    task = fitting_task(spec, codec, limit=limit, progress=recorder.note)
    provider: Provider | None = scheduled_provider(spec, run, clock, log=recorder.note)
    model_bytes = sum(file.stat().st_size for file in weight_files(folder))
    async with AsyncExitStack() as stack:
        stack.enter_context(collected_rarely())
        nodes = await stack.enter_async_context(connected(spec, model_bytes=model_bytes, log=recorder.note))
        preemptible = selector_of(spec.pool)
        reserved = reserved_selector(spec.ray, preemptible)
        check_nodes(spec, nodes, reserved, preemptible)
        resources = ActorResources(spec.ray.trainer_cpus, spec.ray.trainer_gpus, "ray.trainer")
        shards, lane = spec.trainer.shards, None
        handles = await stack.enter_async_context(placed(TrainerActor, "trainer", resources, reserved, size=shards))
        critics: list[Any] = []
        if spec.algorithm.needs_critic and spec.placement.critic == "actor":
            resources = ActorResources(spec.placement.actor_cpus, spec.placement.actor_gpus, "placement.actor")
            critics = await stack.enter_async_context(placed(CriticActor, "critic", resources, reserved, size=shards))
        remotes = [Remote(handles[0], lost=trainer_lost)] if shards == 1 else rank_remotes(handles)
        remote = remotes[0] if shards == 1 else RankGroup(remotes)
        plan = TrainerPlan(
            spec=spec_to_send(spec, folder),
            checkpoints=str(run.checkpoints.resolve()),
            prompt_tokens=task.longest_prompt_tokens,
            probe_ids=published_probe(spec, task.source),
            identities=identities(run_extensions(spec, trainer=True)),
        )
        started, frozen = await asyncio.gather(
            _start_trainer(remote, plan, run, critics),
            _start_frozen_scorers(remote, spec, folder, task.longest_prompt_tokens, reserved, recorder, stack),
        )
        host = None
        if spec.weights.lane != "none":
            lane = LanePlan(
                meeting=stack.enter_context(meeting_file(run.checkpoints)),
                layout=started.layout,
                probe_ids=plan.probe_ids,
                one_machine=not spec.ray.address,
                engine_s=spec.fleet.join_timeout_s,
            )
        if spec.is_elastic or spec.engine_is_apart:
            host = RayHost(
                plan=WorkerPlan(
                    spec=spec_to_send(spec, folder),
                    prompt_tokens=task.longest_prompt_tokens,
                    dtype=started.dtype,
                    threads=max(1, int(spec.ray.worker_cpus)),
                    session=secrets.token_hex(8),
                    share_memory=spec.shares_snapshots,
                    cloud_notices=bool(spec.ray.address),
                ),
                process=worker_process(spec),
                nodes=nodes,
                files=files_without_weights(folder),
                publishers=handles,
                preemptible=preemptible,
                reserved=reserved,
                start_s=spec.fleet.join_timeout_s,
                notify_drains=provider is not None,
                warn=recorder.note,
                lane=lane,
                sender=remote if lane is not None else None,
            )
            stack.push_async_callback(host.close)
            if isinstance(spec.pool, RayPool):
                provider = RayProvider(
                    spec.pool,
                    worker_process(spec),
                    nodes,
                    clock=clock,
                    session=run.past.count + 1,
                    price_usd_per_hour=spec.fleet.preemptible_usd_per_hour,
                )
                stack.push_async_callback(provider.close)
        scoring = scorers(spec, task, frozen=frozen, run=run, warn=recorder.note, guarded=True)
        stack.push_async_callback(scoring.close)
        trainer = RayTrainer(remote, started.version, warn=recorder.note)
        yield RuntimeBackend(
            trainer=trainer,
            checkpoints=trainer,
            local=await _reserved_engine(host if spec.engine_is_apart else None, lane, remote, remotes, clock),
            task=task,
            codec=codec,
            scorer=scoring.training,
            eval_scorer=scoring.held_out,
            gold_scorer=scoring.gold,
            threads=started.threads,
            context_tokens=engine_context(spec, limit=limit, prompt_tokens=task.longest_prompt_tokens),
            device_info=started.device_info,
            provider=provider,
            host=host if spec.is_elastic else None,
            local_engines=1 if spec.engine_is_apart else shards,
            publisher=trainer if plan.probe_ids else None,
            frozen=frozen,
        )


def _check_machine(spec: RunSpec) -> None:
    """Check the GPUs and the environment of this machine for a local cluster; on another cluster the actors check."""
    if spec.ray.address:
        return
    if spec.weights.transport == "http":
        serving_token(spec.weights)
    needed, present = sum(math.ceil(node.gpus) for node in local_nodes(spec)), torch.cuda.device_count()
    if needed > present:
        gpus = {
            "ray.trainer_gpus": spec.ray.trainer_gpus,
            "ray.worker_gpus": spec.ray.worker_gpus,
            "placement.actor_gpus": spec.placement.actor_gpus,
        }
        raise UserError(
            f"the run needs {counted(needed, 'GPU')}, and this machine has {present}",
            where=", ".join(key for key, count in gpus.items() if count),
            hint="set it to 0 to compute on the CPU, or see `tidemill doctor`",
        )


def _check_models(spec: RunSpec) -> None:
    check_vocabularies(spec)
    folder = present(spec.model)
    if spec.engine.kind == "vllm" and folder is not None:
        check_family(load_config(folder).model_type)
    if spec.trainer.shards > 1 and folder is not None:
        check_shardable(folder)


RAY = Runtime(check_machine=_check_machine, check_models=_check_models, open=on_ray)


async def _start_trainer(
    remote: Remote | RankGroup, plan: TrainerPlan, run: RunDirectory, critics: Sequence[Any]
) -> Started:
    """Raises UserError: a model or a device cannot be used."""
    if isinstance(remote, RankGroup):
        return await remote.start(TrainerActor.start, plan, run.checkpoints, critics=critics)
    critic = next(iter(critics), None)
    return await invoke(remote, LOAD_S, TrainerActor.start, plan, functions=session_functions(), critic=critic)


async def _reserved_engine(
    apart: RayHost | None, lane: LanePlan | None, trainer: Caller, remotes: Sequence[Remote], clock: Clock
) -> Worker:
    """One in a process that `apart` starts, or those in the trainer's processes."""
    if apart is None:
        engines = [RayWorker(each, owned=False) for each in remotes]
        return engines[0] if len(engines) == 1 else WorkerGroup(engines)
    lease = Lease(
        lease_id="reserved", worker_id="reserved", kind="reserved", price_usd_per_hour=0.0, start_s=clock.now()
    )
    if lane is None:
        return await apart.start(lease)
    worker, _ = await asyncio.gather(apart.start(lease), invoke(trainer, LOAD_S, LaneSender.join_lane, lane))
    return worker


async def _start_frozen_scorers(
    trainer: Remote | RankGroup,
    spec: RunSpec,
    folder: Path,
    prompt_tokens: int,
    selector: dict[str, str],
    recorder: Recorder,
    stack: AsyncExitStack,
) -> FrozenScorers:
    """Start the models that score sample by sample where `spec.placement` puts them; `stack` ends them."""

    async def start(role: str, reward_model: Path | None) -> RayFrozenScorer:
        process = FrozenScorerProcess(
            spec,
            role=role,
            reward_model=reward_model,
            folder=folder,
            prompt_tokens=prompt_tokens,
            selector=selector,
            on_restart=lambda role, cause: recorder.event(READER_RESTART, who=role, cause=cause),
        )
        stack.push_async_callback(process.close)
        return await process.start()

    placement, folders = spec.placement, spec.scoring.model_folders
    rewards: dict[Path, FrozenScorer] = {}
    if placement.reward_model == "actor":
        found = await asyncio.gather(*(start("reward model", reward_model) for reward_model in folders))
        rewards = dict(zip(folders, found, strict=True))
    elif spec.reading.ahead:
        rewards = {reward_model: local_reward_model(spec, reward_model) for reward_model in folders}
    reference: FrozenScorer | None = None
    if spec.algorithm.kl_beta and placement.reference == "actor":
        reference = await start("reference", None)
    elif spec.algorithm.kl_beta and spec.reading.ahead and isinstance(trainer, Remote):
        reference = RayFrozenScorer(trainer, score_s=NO_DEADLINE)  # the trainer scores between two of its batches
    frozen = FrozenScorers(rewards=rewards, reference=reference)
    for model in frozen.all:
        stack.push_async_callback(model.close)
    return frozen


AUTOSCALER_S = 10.0


@dataclass(eq=False)
class RayProvider:
    """Implements `core.protocols.Provider`: one lease for each worker that fits on a matching node, in the order in
    which nodes appear. Wanting fewer workers ends no lease.
    """

    pool: RayPool
    process: Processes  # one worker
    nodes: NodeWatch
    _: KW_ONLY
    clock: Clock
    session: int  # number of the run's session; part of lease ids
    price_usd_per_hour: float = 0.0
    back_off: BackOff = field(default_factory=BackOff)
    unix_s: Callable[[], float] = time.time  # the wall clock, which the deadlines of draining nodes refer to

    def __post_init__(self) -> None:
        self._wanted = self.pool.max_workers
        self._places: dict[str, int] = {}  # workers that fit, by node
        self._held: dict[str, Lease] = {}
        self._on_node: defaultdict[str, dict[str, Lease]] = defaultdict(dict)  # the same leases by node
        self._noticed: set[str] = set()  # nodes
        self._failures: Counter[str] = Counter()  # consecutive releases, by node
        self._retry_s: dict[str, float] = {}  # on the run's clock, by node
        self._avoided_s: dict[str, float] = {}  # the same, of nodes that computed wrongly
        self._events = deque[LeaseEvent]()
        self._granted = 0
        self._requesting: asyncio.Task[None] | None = None

    def request_workers(self, workers: int) -> None:
        wanted = min(workers, self.pool.max_workers)
        if wanted != self._wanted or self._requesting is None:
            self._wanted = wanted
            self._requesting = asyncio.create_task(self._request_nodes(wanted), name="autoscaler")

    async def next_event(self, timeout_s: float) -> LeaseEvent | None:
        deadline_s = self.clock.now() + timeout_s
        while True:
            if not self._events:  # otherwise every event would cost a look at all nodes
                self._update()
            if self._events:
                return self._events.popleft()
            left_s = deadline_s - self.clock.now()
            if left_s <= 0:
                return None
            await self.nodes.changed(left_s)

    async def release(self, lease_id: str) -> None:
        lease = self._held.pop(lease_id, None)
        if lease is None:
            return  # its node is gone
        del self._on_node[lease.node][lease_id]
        now_s, node = self.clock.now(), lease.node
        if now_s - lease.start_s >= self.back_off.settled_s:
            self._failures[node] = 0
        self._retry_s[node] = now_s + self.back_off.after(self._failures[node])
        self._failures[node] += 1

    def avoid(self, machine: str, seconds: float) -> None:
        self._avoided_s[machine] = self.clock.now() + seconds

    async def close(self) -> None:
        """Withdraw the request for nodes, unless the cluster is lost."""
        if self._requesting is not None and self.nodes.lost is None:
            await asyncio.gather(self._requesting, return_exceptions=True)
            await self._request_nodes(0)

    def _update(self) -> None:
        live = {node.node_id: node for node in self.nodes.fitting(self.pool.selector)}
        for gone in self._places.keys() - live.keys():
            cause = f"its node {self.nodes.name(gone)} is gone"
            for lease_id in self._on_node.pop(gone, ()):
                self._events.append(LeaseEnded(lease_id=lease_id, cause=cause))
                del self._held[lease_id]
            del self._places[gone]
        for node in live.values():
            if node.drains_unix_s is None:
                self._grant_on(node)
            elif node.node_id not in self._noticed:
                self._noticed.add(node.node_id)
                deadline_s = self.clock.now() + node.drains_unix_s - self.unix_s()
                cause = f"its node {node.name} is being drained"
                for lease_id in self._on_node[node.node_id]:
                    self._events.append(LeaseNoticed(lease_id=lease_id, deadline_s=deadline_s, cause=cause))

    def _grant_on(self, node: NodeView) -> None:
        held = len(self._on_node[node.node_id])
        if held == 0:  # count only resources that other programs leave free
            self._places[node.node_id] = node.places(self.process.cpus, self.process.gpus)
        not_before_s = max(each.get(node.node_id, -math.inf) for each in (self._retry_s, self._avoided_s))
        if self.clock.now() < not_before_s:
            return
        for _ in range(self._places[node.node_id] - held):
            if len(self._held) >= self._wanted:
                return
            self._granted += 1
            ends_unix_s = node.labels.get(ENDS_LABEL, "")
            lease = Lease(
                lease_id=f"lease-{self.session}-{self._granted}",
                worker_id=f"{node.name}-{self._granted}",
                kind="preemptible",
                price_usd_per_hour=self.price_usd_per_hour,
                start_s=self.clock.now(),
                node=node.node_id,
                ends_s=self.clock.now() + float(ends_unix_s) - self.unix_s() if ends_unix_s else None,
            )
            self._held[lease.lease_id] = self._on_node[node.node_id][lease.lease_id] = lease
            self._events.append(LeaseGranted(lease=lease))

    async def _request_nodes(self, workers: int) -> None:
        """Ask the autoscaler for nodes; without an autoscaler the request has no effect."""
        need = {"CPU": self.process.cpus, "GPU": self.process.gpus}
        bundles = [{resource: amount for resource, amount in need.items() if amount}] * workers
        with suppress(Exception):  # the run continues with the nodes it has
            selectors = [self.pool.selector] * workers
            request = partial(request_resources, bundles=bundles, bundle_label_selectors=selectors)
            await blocking(request, awaited="the autoscaler's answer", timeout_s=AUTOSCALER_S)
