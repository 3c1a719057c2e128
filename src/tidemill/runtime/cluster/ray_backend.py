"""A run on Ray: the driver has the controller, the task and the tokenizer; everything that computes is an actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.config.pool import RayPool
from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Provider, Reader
from tidemill.envs.text.prompts import Task
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.folder import refuse_reward_model, weight_files
from tidemill.models.snapshots import files_without_weights, stored_context_limit
from tidemill.runtime.backend import RuntimeBackend, is_elastic, probe_sequence, scheduled_provider
from tidemill.runtime.cluster.actors import placed
from tidemill.runtime.cluster.connection import connected, reserved_selector, selector_of
from tidemill.runtime.cluster.nodes import NodeWatch, RayProvider
from tidemill.runtime.cluster.ray_calls import Remote, trainer_lost
from tidemill.runtime.cluster.ray_critic import CriticActor
from tidemill.runtime.cluster.ray_reader import RayReader, ReaderProcess
from tidemill.runtime.cluster.ray_trainer import UNTIL_GIVEN_UP, RayCheckpoints, RayPublisher, RayTrainer, TrainerActor
from tidemill.runtime.cluster.ray_worker import RayHost, RayWorker
from tidemill.runtime.cluster.wire import Started, TrainerPlan, WorkerPlan, encode, spec_to_send
from tidemill.runtime.compute import collected_rarely
from tidemill.runtime.model_bundle import fitting_task
from tidemill.runtime.readers import Readers, reward_reader
from tidemill.telemetry.events import READER_RESTART
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory

LOAD_S = 900.0


@asynccontextmanager
async def on_ray(spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock) -> AsyncIterator[RuntimeBackend]:
    """Implements `OpenMachinery`.

    Raises:
        UserError: the model, the task, the pool or the cluster cannot be had.
    """
    refuse_reward_model(spec.model.source)
    folder = resolve(spec.model, progress=recorder.note)
    codec, limit = load_codec(folder), stored_context_limit(folder)
    task = fitting_task(spec, codec, limit=limit)
    provider = scheduled_provider(spec, run, clock, tell=recorder.note)
    async with AsyncExitStack() as stack:
        stack.enter_context(collected_rarely())
        nodes = await stack.enter_async_context(connected(spec, model_bytes=_stored_bytes(folder), tell=recorder.note))
        reserved = reserved_selector(spec.ray, selector_of(spec.pool))
        handle, critic = await stack.enter_async_context(_reserved_side(spec, reserved))
        remote = Remote(handle, gone=trainer_lost, where=lambda: "")
        started, readers = await asyncio.gather(
            _start_trainer(remote, spec, run, folder, task, critic),
            _start_readers(remote, spec, folder, reserved, recorder, stack),
        )
        trainer = RayTrainer(remote, started)
        backend = RuntimeBackend(
            trainer=trainer,
            checkpoints=RayCheckpoints(remote, trainer, warn=recorder.note),
            local=RayWorker(remote, owned=False),
            task=task,
            codec=codec,
            threads=started.threads,
            about=_about(started),
            readers=readers,
        )
        if is_elastic(spec):
            plan = WorkerPlan(
                spec=spec_to_send(spec, folder),
                prompt_tokens=task.longest_prompt_tokens,
                dtype=started.dtype,
                threads=max(1, int(spec.ray.worker_cpus)),
                cloud_notices=bool(spec.ray.address),
            )
            host = RayHost(
                plan,
                spec.ray,
                nodes,
                files=files_without_weights(folder),
                publisher=handle,
                preemptible=selector_of(spec.pool),
                reserved=reserved,
                start_s=spec.fleet.join_timeout_s,
                tells_drains=provider is not None,
            )
            stack.push_async_callback(host.close)
            if isinstance(spec.pool, RayPool):
                provider = _node_provider(spec, spec.pool, nodes, run, clock)
                stack.push_async_callback(provider.close)
            backend = _elastic(backend, host, provider, RayPublisher(remote))
        yield backend


def _about(started: Started) -> dict[str, Any]:
    critic = {"critic_device": started.critic_device} if started.critic_device else {}
    return {"device": started.device, "threads": started.threads, "autocast": started.autocast} | critic


def _elastic(
    backend: RuntimeBackend, host: RayHost, provider: Provider | None, publisher: RayPublisher
) -> RuntimeBackend:
    return replace(backend, host=host, provider=provider, publisher=publisher)


def _node_provider(spec: RunSpec, pool: RayPool, nodes: NodeWatch, run: RunDirectory, clock: Clock) -> RayProvider:
    price, session = spec.fleet.preemptible_usd_per_hour, run.past.count + 1
    return RayProvider(pool, spec.ray, nodes, clock=clock, session=session, price_usd_per_hour=price)


def _stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(folder))


async def _start_trainer(
    remote: Remote, spec: RunSpec, run: RunDirectory, folder: Path, task: Task, critic: Any
) -> Started:
    plan = TrainerPlan(
        spec=spec_to_send(spec, folder),
        checkpoints=str(run.checkpoints.resolve()),
        prompt_tokens=task.longest_prompt_tokens,
        probe_ids=probe_sequence(task.source) if is_elastic(spec) else b"",
    )
    return await remote.call("start", encode(plan), critic, kind=Started, timeout_s=LOAD_S)


async def _start_readers(
    trainer: Remote,
    spec: RunSpec,
    folder: Path,
    selector: dict[str, str],
    recorder: Recorder,
    stack: AsyncExitStack,
) -> Readers:
    """The models that read sample by sample, each where `spec.placement` puts it; `stack` ends them."""

    async def started(who: str, reward_model: Path | None) -> RayReader:
        process = ReaderProcess(
            spec, who=who, reward_model=reward_model, folder=folder, selector=selector,
            tell=lambda who, cause: recorder.event(READER_RESTART, who=who, cause=cause),
        )  # fmt: skip
        stack.push_async_callback(process.close)
        return await process.start()

    placement, folders = spec.placement, spec.scoring.model_folders
    rewards: dict[Path, Reader] = {}
    if placement.reward_model == "actor":
        found = await asyncio.gather(*(started("reward model", reward_model) for reward_model in folders))
        rewards = dict(zip(folders, found, strict=True))
    elif spec.reading.ahead:
        rewards = {reward_model: reward_reader(spec, reward_model) for reward_model in folders}
    reference: Reader | None = None
    if spec.algorithm.kl_beta and placement.reference == "actor":
        reference = await started("reference", None)
    elif spec.algorithm.kl_beta and spec.reading.ahead:
        reference = RayReader(trainer, read_s=UNTIL_GIVEN_UP)  # it reads between two batches that it learns from
    for reader in (*rewards.values(), *([reference] if reference else ())):
        stack.push_async_callback(reader.close)
    return Readers(rewards=rewards, reference=reference)


@asynccontextmanager
async def _reserved_side(spec: RunSpec, selector: dict[str, str]) -> AsyncIterator[tuple[Any, Any]]:
    """The trainer, and the critic where that has a process of its own, else None."""
    config, placement = spec.ray, spec.placement
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(
            placed(
                TrainerActor,
                cpus=config.trainer_cpus,
                gpus=config.trainer_gpus,
                selector=selector,
                who="trainer",
                keys=("ray.trainer_cpus", "ray.trainer_gpus"),
            )
        )
        critic = None
        if spec.algorithm.needs_critic and placement.critic == "actor":
            critic = await stack.enter_async_context(
                placed(
                    CriticActor,
                    cpus=placement.actor_cpus,
                    gpus=placement.actor_gpus,
                    selector=selector,
                    who="critic",
                    keys=("placement.actor_cpus", "placement.actor_gpus"),
                )
            )
        yield trainer, critic
