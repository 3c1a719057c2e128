"""A reward model or the reference in an actor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch
from ray.exceptions import RayError

from tidemill.config.schema import RunSpec
from tidemill.core.errors import ReaderLost, TidemillError
from tidemill.core.protocols import Reader
from tidemill.core.records import Growth, Read, SampleId, TokenBuffer
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model
from tidemill.runtime.cluster.actors import Asked, asked, placed
from tidemill.runtime.cluster.ray_calls import Remote
from tidemill.runtime.cluster.wire import ReaderPlan, decode, encode, spec_to_send
from tidemill.runtime.compute import ComputeThread, choose_device, require_reserved_gpus
from tidemill.runtime.readers import Counted, LocalReader, reference_reader, reward_reader


class ReadingActor(Asked):
    """Base of the actors behind `reader.RayReader`."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None

    @asked
    async def grow(self, grown: bytes) -> None:
        self._reading().grow(decode(grown, list[Growth]))

    @asked
    async def read(self, sample_id: bytes, token_ids: bytes, prompt_tokens: int) -> Read:
        return await self._reading().read(decode(sample_id, SampleId), token_ids, prompt_tokens)

    @asked
    async def forget(self, sample_ids: bytes) -> None:
        self._reading().forget(decode(sample_ids, list[SampleId]))

    def _reading(self) -> Reader:
        if self.reader is None:
            raise TidemillError("this actor reads nothing")
        return self.reader


class ReaderActor(ReadingActor):
    """One model; it is killed, and another one started where it is lost."""

    @asked
    async def start_reader(self, plan: bytes) -> None:
        """Load the model.

        Raises:
            UserError: the model or the device cannot be had here.
        """
        planned = decode(plan, ReaderPlan)
        spec = RunSpec.model_validate_json(planned.spec)
        torch.set_num_threads(planned.threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        compute = ComputeThread("tidemill-reader")
        self.reader = await compute.run(lambda: _reader(spec, planned.reward_model, compute))


def _reader(spec: RunSpec, reward_model: str, compute: ComputeThread) -> LocalReader:
    if reward_model:
        return reward_reader(spec, Path(reward_model), compute)
    folder = resolve(spec.model, progress=lambda _: None)
    model = load_model(folder, device=choose_device(spec.trainer)).requires_grad_(False)
    return reference_reader(spec, model, compute)


LOAD_S = 900.0
READ_S = 600.0
AT_ONCE = 8
MOST_RESTARTS = 3
"""Without a single sample read in between."""

Again = Callable[[ReaderLost], Awaitable[Remote]]
"""Start an actor in place of one that is lost. Raises ReaderLost: there is none to be had."""


class RayReader(Counted):
    """Implements `core.protocols.Reader` over an actor that is a `ReadingActor`.

    A model that is lost has lost nothing but time: what was under way is asked of the next one.

    Args:
        again: None where the actor is another's, whose end is the run's.
        read_s: how long an actor may take for the `AT_ONCE` samples that it is asked for; then it is lost.
    """

    def __init__(self, remote: Remote, *, again: Again | None = None, read_s: float = READ_S) -> None:
        super().__init__()
        self._remote, self._again, self._read_s = remote, again, read_s
        self._room = asyncio.Semaphore(AT_ONCE)
        self._starting: asyncio.Task[None] | None = None
        self._restarts = 0  # since a sample was read

    def grow(self, grown: Sequence[Growth]) -> None:
        self._remote.ask("grow", encode(grown))

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        async with self._room:
            while True:
                remote = self._remote
                try:
                    read = await remote.call(
                        "read", encode(sample_id), token_ids, prompt_tokens, kind=Read, timeout_s=self._read_s
                    )
                    break
                except ReaderLost as lost:
                    await self._another(remote, lost)
        self._restarts = 0
        self.note(sample_id, read)
        return read

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        self._remote.ask("forget", encode(sample_ids))

    async def close(self) -> None:
        """Start no other; the actor is ended by who made it."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)

    async def _another(self, remote: Remote, lost: ReaderLost) -> None:
        """Another actor in place of `remote`; whoever notices first has it started, for all.

        Raises:
            ReaderLost: there is none, or one after the other died.
        """
        if self._remote is remote and self._starting is None:
            if self._again is None or self._restarts == MOST_RESTARTS:
                raise lost
            self._restarts += 1
            self._starting = asyncio.create_task(self._start(self._again, lost), name="a reader again")
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def _start(self, again: Again, lost: ReaderLost) -> None:
        self._remote = await again(lost)
        self._starting = None


class ReaderProcess:
    """The actor of one model in a place of its own, and those that follow it.

    Args:
        who: its role, in words.
        reward_model: the folder of its model; None for the reference.
        selector: labels of the nodes that it may be on.
        folder: of the policy's model.
        tell: told of a restart: its role, and the cause.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        who: str,
        reward_model: Path | None,
        folder: Path,
        selector: dict[str, str],
        tell: Callable[[str, str], None],
    ) -> None:
        self._spec, self._who, self._selector, self._tell = spec, who, selector, tell
        self._plan = ReaderPlan(
            spec=spec_to_send(spec, folder),
            threads=max(1, int(spec.placement.actor_cpus)),
            reward_model="" if reward_model is None else str(reward_model.resolve()),
        )
        self._place = AsyncExitStack()

    async def start(self) -> RayReader:
        """
        Raises:
            UserError: there is no room for it, or its model cannot be had there.
            ReaderLost: its process died.
        """
        return RayReader(await self._started(), again=self._follow)

    async def close(self) -> None:
        await self._place.aclose()

    async def _started(self) -> Remote:
        placement = self._spec.placement
        handle = await self._place.enter_async_context(
            placed(
                ReaderActor,
                cpus=placement.actor_cpus,
                gpus=placement.actor_gpus,
                selector=self._selector,
                who=self._who,
                keys=("placement.actor_cpus", "placement.actor_gpus"),
            )
        )
        remote = Remote(handle, gone=partial(reader_lost, self._who))
        await remote.call("start_reader", encode(self._plan), kind=type(None), timeout_s=LOAD_S)
        return remote

    async def _follow(self, lost: ReaderLost) -> Remote:
        self._tell(self._who, str(lost).splitlines()[0])
        await self._place.aclose()
        try:
            return await self._started()
        except (TidemillError, RayError) as error:
            raise ReaderLost(f"{lost}\n  and it does not start again: {error}") from error


def reader_lost(who: str, cause: str, hint: str) -> ReaderLost:
    advice = f"\n  {hint}" if hint else ""
    return ReaderLost(
        f"the {who} died: {cause}{advice}\n  run the same command again: the run goes on from its last checkpoint, "
        "with the samples it has"
    )
