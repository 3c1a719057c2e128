"""A weight source that gets every tensor directly, for an engine that is always there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from tidemill.core.records import PolicyVersion, Pulled, TokenBuffer, WeightManifest
from tidemill.models.snapshots import Part
from tidemill.models.weight_stream import WeightStream

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
