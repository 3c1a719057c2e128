"""Calls that reach every rank of a sharded trainer.

The ranks make the same decisions from the same groups, so every call goes to all and the first one's answer counts. A
rank that dies or is late ends the others: a collective operation cannot continue without it. The run resumes from its
checkpoint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, TypeAlias, TypeVar

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TrainerLost, UserError
from tidemill.extensions.registry import Extension, session_functions
from tidemill.runtime.cluster.ray_calls import Remote, trainer_lost
from tidemill.runtime.cluster.wire import Caller, signature
from tidemill.trainer.sharding import GroupRanks, join_ranks

S = TypeVar("S")
T = TypeVar("T")

RANK_S = 600.0
"""Deadline of a collective operation, and of the other ranks once the first has answered."""
START_S = 900.0
CAUSE_S = 5.0
"""After a failure, how long to wait for the answers of other ranks, which may tell its cause."""


StartRank: TypeAlias = Callable[Concatenate[Any, S, int, str, Sequence[Extension], ...], Awaitable[T]]
"""A method of a rank's actor: plan, index of the rank, meeting file, functions of the session, its critic if any."""


class RankGroup:
    """Implements `wire.Caller` for all ranks.

    Args:
        late_s: how long the other ranks may take once the first has answered.
    """

    def __init__(self, ranks: Sequence[Caller], *, late_s: float = RANK_S) -> None:
        self._ranks, self._late_s = ranks, late_s

    async def start(self, start: StartRank[S, T], plan: S, checkpoints: Path, *, critics: Sequence[object] = ()) -> T:
        """Start all ranks with this method of their actor; they meet at a file in the folder of the checkpoints.

        Args:
            critics: handle of the actor with each rank's part of the critic, if that is not in the ranks.
        """
        wire, functions = signature(start), session_functions()
        with meeting_file(checkpoints) as meeting:
            arguments = [
                wire.encode((plan, index, meeting, functions, *critics[index : index + 1]), {})
                for index in range(len(self._ranks))
            ]
            return await self._call_each(start.__name__, arguments, kind=wire.result, timeout_s=START_S)

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        """The answer of the first rank, when all have answered.

        Raises:
            TidemillError: what a rank raised, or that it died or was late; all ranks are ended.
        """
        return await self._call_each(method, [args] * len(self._ranks), kind=kind, timeout_s=timeout_s)

    async def _call_each(
        self, method: str, arguments: Sequence[Sequence[object]], *, kind: type[T], timeout_s: float
    ) -> T:
        calls = [
            asyncio.ensure_future(rank.call(method, *args, kind=kind, timeout_s=timeout_s))
            for rank, args in zip(self._ranks, arguments, strict=True)
        ]
        began_s = asyncio.get_running_loop().time()
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(calls, timeout=self._late_s, return_when=asyncio.FIRST_EXCEPTION)
            if all(call.done() and call.exception() is None for call in calls):
                return calls[0].result()
            await asyncio.wait(calls, timeout=CAUSE_S)
            raise self._failure(method, calls, asyncio.get_running_loop().time() - began_s)
        except BaseException:
            self.kill()
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _failure(self, method: str, calls: Sequence[asyncio.Future[T]], seconds: float) -> BaseException:
        """The error that explains the others: of a user, of a rank that died, that one is late, or any other."""
        raised = [error for call in calls if call.done() and (error := call.exception()) is not None]
        for kind in (UserError, TrainerLost):
            for error in raised:
                if isinstance(error, kind):
                    return error
        late = [index for index, call in enumerate(calls) if not call.done()]
        if raised and (not late or seconds < self._late_s):
            return raised[0]
        # Either the late rank hung, and the others gave up a collective operation; or another failed, and the late
        # one still waits for it in a collective operation. They look alike: both are named.
        cause = f"no answer to `{method}` within {self._late_s:.0f} s of the others"
        if raised:
            cause += f"; another rank raised: {raised[0]}"
        return trainer_lost(cause, "check its machine and its log", role=f"trainer's rank {late[0]}")

    def kill(self) -> None:
        """End all ranks now."""
        for rank in self._ranks:
            rank.kill()


@contextmanager
def meeting_file(folder: Path) -> Iterator[str]:
    """Path of a new file in a folder, which is created if needed; the file, and others whose names begin with its
    name, are removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f".ranks-{uuid.uuid4().hex}"
    try:
        yield str(path)
    finally:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)


def rank_remotes(handles: Sequence[Any]) -> list[Remote]:
    """Calls on the actors of all ranks, for a `RankGroup`."""
    return [
        Remote(handle, lost=partial(trainer_lost, role=f"trainer's rank {index}"))
        for index, handle in enumerate(handles)
    ]


def join_group(spec: RunSpec, device: torch.device, *, meeting: Path, index: int) -> GroupRanks:
    """Join the ranks of a run's trainer or critic, in the actor of one of them.

    Raises:
        UserError: automatic settings differ, so that the ranks would not compute the same microbatches.
    """
    ranks = join_ranks(
        meeting,
        size=spec.trainer.shards,
        index=index,
        device=device,
        timeout_s=RANK_S,
        one_machine=not spec.ray.address,
    )
    chosen = f"{spec.batch.microbatch_tokens} {spec.trainer.activation_checkpointing}"
    if len(set(ranks.gather(chosen.encode()))) > 1:
        raise UserError(
            "the GPUs of the ranks have different memory, so automatic settings differ",
            where="trainer.shards",
            hint="set batch.microbatch_tokens and trainer.activation_checkpointing",
        )
    return ranks
