"""Weights that come by pull, under a model that has none of its own."""

from __future__ import annotations

from transformers import PreTrainedModel

from tidemill.core.records import PolicyVersion, Pulled
from tidemill.models.snapshots import bind_snapshot, release_snapshot
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Snapshot


class PulledWeights:
    """Implements `core.protocols.WeightSource`: what `puller` prepared is bound to `model` (see `models.snapshots`)."""

    def __init__(self, puller: Puller, model: PreTrainedModel) -> None:
        self._puller, self._model = puller, model

    async def prepare(self, version: PolicyVersion) -> Pulled:
        return await self._puller.prepare(version)

    def swap(self, pulled: Pulled) -> None:
        self._puller.swap(pulled, self._bind)

    def close(self) -> None:
        """The model, which may live on in reference cycles, keeps no snapshot."""
        self._puller.close()
        release_snapshot(self._model)

    def _bind(self, snapshot: Snapshot) -> None:
        bind_snapshot(self._model, snapshot.manifest.tensors, snapshot.buffer)
