"""Weight sources of engines: snapshots that are pulled, or a stream of tensors for an engine that is always there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, get_args

import msgspec
import torch
from transformers import PreTrainedModel

from tidemill.core.errors import WeightsError
from tidemill.core.records import PolicyVersion, Pulled, TokenBuffer, WeightManifest
from tidemill.models.snapshots import Part, Rows, bind_ranks, bind_snapshot, parameters_of, release_snapshot
from tidemill.models.weight_stream import WeightStream
from tidemill.weights.puller import Puller, PullerGroup
from tidemill.weights.snapshot import MASK64, Snapshot, joined_part_sums, part_ranges
from tidemill.weights.store import BASE

AnyPuller: TypeAlias = Puller | PullerGroup
"""Pulls from one publisher, or from every rank of a sharded one."""


class SnapshotUser(Protocol):
    """Computes with a snapshot."""

    def bind(self, parts: Sequence[Snapshot], part: Part) -> None:
        """Use a version: one snapshot, or one for each rank of the trainer, with consecutive rows of every tensor.

        Their buffers stay unchanged until the next call.
        """

    def release(self, part: Part) -> None:
        """Stop using it."""


def rows_of(parts: Sequence[Snapshot]) -> list[Rows]:
    """The snapshots as `models.snapshots` takes them."""
    return [(each.manifest.tensors, each.buffer) for each in parts]


class EmptyModel:
    """A model whose parameters become views of the snapshot (see `models.snapshots`), or copies of the rows of several
    ranks or of streamed tensors.

    Args:
        drop_caches: frees the caches of its engine, which allocates them again when it needs them.
    """

    def __init__(self, model: PreTrainedModel, *, drop_caches: Callable[[], None] = lambda: None) -> None:
        self._model, self._drop_caches = model, drop_caches

    def bind(self, parts: Sequence[Snapshot], part: Part) -> None:
        if len(parts) == 1:
            bind_snapshot(self._model, parts[0].manifest.tensors, parts[0].buffer, part=part)
        else:
            bind_ranks(self._model, rows_of(parts), part=part)

    def release(self, part: Part) -> None:
        release_snapshot(self._model, part=part)

    @torch.no_grad()
    def part_sum(self, part: Part, number: int) -> int:
        """One of the `part_sums` of the snapshot in use, from the memory that is computed with."""
        flat = [each.detach().reshape(-1).view(torch.uint8) for each in parameters_of(self._model, part).values()]
        sums = [torch.zeros((), dtype=torch.int64, device=self._model.device)]
        for tensor, start, end in part_ranges([len(each) for each in flat], number):
            words = start + (end - start) // 8 * 8
            sums.append(flat[tensor][start:words].view(torch.int64).sum())
            if words < end:
                padded = torch.nn.functional.pad(flat[tensor][words:end], (0, words + 8 - end))
                sums.append(padded.view(torch.int64).sum())
        return int(torch.stack(sums).sum()) & MASK64

    @property
    def device_type(self) -> str:
        return self._model.device.type

    @torch.no_grad()
    def receive(self, tensors: WeightStream, part: Part) -> None:
        """Implements `StreamUser`, as do the next methods."""
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
        self._first: tuple[Pulled, Pulled] | None = None  # of an adapter, until it is in use: its base and version
        self._base_digest = ""
        self._sums: dict[Part, tuple[int, ...]] = {}  # of the published bytes in use

    @property
    def expected(self) -> tuple[int, ...]:
        """Implements `rollout.worker.WeightsCheck`, as does `part_sum`; empty for an engine that hides its weights."""
        return tuple(sum(parts) & MASK64 for parts in zip(*self._sums.values(), strict=True))

    def part_sum(self, number: int) -> int:
        assert isinstance(self._user, EmptyModel)
        return sum(self._user.part_sum(part, number) for part in self._sums) & MASK64

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
        self._first = base, pulled
        return msgspec.structs.replace(pulled, nbytes=pulled.nbytes + base.nbytes, pull_s=pulled.pull_s + base.pull_s)

    def swap(self, pulled: Pulled) -> None:
        first, self._first = self._first, None
        if first is not None and self._base is not None and pulled.manifest is first[1].manifest:
            base, pulled = first
            self._base.swap(base, lambda parts: self._bind(parts, "base"))
            self._base_digest = base.manifest.digest
        self._puller.swap(pulled, lambda parts: self._bind(parts, "learned"))

    def _bind(self, parts: Sequence[Snapshot], part: Part) -> None:
        self._user.bind(parts, part)
        if isinstance(self._user, EmptyModel):
            # A rank published the sums of its own rows, which are divided otherwise.
            published = parts[0].manifest.part_sums if len(parts) == 1 else ()
            self._sums[part] = published or joined_part_sums(parts)

    def close(self) -> None:
        """Release the snapshots; reference cycles may keep the model alive."""
        self._puller.close()
        self._user.release("learned")
        if self._base is not None:
            self._base.close()
            self._user.release("base")


Streams: TypeAlias = Callable[[PolicyVersion], Iterator[tuple[Part, WeightStream]]]
"""The parts of a version. Raises WeightsError: the trainer has another version, or does not send."""


class StreamUser(Protocol):
    """An engine that takes weights tensor by tensor, and gives its memory back while it sleeps."""

    def receive(self, tensors: WeightStream, part: Part) -> None:
        """Copy all tensors into the engine's weights, one after the other."""

    def sleep(self) -> None:
        """Free weights and caches. No sample may be running."""

    def wake_weights(self) -> None:
        """Allocate the weights again; `receive` must follow."""

    def wake_caches(self) -> None:
        """Allocate the caches again; samples may then run."""

    def release(self, part: Part) -> None:
        """Stop using the weights."""


class StreamedWeights:
    """Implements `core.protocols.WeightSource`. A version is received between two tokens, never ahead.

    If that fails the engine has no usable weights, and the run ends: it is resumed from its checkpoint.
    """

    def __init__(self, user: StreamUser, streams: Streams, *, probe_ids: TokenBuffer) -> None:
        self._user, self._streams, self._probe_ids = user, streams, probe_ids
        self._parts: set[Part] = set()
        self._asleep = False

    async def prepare(self, version: PolicyVersion) -> Pulled:
        manifest = WeightManifest(
            version=version, digest=version.digest, nbytes=0, tensors=(), probe_ids=self._probe_ids
        )
        return Pulled(manifest=manifest, nbytes=0, full=True, pull_s=0.0, retries=0)

    def swap(self, pulled: Pulled) -> None:
        """Wake the engine if it sleeps, and receive the version.

        Raises:
            WeightsError: the version did not arrive whole.
        """
        if self._asleep:
            self._user.wake_weights()
        for part, stream in self._streams(pulled.manifest.version):
            self._user.receive(stream, part)
            self._parts.add(part)
        if self._asleep:
            self._user.wake_caches()
        self._asleep = False

    def sleep(self) -> None:
        """Free the engine's memory until the next `swap`."""
        if not self._asleep:
            self._user.sleep()
            self._asleep = True

    def close(self) -> None:
        for part in self._parts:
            self._user.release(part)
