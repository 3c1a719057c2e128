"""Weights that come by pull, under a model that has none of its own."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from transformers import PreTrainedModel

from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled, WeightManifest
from tidemill.models.snapshots import bind_snapshot, release_snapshot
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import BASE


@dataclass(frozen=True, slots=True)
class _First:
    """The first version of an adapter, prepared together with what it lies on."""

    base: Pulled
    version: Pulled
    both: Pulled


class PulledWeights:
    """Implements `core.protocols.WeightSource`: what `puller` prepared is bound to `model` (see `models.snapshots`).

    Args:
        base: pulls what lies under an adapter, once, with the first version; None where `model` has it already.
    """

    def __init__(self, puller: Puller, model: PreTrainedModel, *, base: Puller | None = None) -> None:
        self._puller, self._model, self._base = puller, model, base
        self._first: _First | None = None
        self._base_digest = ""

    async def prepare(self, version: PolicyVersion) -> Pulled:
        self._first = None
        pulled = await self._puller.prepare(version)
        if self._base is None or pulled.manifest.base_digest == self._base_digest:
            return pulled
        base = await self._base.prepare(BASE)
        self._check_same(base.manifest, pulled.manifest)
        nbytes, pull_s = pulled.nbytes + base.nbytes, pulled.pull_s + base.pull_s
        self._first = _First(base, pulled, msgspec.structs.replace(pulled, nbytes=nbytes, pull_s=pull_s))
        return self._first.both

    def swap(self, pulled: Pulled) -> None:
        first, self._first = self._first, None
        if first is not None and self._base is not None and pulled is first.both:
            self._base.swap(first.base, self._bind_base)
            pulled = first.version
        self._puller.swap(pulled, self._bind)

    def close(self) -> None:
        """The model, which may live on in reference cycles, keeps no snapshot."""
        self._puller.close()
        release_snapshot(self._model)
        if self._base is not None:
            self._base.close()
            release_snapshot(self._model, part="base")

    def _check_same(self, base: WeightManifest, manifest: WeightManifest) -> None:
        if self._base_digest or base.digest != manifest.base_digest:
            raise WeightsError(f"version {manifest.version.number} is an adapter of another base than is at hand")

    def _bind(self, snapshot: Snapshot) -> None:
        bind_snapshot(self._model, snapshot.manifest.tensors, snapshot.buffer)

    def _bind_base(self, snapshot: Snapshot) -> None:
        bind_snapshot(self._model, snapshot.manifest.tensors, snapshot.buffer, part="base")
        self._base_digest = snapshot.manifest.digest
