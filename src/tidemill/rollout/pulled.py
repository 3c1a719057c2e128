"""A weight source that binds pulled snapshots to an empty model."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from transformers import PreTrainedModel

from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled
from tidemill.models.snapshots import Part, bind_snapshot, release_snapshot
from tidemill.weights.puller import Puller
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import BASE


@dataclass(frozen=True, slots=True)
class _FirstPull:
    """The first version of an adapter, pulled together with its base."""

    base: Pulled
    version: Pulled
    combined: Pulled


class PulledWeights:
    """Implements `core.protocols.WeightSource`: binds what `puller` prepared to `model` (see `models.snapshots`).

    Args:
        base: pulls the base of an adapter, once, with the first version; None if `model` has its base weights already.
    """

    def __init__(self, puller: Puller, model: PreTrainedModel, *, base: Puller | None = None) -> None:
        self._puller, self._model, self._base = puller, model, base
        self._first: _FirstPull | None = None
        self._base_digest = ""

    async def prepare(self, version: PolicyVersion) -> Pulled:
        self._first = None
        pulled = await self._puller.prepare(version)
        if self._base is None or pulled.manifest.base_digest == self._base_digest:
            return pulled
        base = await self._base.prepare(BASE)
        if self._base_digest or base.manifest.digest != pulled.manifest.base_digest:
            raise WeightsError(
                f"version {pulled.manifest.version.number} is an adapter of base {pulled.manifest.base_digest}, "
                f"this worker has base {self._base_digest or base.manifest.digest}"
            )
        nbytes, pull_s = pulled.nbytes + base.nbytes, pulled.pull_s + base.pull_s
        self._first = _FirstPull(base, pulled, msgspec.structs.replace(pulled, nbytes=nbytes, pull_s=pull_s))
        return self._first.combined

    def swap(self, pulled: Pulled) -> None:
        first, self._first = self._first, None
        if first is not None and self._base is not None and pulled is first.combined:
            self._base.swap(first.base, lambda snapshot: self._bind(snapshot, part="base"))
            self._base_digest = first.base.manifest.digest
            pulled = first.version
        self._puller.swap(pulled, self._bind)

    def _bind(self, snapshot: Snapshot, part: Part = "learned") -> None:
        bind_snapshot(self._model, snapshot.manifest.tensors, snapshot.buffer, part=part)

    def close(self) -> None:
        """Release the snapshots; reference cycles may keep the model alive."""
        self._puller.close()
        release_snapshot(self._model)
        if self._base is not None:
            self._base.close()
            release_snapshot(self._model, part="base")
