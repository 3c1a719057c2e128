"""The transports of weights on Ray: the publisher's end in the trainer's process, and the readers' in the workers."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError

from tidemill.config.weights import WeightsConfig
from tidemill.core.errors import UserError, WeightsError
from tidemill.core.protocols import Compute, LoopClock
from tidemill.core.records import Record
from tidemill.runtime.cluster.wire import read_answer
from tidemill.weights.delta import Threads
from tidemill.weights.http_reader import HttpReader
from tidemill.weights.node_folder import NodeFolder, NodePuller
from tidemill.weights.puller import Puller, PullerGroup
from tidemill.weights.snapshot import Blob, BlobSource, Missing

ADDRESS_S = 30.0


class WeightsAddress(Record):
    """Of a server of weights."""

    url: str
    token: str


class ObjectStoreTransport:
    """Implements `weights.snapshot.Transport` for the publisher, whose process owns the objects."""

    zero_copy = False
    """A read copies nothing on the publisher's node, but is a transfer on others."""
    address: WeightsAddress | None = None

    def __init__(self) -> None:
        self._refs: dict[str, ray.ObjectRef[Blob]] = {}

    async def put(self, name: str, blob: Blob) -> None:
        try:
            self._refs[name] = await asyncio.to_thread(ray.put, blob)
        except RayError as error:
            raise WeightsError(f"{name} does not fit into the object store: {error}") from error

    async def get(self, name: str) -> Blob:
        return await _fetch(name, self.refs(name))

    def refs(self, name: str) -> list[ray.ObjectRef[Blob]]:
        """The reference in a list, because Ray would replace a bare one by its object; empty for an unknown name."""
        ref = self._refs.get(name)
        return [] if ref is None else [ref]

    async def delete(self, name: str) -> None:
        self._refs.pop(name, None)

    async def close(self) -> None:
        self._refs.clear()


class ObjectStoreReader:
    """Implements `weights.snapshot.BlobSource`.

    Args:
        owner: an actor whose method `blob(name)` returns `ObjectStoreTransport.refs(name)`.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    async def get(self, name: str) -> Blob:
        try:
            refs = await self._owner.blob.remote(name)
        except RayError as error:
            raise WeightsError(f"{name}: the publisher does not answer ({type(error).__name__})") from error
        return await _fetch(name, refs)

    async def close(self) -> None:
        """Nothing to do: the publisher owns the objects."""


async def _fetch(name: str, refs: list[ray.ObjectRef[Blob]]) -> Blob:
    if not refs:
        raise Missing(f"there is no {name}")
    try:
        blob: Blob = await refs[0]
    except RayError as error:
        raise WeightsError(f"{name} cannot be read from the object store ({type(error).__name__})") from error
    return blob


def serving_token(config: WeightsConfig) -> str:
    """The token in this machine's environment; "" without one.

    Raises:
        UserError: it is needed and not set.
    """
    token = os.environ.get(config.token_env, "")
    if config.beyond_loopback and not token:
        what, hint = "weights would be served beyond this machine without a token", f"set {config.token_env}"
        raise UserError(what, where="weights.token_env", hint=hint)
    return token


class ServedTransport:
    """Implements `weights.snapshot.Transport` for the publisher, with a server in its process.

    Raises:
        UserError: the address cannot be used, or needs a token that is not set.
    """

    zero_copy = False

    def __init__(self, config: WeightsConfig) -> None:
        from tidemill.weights.http_server import HttpTransport  # starlette and uvicorn are in the extra `cluster`

        token = serving_token(config) or secrets.token_hex(32)
        served = HttpTransport(config.host, config.port, token)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.put, self.get, self.delete, self.close = served.put, served.get, served.delete, served.close
        self.address = WeightsAddress(url=config.url or f"http://{host}:{served.port}", token=token)


PublisherTransport: TypeAlias = ObjectStoreTransport | ServedTransport


async def open_readers(config: WeightsConfig, publishers: Sequence[Any]) -> list[BlobSource]:
    """The readers' ends, one for each publisher.

    Raises:
        WeightsError: a publisher does not say where it serves weights.
    """
    if config.transport != "http":
        return [ObjectStoreReader(publisher) for publisher in publishers]
    readers: list[BlobSource] = []
    for publisher in publishers:
        try:
            async with asyncio.timeout(ADDRESS_S):
                answer = await publisher.weights_address.remote()
        except (TimeoutError, RayError) as error:
            raise WeightsError(f"the trainer does not say where it serves weights ({type(error).__name__})") from error
        address = read_answer(answer, WeightsAddress | None)  # type: ignore[arg-type]
        if address is None:
            raise WeightsError("the trainer does not serve weights")
        readers.append(HttpReader(address.url, address.token))
    return readers


def open_puller(
    config: WeightsConfig, readers: Sequence[BlobSource], compute: Compute, *, session: str, shares: bool
) -> Puller | PullerGroup:
    """A puller of the versions that the readers' publishers publish together.

    Args:
        readers: of all ranks of the trainer, in their order.
        session: the same for all workers of a run.
        shares: with the workers of the same machine; see `RunSpec.shares_snapshots`.
    """

    def puller(rank: int, reader: BlobSource) -> Puller:
        threads = Threads(config.threads)
        if shares:
            folder = NodeFolder(session, rank=rank)
            return NodePuller(reader, compute, clock=LoopClock(), threads=threads, folder=folder)
        return Puller(reader, compute, clock=LoopClock(), threads=threads)

    pullers = [puller(rank, reader) for rank, reader in enumerate(readers)]
    return pullers[0] if len(pullers) == 1 else PullerGroup(pullers)
