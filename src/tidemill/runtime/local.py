"""The in-process runtime: the reserved engine shares the trainer's parameters or takes turns with it, preemptible
workers are simulated.

A simulated worker has an engine over a published snapshot. When its machine is taken the worker is dropped at once, in
whatever state it is.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Compute, FrozenScorer
from tidemill.core.records import Lease
from tidemill.models.loading import context_limit
from tidemill.models.snapshots import copy_on_base
from tidemill.rollout.weight_sources import EmptyModel, PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import Runtime, RuntimeBackend, scheduled_provider, scorers
from tidemill.runtime.build_trainer import build_trainer
from tidemill.runtime.compute import ComputeThread, choose_device
from tidemill.runtime.frozen_scorers import FrozenScorers, check_reward_models, local_reward_model
from tidemill.runtime.model_bundle import NO_VERSION, ModelBundle, check_vocabularies, engine_context, load_model_bundle
from tidemill.runtime.publishers import published_probe
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore


@dataclass(eq=False)
class InProcessHost:
    """Implements `core.protocols.WorkerHost`.

    A worker's engine has the settings of the trainer's engine. Its model has no weights; a load binds it to a published
    snapshot, which all workers of that version share.
    """

    bundle: ModelBundle
    store: WeightStore
    _: KW_ONLY
    compute: Compute  # the run's one thread for models; all engines take turns on it
    weights_compute: Compute  # verifies pulled weights
    clock: Clock
    prompt_tokens: int  # length of the longest prompt

    def __post_init__(self) -> None:
        self._workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()  # weak: a killed worker's memory is freed
        self._frozen = False

    async def start(self, lease: Lease) -> EngineWorker:
        bundle = self.bundle
        model = await self.weights_compute.run(self._empty_model)
        puller = Puller(self.store.transport, self.weights_compute, clock=self.clock, pinned=self.store.pinned)
        source = PulledWeights(puller, EmptyModel(model))
        worker = EngineWorker(
            bundle.engine_over(model, NO_VERSION, prompt_tokens=self.prompt_tokens),
            self.compute,
            clock=self.clock,
            tick_s=bundle.spec.engine.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            heartbeat_s=bundle.spec.fleet.heartbeat_s,
            source=source,
            check=source if bundle.spec.guard.machines.action != "off" else None,
        )
        self._workers.add(worker)
        return worker

    def _empty_model(self) -> PreTrainedModel:
        # Killed workers are in reference cycles together with their caches and snapshots. Python's collector does not
        # know their size and would let many of them accumulate.
        gc.collect()
        if gc.get_freeze_count() == 0:  # else this host, or the application, has frozen them before
            self._frozen = True
            gc.freeze()  # scanning what exists before the first worker would take a fifth of a second each time
        return copy_on_base(self.bundle.rollout_model, self.bundle.rollout_dtype)

    async def close(self) -> None:
        for worker in list(self._workers):
            worker.kill()
        if self._frozen:
            gc.unfreeze()


@asynccontextmanager
async def in_process(
    spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock
) -> AsyncIterator[RuntimeBackend]:
    """Implements `OpenBackend`.

    Raises:
        UserError: the model, the device, the task, a reward or the pool cannot be used.
    """
    check_reward_models(spec, progress=recorder.note)
    bundle = load_model_bundle(spec, progress=recorder.note, generates=spec.engine_shares_model, work="rl")
    task = bundle.task(recorder.note)
    provider = scheduled_provider(spec, run, clock, log=recorder.note)
    prompt_tokens = task.longest_prompt_tokens
    async with AsyncExitStack() as stack:
        compute, weights_compute = ComputeThread(), ComputeThread("tidemill-weights")
        stack.push_async_callback(compute.close)
        stack.push_async_callback(weights_compute.close)
        store = WeightStore(MemoryTransport(), compute=weights_compute)
        parts = build_trainer(
            bundle,
            compute,
            clock=clock,
            checkpoints=run.checkpoints,
            prompt_tokens=prompt_tokens,
            probe_ids=published_probe(spec, task.source),
            open_store=lambda: store,
            sends_base=False,
            progress=recorder.note,
            warn=recorder.note,
        )
        assert parts.engine is not None
        stack.push_async_callback(parts.engine.close)
        rewards: dict[Path, FrozenScorer] = {}
        if spec.reading.ahead:
            rewards = {folder: local_reward_model(spec, folder, compute) for folder in spec.scoring.model_folders}
        frozen = FrozenScorers(rewards=rewards, reference=parts.frozen_reference)
        for model in frozen.all:
            stack.push_async_callback(model.close)
        host = None
        if provider is not None:
            host = InProcessHost(
                bundle,
                store,
                compute=compute,
                weights_compute=weights_compute,
                clock=clock,
                prompt_tokens=prompt_tokens,
            )
            stack.push_async_callback(host.close)
        if parts.publisher is not None:
            stack.push_async_callback(parts.publisher.close)
        scoring = scorers(spec, task, compute, frozen, run=run, warn=recorder.note, guarded=True)
        stack.push_async_callback(scoring.close)
        yield RuntimeBackend(
            trainer=parts.trainer,
            checkpoints=parts.checkpoints,
            local=parts.engine,
            task=task,
            codec=bundle.codec,
            scorer=scoring.training,
            eval_scorer=scoring.held_out,
            gold_scorer=scoring.gold,
            threads=bundle.threads,
            context_tokens=engine_context(spec, limit=context_limit(bundle.model), prompt_tokens=prompt_tokens),
            device_info=bundle.device_info,
            provider=provider,
            host=host,
            publisher=parts.publisher,
            heartbeat_timeout_s=math.inf,  # a worker that waits for the thread while the trainer computes is not lost
            frozen=frozen,
        )


IN_PROCESS = Runtime(
    check_machine=lambda spec: choose_device(spec.trainer), check_models=check_vocabularies, open=in_process
)
