"""The ledger: the truth about samples, journalled message by message, and rebuilt from the journal after a kill.

Memory is changed first and the journal awaited before anybody acts on the change. That is safe because a journal keeps
the order of its appends: what a kill loses is always the newest part of the story, never a piece out of its middle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tidemill.controller.batch import Batch, BatchPlan
from tidemill.controller.entries import (
    Accepted,
    AnyEntry,
    EvalResult,
    Evaluated,
    Opened,
    Rewarded,
    accepted,
    decode,
    encode,
)
from tidemill.controller.samples import IllegalTransition, Sample, SampleState
from tidemill.core.errors import UserError
from tidemill.core.protocols import Journal
from tidemill.core.records import Prompt, Reward, Trajectory, WorkerReport

OUTLIVES_CHECKPOINTS = 2**62
"""The journal step of entries that no checkpoint makes superfluous."""


class Ledger:
    """Samples of the open batches and what is known of earlier evaluations.

    `journal` None keeps nothing: for evaluations, whose samples are cheaper to make again than to store.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._stored: dict[int, list[bytes]] = {}  # batches of an earlier process, decoded when they are opened
        self.evaluations: dict[int, Evaluated] = {}  # by step, the newest of each
        self._covered = 0  # the step of the newest checkpoint

    async def load(self, *, after_step: int) -> int:
        """Read the journal of a run whose newest checkpoint is of `after_step`; returns how many stored batches follow.

        Batches that do not follow the checkpoint without a hole belong to a history that did not survive and are
        forgotten.

        Raises:
            UserError: the journal cannot be read.
        """
        stored: defaultdict[int, list[bytes]] = defaultdict(list)
        for step, blob in await self._journal.load() if self._journal else ():
            stored[step].append(blob)
        for blob in stored.pop(OUTLIVES_CHECKPOINTS, ()):
            entry = _decoded(blob, OUTLIVES_CHECKPOINTS)
            if isinstance(entry, Evaluated):
                self.evaluations[entry.result.step] = entry
        self._covered = following = after_step
        while following + 1 in stored:
            following += 1
        self._stored = {step: stored[step] for step in range(after_step + 1, following + 1)}
        superfluous = after_step if self._stored else max(stored, default=after_step)
        if self._journal and stored:
            await self._journal.prune(superfluous)
        return len(self._stored)

    async def open(self, plan: BatchPlan, prompts: Sequence[tuple[int, Prompt]], *, version_number: int) -> Batch:
        """Begin a batch, or go on with it where the journal ends.

        Finished and scored samples are kept, partial ones wait with their tokens, the others wait empty.

        Raises:
            UserError: the journal holds another batch for this step, or entries that make no sense.
        """
        batch = Batch(plan, prompts, version_number=version_number)
        blobs = self._stored.pop(plan.step, None)
        if blobs is None:
            await self._append(plan.step, [encode(Opened(plan))])
            return batch
        for blob in blobs:
            entry = _decoded(blob, plan.step)
            if isinstance(entry, Opened):
                _same_plan(entry.plan, plan)
                batch = Batch(plan, prompts, version_number=version_number)
            elif isinstance(entry, Evaluated):
                self.evaluations[plan.step] = entry
            else:
                _replay(batch, entry)
        for sample in batch.in_state(SampleState.RUNNING):
            sample.move(SampleState.WAITING)
        batch.recovered()
        return batch

    async def accept(self, batch: Batch, reports: Sequence[WorkerReport]) -> list[Sample]:
        """Apply every delta that fits and make it durable; returns the samples that finished and may be acted on."""
        blobs: list[bytes] = []
        finished: list[Sample] = []
        for report in reports:
            applied = []
            for delta in report.deltas:
                sample = batch.apply(delta)
                if sample is not None:
                    applied.append((sample.ordinal, delta))
                    if delta.finish in ("stop", "length"):
                        finished.append(sample)
            entry = accepted(applied)
            if entry is not None:
                blobs.append(encode(entry))
        await self._append(batch.plan.step, blobs)
        return finished

    async def reward(self, batch: Batch, rewards: Sequence[tuple[Sample, Reward]]) -> None:
        """Note rewards and make them durable; only then may their samples be trained on."""
        for sample, reward in rewards:
            batch.score(sample, reward)
        if rewards:
            entry = Rewarded(tuple((sample.ordinal, reward) for sample, reward in rewards))
            await self._append(batch.plan.step, [encode(entry)])

    async def evaluated(self, result: EvalResult, samples: Sequence[Trajectory]) -> None:
        """Remember an evaluation: its figures for ever, its samples until a checkpoint covers its step.

        (A run resumed from an earlier step writes its samples files after that step again.)
        """
        self.evaluations[result.step] = Evaluated(result)
        if result.step > self._covered:
            await self._append(result.step, [encode(Evaluated(result, tuple(samples)))])
        await self._append(OUTLIVES_CHECKPOINTS, [encode(Evaluated(result))])

    async def prune(self, through_step: int) -> None:
        """Forget batches that a durable checkpoint has learned from."""
        self._covered = through_step
        if self._journal is not None:
            await self._journal.prune(through_step)

    async def _append(self, step: int, blobs: Sequence[bytes]) -> None:
        if self._journal is not None and blobs:
            await self._journal.append(step, blobs)


def _decoded(blob: bytes, step: int) -> AnyEntry:
    try:
        return decode(blob)
    except msgspec.DecodeError as error:
        raise _unreadable(step, str(error)) from error


def _unreadable(step: int, why: str) -> UserError:
    return UserError(
        f"the ledger's entries of step {step} make no sense ({why})",
        where="ledger.sqlite",
        cure="delete ledger.sqlite: the run goes on from its last checkpoint and generates later samples again",
    )


def _same_plan(stored: BatchPlan, plan: BatchPlan) -> None:
    different = [name for name in BatchPlan.__struct_fields__ if getattr(stored, name) != getattr(plan, name)]
    if different:
        raise UserError(
            f"step {plan.step} was begun with another batch (different: {', '.join(different)})",
            where="ledger.sqlite",
            cure="resume with the task, batch, sampling and seed settings the run was started with; or delete "
            "ledger.sqlite to generate the samples since the last checkpoint again",
        )


def _replay(batch: Batch, entry: AnyEntry) -> None:
    """Apply a stored entry.

    Raises:
        UserError: it does not fit what came before it.
    """
    step = batch.plan.step
    try:
        if isinstance(entry, Accepted):
            for piece in entry.pieces:
                sample = batch.samples[piece.ordinal]
                if sample.state is SampleState.WAITING:
                    sample.move(SampleState.RUNNING)
                if sample.state is not SampleState.RUNNING or piece.start != sample.length:
                    raise _unreadable(step, f"sample {piece.ordinal} has a piece out of place")
                sample.attempt = piece.attempt
                sample.extend(piece.token_ids, piece.logprobs, entry.versions[piece.version])
                if piece.finish:
                    sample.end_attempt(piece.finish, "")
        elif isinstance(entry, Rewarded):
            for ordinal, reward in entry.rewards:
                batch.samples[ordinal].score(reward)
    except (IndexError, IllegalTransition) as error:
        raise _unreadable(step, str(error)) from error
