"""The runtime of one process: the reserved engine shares the trainer's parameters; workers are simulated.

Preemptible workers are simulated: each has an engine of its own over a published snapshot, and is forgotten in the
middle of whatever it does when its machine is taken.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Clock, Compute
from tidemill.core.records import Lease, PolicyVersion
from tidemill.rollout.pulled import PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import (
    ModelPublisher,
    RuntimeBackend,
    TrainerCheckpoints,
    probe_sequence,
    scheduled_provider,
)
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import ModelBundle, build_critic, load_model_bundle
from tidemill.runtime.readers import Readers, reference_reader, reward_reader
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import MemoryTransport
from tidemill.weights.store import WeightStore

NOTHING_YET = PolicyVersion(number=-1, digest="")
"""What an engine has before its first load: no request asks for it."""


class InProcessHost:
    """Implements `core.protocols.WorkerHost`.

    A worker's engine has the settings of the trainer's own. Its model is a twin without weights; a load puts it over a
    published snapshot, which all workers of that version share.

    Args:
        compute: the run's one thread for models; every engine takes its turn there.
        weights_compute: where what was pulled is verified.
        prompt_tokens: the longest prompt.
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
        self._workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()  # one that was killed and dropped frees memory
        self._frozen = False

    async def start(self, lease: Lease) -> EngineWorker:
        bundle = self._bundle
        model = await self._weights_compute.run(self._empty_twin)
        puller = Puller(self._store.transport, self._weights_compute, clock=self._clock, pinned=self._store.pinned)
        worker = EngineWorker(
            bundle.engine_over(model, NOTHING_YET, prompt_tokens=self._prompt_tokens),
            self._compute,
            clock=self._clock,
            tick_s=bundle.spec.engine.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            heartbeat_s=bundle.spec.fleet.heartbeat_s,
            source=PulledWeights(puller, model),
        )
        self._workers.add(worker)
        return worker

    def _empty_twin(self) -> PreTrainedModel:
        # Workers that were killed lie in reference cycles, with their caches and the snapshots they were over. Python
        # does not know how large these are and would let many of them pile up.
        gc.collect()
        if not self._frozen:
            self._frozen = True
            gc.freeze()  # what is there before the first worker stays: looking through it takes a fifth of a second
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
    """Implements `OpenMachinery`.

    Raises:
        UserError: the model, the device, the task or the pool cannot be had.
    """
    bundle = load_model_bundle(spec, progress=recorder.note)
    task = bundle.task()
    provider = scheduled_provider(spec, run, clock, tell=recorder.note)
    async with AsyncExitStack() as stack:
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        reference = bundle.reference()
        trainer = PolicyTrainer(
            bundle.model,
            spec,
            compute=compute,
            source=bundle.folder,
            reference=reference,
            critic=build_critic(bundle, progress=recorder.note),
            autocast=bundle.autocast,
        )
        engine = bundle.engine(trainer.version, prompt_tokens=task.longest_prompt_tokens)
        local = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s)
        stack.push_async_callback(local.close)
        readers = _readers(spec, compute, reference) if spec.reading.ahead else Readers()
        for reader in readers.all:
            stack.push_async_callback(reader.close)
        store = CheckpointStore(
            run.checkpoints, keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        host = publisher = None
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
                prompt_tokens=task.longest_prompt_tokens,
            )
            stack.push_async_callback(host.close)
            publisher = ModelPublisher(
                bundle.model,
                weights,
                compute=compute,
                rollout_model=bundle.rollout_model,
                probe_ids=probe_sequence(task.source),
            )
            stack.push_async_callback(publisher.close)
        yield RuntimeBackend(
            trainer=trainer,
            checkpoints=TrainerCheckpoints(store, trainer, compute, warn=recorder.note),
            local=local,
            task=task,
            codec=bundle.codec,
            threads=bundle.threads,
            about={"device": str(bundle.device), "threads": bundle.threads, "autocast": str(bundle.autocast)},
            provider=provider,
            host=host,
            publisher=publisher,
            # A worker that waits for the thread while the trainer computes is not silent.
            heartbeat_timeout_s=math.inf,
            compute=compute,
            readers=readers,
        )


def _readers(spec: RunSpec, compute: ComputeThread, reference: PreTrainedModel | None) -> Readers:
    return Readers(
        rewards={folder: reward_reader(spec, folder, compute) for folder in spec.scoring.model_folders},
        reference=None if reference is None else reference_reader(spec, reference, compute),
    )
