"""A worker process: an engine over pulled weights, on a node that may vanish."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

from tidemill.config.schema import RunSpec
from tidemill.core.clock import LoopClock
from tidemill.core.records import Lease
from tidemill.models.codec import load_codec
from tidemill.models.hollow import hollow_model
from tidemill.models.snapshots import DTYPES
from tidemill.pool.notices import Notice
from tidemill.rollout.pulled import PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.cluster.plan import WorkerPlan
from tidemill.runtime.cluster.process import SIGTERM_GRACE_S, signals
from tidemill.runtime.cluster.serving import Serving, asked
from tidemill.runtime.cluster.transport import ObjectStoreReader
from tidemill.runtime.cluster.wire import decode
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.frozen import FrozenModels
from tidemill.runtime.host import NOTHING_YET
from tidemill.runtime.machine import choose_device, require_reserved_gpus
from tidemill.runtime.notices import tell_notices
from tidemill.runtime.parts import Parts
from tidemill.weights.puller import Puller


class RolloutActor(Serving):
    """One process of it is one worker; it is killed, never restarted."""

    @asked
    async def place(self) -> str:
        """The node it was put on: the first thing it says."""
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    @asked
    async def start(self, plan: bytes, files: dict[str, bytes], lease: bytes, publisher: Any) -> None:
        """Make the engine; its weights come with the first `load`.

        Args:
            files: configuration and tokenizer of the model.
            publisher: an actor whose `blob` knows the published versions.

        Raises:
            UserError: this node cannot do what the configuration asks for.
        """
        planned, leased = decode(plan, WorkerPlan), decode(lease, Lease)
        engine_compute, weights_compute = ComputeThread(), ComputeThread("tidemill-weights")
        parts = await engine_compute.run(lambda: _parts(planned, files))
        reader = ObjectStoreReader(publisher)
        puller, base = (Puller(reader, weights_compute, clock=LoopClock()) for _ in range(2))
        self.worker = EngineWorker(
            parts.engine_over(parts.model, NOTHING_YET, prompt_tokens=planned.prompt_tokens),
            engine_compute,
            clock=LoopClock(),
            tick_s=parts.spec.engine.tick_s,
            worker_id=leased.worker_id,
            lease_id=leased.lease_id,
            heartbeat_s=parts.spec.fleet.heartbeat_s,
            source=PulledWeights(puller, parts.model, base=base if parts.spec.model.lora.enabled else None),
        )
        asyncio.get_running_loop().add_reader(signals(), self._on_signal)
        self._keep(self._end_when_forgotten(planned.orphan_s))
        if planned.cloud_notices:
            self._keep(tell_notices(self._on_notice, sigterm_grace_s=None))

    def _keep(self, job: Any) -> None:
        self.tasks.add(asyncio.create_task(job))

    def _on_signal(self) -> None:
        os.read(signals(), 64)
        self.served().notice(SIGTERM_GRACE_S)

    def _on_notice(self, notice: Notice) -> None:
        self.served().notice(notice.seconds_left)

    async def _end_when_forgotten(self, orphan_s: float) -> None:
        """Without a controller there is nothing to do; a machine that woke from a long sleep has been replaced."""
        while self.forgotten_s < orphan_s:  # noqa: ASYNC110 - what is waited for is that nothing happens
            await asyncio.sleep(orphan_s / 4)
        os._exit(0)


def _parts(plan: WorkerPlan, files: dict[str, bytes]) -> Parts:
    """As the trainer's, but for the weights."""
    spec = RunSpec.model_validate_json(plan.spec)
    torch.set_num_threads(plan.threads)
    require_reserved_gpus(spec.ray.worker_gpus, "ray.worker_gpus")
    device = choose_device(spec.trainer)
    with tempfile.TemporaryDirectory(prefix="tidemill-model-") as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        model = hollow_model(folder, spec.model, device=device, dtype=DTYPES[plan.dtype])
        return Parts(
            spec=spec,
            folder=folder,
            model=model,
            rollout_model=model,
            frozen=FrozenModels(device),
            codec=load_codec(folder),
            device=device,
            autocast=None,
            threads=plan.threads,
        )
