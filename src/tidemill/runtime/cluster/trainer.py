"""The trainer in another process, as the controller sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tidemill.core.buffers import LogprobBuffer
from tidemill.core.records import Completion, Group, PolicyVersion, StepMetrics, WeightManifest
from tidemill.runtime.cluster.plan import Committed, Restored, Started
from tidemill.runtime.cluster.remote import Remote
from tidemill.runtime.cluster.wire import encode

UNTIL_GIVEN_UP = math.inf
"""The loop has deadlines of its own for what the trainer does, and cancels."""


class RayTrainer:
    """Implements `core.protocols.Trainer`."""

    def __init__(self, remote: Remote, started: Started) -> None:
        self._remote, self._version = remote, started.version

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def accumulate(self, group: Group) -> None:
        await self._remote.call("accumulate", encode(group), kind=type(None), timeout_s=UNTIL_GIVEN_UP)

    async def commit(self, step: int) -> StepMetrics:
        committed = await self._remote.call("commit", step, kind=Committed, timeout_s=UNTIL_GIVEN_UP)
        self._version = committed.version
        return committed.metrics

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._remote.call(
            "logprobs", encode(completions), kind=list[LogprobBuffer], timeout_s=UNTIL_GIVEN_UP
        )

    def restored(self, version: PolicyVersion) -> None:
        self._version = version


class RayCheckpoints:
    """Implements `core.protocols.Checkpoints` for the trainer's process; the folder must be one that it sees.

    Args:
        warn: told of a damaged checkpoint that was passed over.
    """

    def __init__(self, remote: Remote, trainer: RayTrainer, *, warn: Callable[[str], None]) -> None:
        self._remote, self._trainer, self._warn = remote, trainer, warn

    async def save(self, step: int, *, score: float | None) -> None:
        await self._remote.call("save", step, score, kind=type(None), timeout_s=UNTIL_GIVEN_UP)

    async def restore_latest(self) -> int:
        restored = await self._remote.call("restore_latest", kind=Restored, timeout_s=UNTIL_GIVEN_UP)
        for warning in restored.warnings:
            self._warn(warning)
        self._trainer.restored(restored.version)
        return restored.step


class RayPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        return await self._remote.call("publish", encode(version), kind=WeightManifest, timeout_s=UNTIL_GIVEN_UP)

    async def close(self) -> None:
        """The objects end with the trainer's process."""
