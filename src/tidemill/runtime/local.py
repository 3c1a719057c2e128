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

from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Compute, Publisher, Trainer
from tidemill.core.records import Lease
from tidemill.models.loading import context_limit
from tidemill.rollout.pulled import EmptyModel, PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import (
    Runtime,
    RuntimeBackend,
    TrainerCheckpoints,
    scheduled_provider,
    scorers,
)
from tidemill.runtime.colocated import open_colocated
from tidemill.runtime.compute import ComputeThread, choose_device
from tidemill.runtime.model_bundle import (
    NO_VERSION,
    ModelBundle,
    build_critic,
    check_vocabularies,
    engine_context,
    load_model_bundle,
)
from tidemill.runtime.publishers import ModelPublisher, ProbePublisher, ShardPublisher, probe_sequence
from tidemill.runtime.readers import Readers, check_reward_models, reference_reader, reward_reader
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore


class InProcessHost:
    """Implements `core.protocols.WorkerHost`.

    A worker's engine has the settings of the trainer's engine. Its model has no weights; a load binds it to a published
    snapshot, which all workers of that version share.

    Args:
        compute: the run's one thread for models; all engines take turns on it.
        weights_compute: verifies pulled weights.
        prompt_tokens: length of the longest prompt.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        store: WeightStore,
        *,
        compute: Compute,
        weights_compute: Compute,
        clock: Clock,
        prompt_tokens: int,
    ) -> None:
        self._bundle, self._store, self._clock, self._prompt_tokens = bundle, store, clock, prompt_tokens
        self._compute, self._weights_compute = compute, weights_compute
        self._workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()  # weak: a killed worker's memory is freed
        self._frozen = False

    async def start(self, lease: Lease) -> EngineWorker:
        bundle = self._bundle
        model = await self._weights_compute.run(self._empty_model)
        puller = Puller(self._store.transport, self._weights_compute, clock=self._clock, pinned=self._store.pinned)
        worker = EngineWorker(
            bundle.engine_over(model, NO_VERSION, prompt_tokens=self._prompt_tokens),
            self._compute,
            clock=self._clock,
            tick_s=bundle.spec.engine.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            heartbeat_s=bundle.spec.fleet.heartbeat_s,
            source=PulledWeights(puller, EmptyModel(model)),
        )
        self._workers.add(worker)
        return worker

    def _empty_model(self) -> PreTrainedModel:
        # Killed workers are in reference cycles together with their caches and snapshots. Python's collector does not
        # know their size and would let many of them accumulate.
        gc.collect()
        if not self._frozen:
            self._frozen = True
            gc.freeze()  # scanning what exists before the first worker would take a fifth of a second each time
        return self._bundle.rollout_twin()

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
    colocated = spec.placement.engine == "colocated"
    bundle = load_model_bundle(spec, progress=recorder.note, generates=not colocated)
    task = bundle.task(recorder.note)
    provider = scheduled_provider(spec, run, clock, log=recorder.note)
    async with AsyncExitStack() as stack:
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        reference = bundle.reference()
        policy = PolicyTrainer(
            bundle.forward,
            spec,
            compute=compute,
            source=bundle.folder,
            reference=bundle.forward_of(reference),
            critic=build_critic(bundle, progress=recorder.note),
        )
        trainer: Trainer = policy
        probe_ids, prompt_tokens = probe_sequence(task.source), task.longest_prompt_tokens
        publisher: Publisher | None = None
        if colocated:
            local, trainer = open_colocated(
                bundle, policy, compute, clock=clock, prompt_tokens=prompt_tokens, probe_ids=probe_ids
            )
            publisher = ProbePublisher(bundle, compute=compute, probe_ids=probe_ids)
        else:
            engine = bundle.engine(policy.version, prompt_tokens=prompt_tokens)
            local = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s)
        stack.push_async_callback(local.close)
        readers = Readers()
        if spec.reading.ahead:
            readers = Readers(
                rewards={folder: reward_reader(spec, folder, compute) for folder in spec.scoring.model_folders},
                reference=None if reference is None else reference_reader(spec, reference, compute),
            )
        for reader in readers.all:
            stack.push_async_callback(reader.close)
        store = CheckpointStore(
            run.checkpoints, keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        host = None
        if provider is not None:
            weights_compute = ComputeThread("tidemill-weights")
            stack.push_async_callback(weights_compute.close)
            weights = WeightStore(MemoryTransport(), compute=weights_compute)
            host = InProcessHost(
                bundle,
                weights,
                compute=compute,
                weights_compute=weights_compute,
                clock=clock,
                prompt_tokens=prompt_tokens,
            )
            stack.push_async_callback(host.close)
            if colocated:  # there is no second copy of the weights
                publisher = ShardPublisher(bundle, weights, compute=compute, probe_ids=probe_ids)
            else:
                publisher = ModelPublisher(
                    bundle.model, weights, compute=compute, rollout_model=bundle.rollout_model, probe_ids=probe_ids
                )
            stack.push_async_callback(publisher.close)
        scorer, eval_scorer = scorers(spec, task, compute, readers, warn=recorder.note)
        stack.push_async_callback(scorer.close)
        stack.push_async_callback(eval_scorer.close)
        yield RuntimeBackend(
            trainer=trainer,
            checkpoints=TrainerCheckpoints(store, policy, compute, warn=recorder.note),
            local=local,
            task=task,
            codec=bundle.codec,
            scorer=scorer,
            eval_scorer=eval_scorer,
            threads=bundle.threads,
            context_tokens=engine_context(spec, limit=context_limit(bundle.model), prompt_tokens=prompt_tokens),
            device_info=bundle.device_info,
            provider=provider,
            host=host,
            publisher=publisher,
            heartbeat_timeout_s=math.inf,  # a worker that waits for the thread while the trainer computes is not lost
            readers=readers,
        )


def _check_devices(spec: RunSpec) -> None:
    choose_device(spec.trainer)


def _check(spec: RunSpec) -> None:
    _check_devices(spec)
    check_vocabularies(spec)


IN_PROCESS = Runtime(check=_check, check_devices=_check_devices, open=in_process)
