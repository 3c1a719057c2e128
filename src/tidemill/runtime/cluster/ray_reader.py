"""A reward model or the reference in an actor, which is restarted when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch
from ray.exceptions import RayError

from tidemill.config.schema import RunSpec
from tidemill.core.errors import ReaderLost, TidemillError
from tidemill.core.protocols import Reader
from tidemill.core.records import Read, Record, SampleId, TokenBuffer
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model
from tidemill.runtime.cluster.ray_calls import (
    ActorResources,
    Remote,
    lost_message,
    placed,
    require_reserved_gpus,
    spec_to_send,
)
from tidemill.runtime.cluster.wire import AsyncActor, asks, invoke, served, serves
from tidemill.runtime.compute import ComputeThread, choose_device
from tidemill.runtime.readers import LocalReader, ReadCounter, reference_reader, reward_reader


class ReaderPlan(Record):
    """Arguments of `ReaderActor.start_reader`."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    reward_model: str = ""  # its folder; empty for the reference


class ReadingActor(AsyncActor):
    """Base of actors that serve a `RayReader`."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None

    receive = serves(Reader.receive, "reader")
    read = serves(Reader.read, "reader")
    forget = serves(Reader.forget, "reader")


class ReaderActor(ReadingActor):
    """An actor with one reader."""

    @served
    async def start_reader(self, plan: ReaderPlan) -> None:
        """Load the model.

        Raises:
            UserError: the model or the device cannot be used.
        """
        spec = RunSpec.model_validate_json(plan.spec)
        torch.set_num_threads(plan.threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        compute = ComputeThread("tidemill-reader")

        def load() -> LocalReader:
            if plan.reward_model:
                return reward_reader(spec, Path(plan.reward_model), compute)
            folder = resolve(spec.model, progress=lambda _: None)
            model = load_model(folder, device=choose_device(spec.trainer)).requires_grad_(False)
            return reference_reader(spec, model, compute)

        self.reader = await compute.run(load)


LOAD_S = 900.0
READ_S = 600.0
MAX_READS = 8
"""Samples that an actor reads at the same time."""
MAX_RESTARTS = 3
"""Consecutive restarts without a sample being read."""

Restart = Callable[[ReaderLost], Awaitable[Remote]]
"""Starts a replacement for a lost actor. Raises ReaderLost: it cannot be started."""


class RayReader(ReadCounter):
    """Implements `core.protocols.Reader` with a `ReadingActor`.

    A lost actor is replaced; samples that were being read are read again.

    Args:
        restart: None if the actor also trains, so that its end is the end of the run.
        read_s: deadline for reading `MAX_READS` samples; after it the actor counts as lost.
    """

    def __init__(self, remote: Remote, *, restart: Restart | None = None, read_s: float = READ_S) -> None:
        super().__init__()
        self._remote, self._restart, self._read_s = remote, restart, read_s
        self._slots = asyncio.Semaphore(MAX_READS)
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = 0  # since a sample was read

    receive = asks(Reader.receive)
    forget = asks(Reader.forget)

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        async with self._slots:
            while True:
                remote = self._remote
                try:
                    read = await invoke(remote, self._read_s, Reader.read, sample_id, token_ids, prompt_tokens)
                    break
                except ReaderLost as error:
                    await self._replace(remote, error)
        self._restarts = 0
        self.add(sample_id, read)
        return read

    async def close(self) -> None:
        """Stop a restart; the code that started the actor ends it."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)

    async def _replace(self, remote: Remote, error: ReaderLost) -> None:
        """Wait for the replacement of `remote`; the first caller starts it.

        Raises:
            ReaderLost: it cannot be started, or too many died in a row.
        """
        if self._remote is remote and self._restarting is None:
            if self._restart is None or self._restarts == MAX_RESTARTS:
                raise error
            self._restarts += 1
            self._restarting = asyncio.create_task(self._start(self._restart, error), name="reader restart")
        if self._restarting is not None:
            await asyncio.shield(self._restarting)

    async def _start(self, restart: Restart, error: ReaderLost) -> None:
        self._remote = await restart(error)
        self._restarting = None


class ReaderProcess:
    """Starts the actor of one model, and its replacements.

    Args:
        role: for messages.
        reward_model: folder of the model; None for the reference.
        selector: labels of the nodes it may run on.
        folder: folder of the policy's model.
        on_restart: called with the role and the cause.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        role: str,
        reward_model: Path | None,
        folder: Path,
        selector: dict[str, str],
        on_restart: Callable[[str, str], None],
    ) -> None:
        self._placement, self._role, self._selector, self._on_restart = spec.placement, role, selector, on_restart
        self._plan = ReaderPlan(
            spec=spec_to_send(spec, folder),
            threads=max(1, int(spec.placement.actor_cpus)),
            reward_model="" if reward_model is None else str(reward_model.resolve()),
        )
        self._actor = AsyncExitStack()

    async def start(self) -> RayReader:
        """
        Raises:
            UserError: no node has room for it, or its model cannot be loaded.
            ReaderLost: its process died.
        """
        return RayReader(await self._start_actor(), restart=self._replace)

    async def close(self) -> None:
        await self._actor.aclose()

    async def _start_actor(self) -> Remote:
        resources = ActorResources(self._placement.actor_cpus, self._placement.actor_gpus, "placement.actor")
        (handle,) = await self._actor.enter_async_context(placed(ReaderActor, self._role, resources, self._selector))
        remote = Remote(handle, lost=partial(reader_lost, self._role))
        await invoke(remote, LOAD_S, ReaderActor.start_reader, self._plan)
        return remote

    async def _replace(self, error: ReaderLost) -> Remote:
        self._on_restart(self._role, str(error).splitlines()[0])
        await self._actor.aclose()
        try:
            return await self._start_actor()
        except (TidemillError, RayError) as second:
            raise ReaderLost(f"{error}\n  and it cannot be restarted: {second}") from second


def reader_lost(role: str, cause: str, hint: str) -> ReaderLost:
    return ReaderLost(lost_message(role, cause, hint))
