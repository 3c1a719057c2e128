"""Episodes whose environment answers their last turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from tidemill.controller.in_flight import InFlight
from tidemill.controller.ledger import Ledger
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.samples import Sample, SampleState
from tidemill.controller.waiting import Mailbox
from tidemill.core.errors import TidemillError
from tidemill.core.records import Call


class TurnLog:
    """Implements `core.protocols.CallLog` for the last turn of a sample."""

    def __init__(self, sample: Sample, in_flight: InFlight, ledger: Ledger) -> None:
        self._sample = sample
        self._in_flight = in_flight
        self._ledger = ledger
        self._attempt = sample.attempt

    async def started(self, index: int) -> None:
        self._check()
        await self._ledger.record_call_started(self._in_flight, self._sample, index)

    async def ended(self, index: int, call: Call) -> None:
        self._check()
        await self._ledger.record_call(self._in_flight, self._sample, index, call)

    def _check(self) -> None:
        """Raises CancelledError: the sample was restarted or dropped."""
        if not self._in_flight.is_current(self._sample, self._attempt, SampleState.ACTING):
            raise asyncio.CancelledError


class ActingEpisodes:
    """One task per episode whose environment answers; it writes the answer to the mailbox."""

    def __init__(self, in_flight: InFlight, rollout: RolloutContext, mailbox: Mailbox) -> None:
        self._in_flight, self._rollout, self._mailbox = in_flight, rollout, mailbox
        self._acting: dict[int, asyncio.Task[None]] = {}  # by ordinal
        self._forgotten: set[asyncio.Task[None]] = set()  # cancelled, but not ended yet

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self._acting.values(), *self._forgotten]

    @property
    def has_unrepeatable_call(self) -> bool:
        """Whether a call that must not be repeated is being made."""
        acting = (self._in_flight.samples[ordinal].turns for ordinal in self._acting)
        return any(turns.started_calls and set(turns.started_calls) - turns.finished_calls.keys() for turns in acting)

    def start(self, samples: Sequence[Sample]) -> None:
        """Let environments answer the turns that have ended, but for samples that were set aside; those of a run that
        is to stop are left to its resume."""
        for sample in samples:
            current = self._in_flight.is_current(sample, sample.attempt, SampleState.ACTING)
            if self._rollout.stop.is_set() or not current or not sample.needed:
                continue
            task = self._acting[sample.ordinal] = asyncio.create_task(self._act(sample))
            task.add_done_callback(partial(self._ended, sample.ordinal))

    def _ended(self, ordinal: int, task: asyncio.Task[None]) -> None:
        if self._acting.get(ordinal) is task:
            del self._acting[ordinal]

    def forget(self, samples: Sequence[Sample]) -> None:
        """Abandon the environments of samples that are restarted or dropped."""
        if self._rollout.environments is None:
            return
        for sample in samples:
            if (task := self._acting.pop(sample.ordinal, None)) is not None:
                task.cancel()
                self._forgotten.add(task)
                task.add_done_callback(self._forgotten.discard)
        self._rollout.environments.forget([sample.sample_id for sample in samples])

    async def _act(self, sample: Sample) -> None:
        rollout, attempt = self._rollout, sample.attempt
        assert rollout.environments is not None
        episode = sample.episode(rollout.codec.decode)
        started_s = rollout.clock.now()
        try:
            answer = await rollout.environments.act(episode, TurnLog(sample, self._in_flight, rollout.ledger))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling() or not self._in_flight.is_current(sample, attempt, SampleState.ACTING):
                raise
            # Otherwise the run would wait for the answer until `timeouts.act_s`.
            self._mailbox.put_failure(TidemillError(f"the environment of {sample.sample_id} cancelled its own answer"))
        except Exception as error:  # noqa: BLE001 - `next` raises it
            self._mailbox.put_failure(error)
        else:
            self._in_flight.counters.turns_answered += 1
            self._in_flight.counters.answer_s += rollout.clock.now() - started_s
            self._mailbox.messages.observations.append((sample, attempt, answer))
            self._mailbox.notify()
