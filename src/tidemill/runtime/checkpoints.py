"""Checkpoints of a run: the trainer's state, in the store's atomic folders, off the controller's loop."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.core.protocols import Compute
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer


class TrainerCheckpoints:
    """Implements `core.protocols.Checkpoints`.

    Args:
        warn: told of a damaged checkpoint that was passed over.
    """

    def __init__(
        self, store: CheckpointStore, trainer: PolicyTrainer, compute: Compute, *, warn: Callable[[str], None]
    ) -> None:
        self._store, self._trainer, self._compute, self._warn = store, trainer, compute, warn

    async def save(self, step: int, *, score: float | None) -> None:
        def write() -> None:
            self._store.write(step, self._trainer.write_state, score=score, expected_bytes=self._trainer.state_bytes())

        await self._compute.run(write)

    async def restore_latest(self) -> int:
        return await self._compute.run(self._restore)

    def _restore(self) -> int:
        for finding in self._store.recover():
            self._warn(finding)
        latest = self._store.latest()
        for damaged in latest.passed_over:
            self._warn(f"checkpoint {damaged.path.name} was passed over: {damaged.reason}")
        if latest.checkpoint is None:
            return 0
        self._trainer.read_state(latest.checkpoint.path)
        return latest.checkpoint.step
