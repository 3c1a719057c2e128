"""Published weights in Ray's object store: a node that has a version serves others by the store's own transfer."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayError

from tidemill.core.errors import WeightsError
from tidemill.weights.transport import Blob, Missing


class ObjectStoreTransport:
    """Implements `weights.transport.Transport` on the publisher's side; its process owns the objects, and knows their
    names."""

    zero_copy = False
    """On the publisher's own node a read copies nothing, elsewhere it is a transfer."""

    def __init__(self) -> None:
        self._refs: dict[str, ray.ObjectRef[Blob]] = {}

    async def put(self, name: str, blob: Blob) -> None:
        try:
            self._refs[name] = await asyncio.to_thread(ray.put, blob)
        except RayError as error:
            raise WeightsError(f"{name} does not fit into the object store: {error}") from error

    async def get(self, name: str) -> Blob:
        return await _fetched(name, self.refs(name))

    def refs(self, name: str) -> list[ray.ObjectRef[Blob]]:
        """The object of that name, in a list: bare, Ray would pass the object itself. Empty when there is none."""
        ref = self._refs.get(name)
        return [] if ref is None else [ref]

    async def delete(self, name: str) -> None:
        self._refs.pop(name, None)

    async def close(self) -> None:
        self._refs.clear()


class ObjectStoreReader:
    """Implements `weights.transport.Transport` for those who only read.

    Args:
        owner: an actor with a method `blob(name)` that returns what `ObjectStoreTransport.refs` does.
    """

    zero_copy = False

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    async def get(self, name: str) -> Blob:
        try:
            refs = await self._owner.blob.remote(name)
        except RayError as error:
            raise WeightsError(f"{name}: the publisher does not answer ({type(error).__name__})") from error
        return await _fetched(name, refs)

    async def put(self, name: str, blob: Blob) -> None:
        raise TypeError("a reader publishes nothing")

    async def delete(self, name: str) -> None:
        raise TypeError("a reader deletes nothing")

    async def close(self) -> None:
        """Nothing here is the reader's to delete."""


async def _fetched(name: str, refs: list[ray.ObjectRef[Blob]]) -> Blob:
    if not refs:
        raise Missing(f"there is no {name}")
    try:
        blob: Blob = await refs[0]
    except RayError as error:
        raise WeightsError(f"{name} cannot be read from the object store ({type(error).__name__})") from error
    return blob
