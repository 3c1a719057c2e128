"""A weight source that hands pulled snapshots to the model of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, get_args

import msgspec
import torch
from transformers import PreTrainedModel

from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled
from tidemill.models.snapshots import Part, bind_snapshot, parameters_of, release_snapshot
from tidemill.models.weight_stream import WeightStream
from tidemill.weights.puller import Puller, PullerGroup
from tidemill.weights.snapshot import Snapshot
from tidemill.weights.store import BASE


@dataclass(frozen=True, slots=True)
class _FirstPull:
    """The first version of an adapter, pulled together with its base."""

    base: Pulled
    version: Pulled
    combined: Pulled


AnyPuller: TypeAlias = Puller | PullerGroup
"""Pulls from one publisher, or from every rank of a sharded one."""


class SnapshotUser(Protocol):
    """Computes with a snapshot."""

    def bind(self, snapshot: Snapshot, part: Part) -> None:
        """Use the snapshot. Its buffer stays unchanged until the next call."""

    def release(self, part: Part) -> None:
        """Stop using it."""


class EmptyModel:
    """A model whose parameters become views of the snapshot (see `models.snapshots`), or copies of streamed tensors.

    Args:
        drop_caches: frees the caches of its engine, which allocates them again when it needs them.
    """

    def __init__(self, model: PreTrainedModel, *, drop_caches: Callable[[], None] = lambda: None) -> None:
        self._model, self._drop_caches = model, drop_caches

    def bind(self, snapshot: Snapshot, part: Part) -> None:
        bind_snapshot(self._model, snapshot.manifest.tensors, snapshot.buffer, part=part)

    def release(self, part: Part) -> None:
        release_snapshot(self._model, part=part)

    @property
    def device_type(self) -> str:
        return self._model.device.type

    @torch.no_grad()
    def receive(self, tensors: WeightStream, part: Part) -> None:
        """Implements `rollout.streamed.StreamUser`, as do the next methods."""
        parameters = parameters_of(self._model, part)
        for name, tensor in tensors:
            if (parameter := parameters[name]).shape == tensor.shape:
                parameter.copy_(tensor)
            else:
                parameter.data = tensor.to(parameter.device, copy=True)

    def sleep(self) -> None:
        for part in get_args(Part):
            self.release(part)
        self._drop_caches()

    def wake_weights(self) -> None:
        """Nothing to do: `receive` allocates them."""

    def wake_caches(self) -> None:
        """Nothing to do: the engine allocates them at its next step."""


class PulledWeights:
    """Implements `core.protocols.WeightSource`: hands what `puller` prepared to `user`.

    Args:
        base: pulls the base of an adapter, once, with the first version; None if `user` has its base weights already.
    """

    def __init__(self, puller: AnyPuller, user: SnapshotUser, *, base: AnyPuller | None = None) -> None:
        self._puller, self._user, self._base = puller, user, base
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
            self._base.swap(first.base, lambda snapshot: self._user.bind(snapshot, "base"))
            self._base_digest = first.base.manifest.digest
            pulled = first.version
        self._puller.swap(pulled, lambda snapshot: self._user.bind(snapshot, "learned"))

    def close(self) -> None:
        """Release the snapshots; reference cycles may keep the model alive."""
        self._puller.close()
        self._user.release("learned")
        if self._base is not None:
            self._base.close()
            self._user.release("base")
