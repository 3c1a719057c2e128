"""Workers simulated in the trainer's process: each an engine of its own over published weights."""

from __future__ import annotations

import gc
import weakref

from transformers import PreTrainedModel

from tidemill.core.clock import Clock
from tidemill.core.protocols import Compute
from tidemill.core.records import Lease, PolicyVersion
from tidemill.rollout.pulled import PulledWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.parts import Parts
from tidemill.weights.puller import Puller
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
        parts: Parts,
        store: WeightStore,
        *,
        compute: Compute,
        weights_compute: Compute,
        clock: Clock,
        prompt_tokens: int,
    ) -> None:
        self._parts, self._store, self._clock, self._prompt_tokens = parts, store, clock, prompt_tokens
        self._compute, self._weights_compute = compute, weights_compute
        self._workers: weakref.WeakSet[EngineWorker] = weakref.WeakSet()  # one that was killed and dropped frees memory
        self._frozen = False

    async def start(self, lease: Lease) -> EngineWorker:
        parts = self._parts
        model = await self._weights_compute.run(self._empty_twin)
        puller = Puller(self._store.transport, self._weights_compute, clock=self._clock, pinned=self._store.pinned)
        worker = EngineWorker(
            parts.engine_over(model, NOTHING_YET, prompt_tokens=self._prompt_tokens),
            self._compute,
            clock=self._clock,
            tick_s=parts.spec.engine.tick_s,
            worker_id=lease.worker_id,
            lease_id=lease.lease_id,
            heartbeat_s=parts.spec.fleet.heartbeat_s,
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
        return self._parts.rollout_twin()

    async def close(self) -> None:
        for worker in list(self._workers):
            worker.kill()
        if self._frozen:
            gc.unfreeze()
