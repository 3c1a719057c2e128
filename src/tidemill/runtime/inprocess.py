"""Everything in one process: the reserved engine shares the trainer's parameters, and one thread computes for all.

Preemptible workers are simulated: each has an engine of its own over a published snapshot, and is forgotten in the
middle of whatever it does when its machine is taken.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.clock import Clock
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.checkpoints import TrainerCheckpoints
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.critic import build_critic
from tidemill.runtime.host import InProcessHost
from tidemill.runtime.machinery import Machinery, scheduled_provider
from tidemill.runtime.parts import load_parts
from tidemill.runtime.publish import ModelPublisher, probe_sequence
from tidemill.runtime.readers import Readers, reference_reader, reward_reader
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.memory import MemoryTransport
from tidemill.weights.store import WeightStore


@asynccontextmanager
async def in_process(spec: RunSpec, run: RunDirectory, recorder: Recorder, clock: Clock) -> AsyncIterator[Machinery]:
    """Implements `OpenMachinery`.

    Raises:
        UserError: the model, the device, the task or the pool cannot be had.
    """
    parts = load_parts(spec, progress=recorder.note)
    task = parts.task()
    provider = scheduled_provider(spec, run, clock, tell=recorder.note)
    async with AsyncExitStack() as stack:
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        reference = parts.reference()
        trainer = PolicyTrainer(
            parts.model,
            spec,
            compute=compute,
            source=parts.folder,
            reference=reference,
            critic=build_critic(parts, progress=recorder.note),
            autocast=parts.autocast,
        )
        engine = parts.engine(trainer.version, prompt_tokens=task.longest_prompt_tokens)
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
                parts,
                weights,
                compute=compute,
                weights_compute=weights_compute,
                clock=clock,
                prompt_tokens=task.longest_prompt_tokens,
            )
            stack.push_async_callback(host.close)
            publisher = ModelPublisher(
                parts.model,
                weights,
                compute=compute,
                rollout_model=parts.rollout_model,
                probe_ids=probe_sequence(task.source),
            )
            stack.push_async_callback(publisher.close)
        yield Machinery(
            trainer=trainer,
            checkpoints=TrainerCheckpoints(store, trainer, compute, warn=recorder.note),
            local=local,
            task=task,
            codec=parts.codec,
            threads=parts.threads,
            about={"device": str(parts.device), "threads": parts.threads, "autocast": str(parts.autocast)},
            provider=provider,
            host=host,
            publisher=publisher,
            # A worker that waits for the thread while the trainer computes is not silent.
            silence_s=math.inf,
            compute=compute,
            readers=readers,
        )


def _readers(spec: RunSpec, compute: ComputeThread, reference: PreTrainedModel | None) -> Readers:
    return Readers(
        rewards={folder: reward_reader(spec, folder, compute) for folder in spec.scoring.model_folders},
        reference=None if reference is None else reference_reader(spec, reference, compute),
    )
