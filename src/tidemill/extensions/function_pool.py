"""Calls reward functions of the user in processes that can be killed, each call with a deadline from its own start.

A function of one sample runs in any of several processes, which are forked while calls wait; calls that are fast are
sent in batches. A function of lists has one process, so that a model that it loads exists once. `async`
functions share one process with one event loop. A process that passes a deadline, or ends, is replaced: only the call
that it was making fails, and those that it had not begun are made again.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import cloudpickle
import msgspec

from tidemill.core.errors import exception_text
from tidemill.extensions.calls import MAX_HANGING, RESPONSE_S, CallError, CallTimeout
from tidemill.extensions.function_process import (
    ALIVE,
    SERVICE,
    Call,
    Cancel,
    FunctionTarget,
    Reply,
    Role,
)
from tidemill.extensions.portable import Target
from tidemill.extensions.processes import ForkedProcess, ForkServer, LostError
from tidemill.extensions.results import Score

GROW_S = 0.05
"""Calls that wait for longer are given more processes."""
BATCH_S = 0.005
"""Calls expected to take this long together are sent at once."""
MAX_BATCH = 64
SMOOTHING = 0.2
"""Weight of the newest duration in their mean."""

CLOSED = "closed before the sample was scored"

Scores: TypeAlias = tuple[Score | str, ...]
"""One entry for each sample: its score, or the error as text."""


class FunctionProcesses:
    """The processes of all functions of a run.

    Args:
        most: calls at the same time, of functions that take one sample.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._targets: list[FunctionTarget] = []
        self._functions: list[ProcessFunction] = []
        self._server: ForkServer | None = None
        self._pools: dict[Role, SerialPool | TogetherPool] = {}
        self._closed = False

    def add(self, target: Target, *, weights: Mapping[str, float], together: bool, lists: bool) -> ProcessFunction:
        """A function that can be called; all are added before the first call.

        Args:
            weights: factors of the named numbers that it returns.
            together: it is `async`.
            lists: it takes and returns lists.
        """
        assert self._server is None, "the server imports all functions when it starts"
        self._targets.append(FunctionTarget(target=target, weights=dict(weights)))
        self._functions.append(ProcessFunction(self, len(self._functions), together and not lists, lists))
        return self._functions[-1]

    def pool(self, function: ProcessFunction) -> SerialPool | TogetherPool:
        """The processes of a function: one of lists has its own."""
        if self._closed:
            raise CallError(CLOSED)
        if self._server is None:
            self._server = ForkServer(SERVICE, msgspec.msgpack.encode(self._targets))
        served = (
            [function]
            if function.lists
            else [each for each in self._functions if not each.lists and each.together == function.together]
        )
        role = Role(functions=tuple(each.index for each in served), together=function.together)
        if role not in self._pools:
            process = partial(ForkedProcess, self._server, role=msgspec.msgpack.encode(role))
            most = 1 if function.lists else self._most
            self._pools[role] = TogetherPool(process, most) if role.together else SerialPool(process, most)
        return self._pools[role]

    async def close(self) -> None:
        """End all processes; calls that run or wait fail."""
        self._closed = True
        for each in self._pools.values():
            each.close()
        if self._server is not None:
            await self._server.close()


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class ProcessFunction:
    """A function in other processes."""

    def __init__(self, processes: FunctionProcesses, index: int, together: bool, lists: bool) -> None:
        self.index, self.together, self.lists = index, together, lists
        self._processes = processes
        self._pool: SerialPool | TogetherPool | None = None

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, count: int = 0) -> Scores:
        """Its scores, one for each sample.

        Args:
            arguments: by name.
            count: samples, of a function of lists.

        Raises:
            CallError: it raised, returned no scores, or ended its process.
            CallTimeout: no result within `timeout_s` of its start.
        """
        if self._pool is None:
            self._pool = self._processes.pool(self)
        try:
            pickled = cloudpickle.dumps(dict(arguments))
        except Exception as error:  # of an object in the user's rows
            raise CallError(f"an argument cannot be copied: {exception_text(error)}") from error
        return await self._pool.call(self.index, pickled, timeout_s=timeout_s, count=count)


NewProcess: TypeAlias = Callable[[Callable[[bytes], None], Callable[[str], None]], ForkedProcess]


@dataclass(slots=True, eq=False)
class _Pending:
    """A call, and the future of its scores."""

    call: Call
    timeout_s: float
    future: asyncio.Future[Scores]

    def settle(self, reply: Reply) -> None:
        if reply.error:
            self.fail(CallError(reply.error))
        elif not self.future.done():
            self.future.set_result(reply.scores)

    def fail(self, error: Exception) -> None:
        if not self.future.done():  # else nobody waits any more
            self.future.set_exception(error)


class _Pool:
    """Calls that wait for a process, and the processes."""

    def __init__(self, new_process: NewProcess) -> None:
        self.new_process = new_process
        self.waiting: deque[_Pending] = deque()
        self._numbers = itertools.count(ALIVE + 1)
        self._starting: set[asyncio.Task[None]] = set()  # tasks that start processes

    async def call(self, function: int, arguments: bytes, *, timeout_s: float, count: int) -> Scores:
        call = Call(number=next(self._numbers), function=function, arguments=arguments, count=count)
        pending = _Pending(call, timeout_s, asyncio.get_running_loop().create_future())
        self.waiting.append(pending)
        self.assign()
        return await pending.future

    def assign(self) -> None:
        """Send calls to processes, and start processes."""
        raise NotImplementedError

    def begin(self, start: Any) -> None:
        """Run a coroutine that starts a process."""
        task = asyncio.get_running_loop().create_task(start)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def fail_waiting(self, error: str) -> None:
        while self.waiting:
            self.waiting.popleft().fail(CallError(error))

    def close(self) -> None:
        for task in self._starting:
            task.cancel()
        self.fail_waiting(CLOSED)


class SerialPool(_Pool):
    """Up to `most` processes, each of which makes one call at a time."""

    def __init__(self, new_process: NewProcess, most: int) -> None:
        super().__init__(new_process)
        self._most = most
        self._workers: set[_SerialWorker] = set()
        self._idle: list[_SerialWorker] = []
        self._mean_s: float | None = None  # of a call
        self._replied_s = 0.0  # time of the newest reply
        self._growth: asyncio.TimerHandle | None = None

    def assign(self) -> None:
        while self.waiting and self._idle:
            if batch := self._next_batch():
                self._idle.pop().send(batch)
        if not self.waiting:
            return
        if not self._workers:
            self._add_worker()
        elif self._growth is None and len(self._workers) < self._most:
            self._growth = asyncio.get_running_loop().call_later(GROW_S, self._grow)

    def replied(self, seconds: float) -> None:
        """Note how long a call took."""
        self._replied_s = asyncio.get_running_loop().time()
        if seconds:
            self._mean_s = seconds if self._mean_s is None else self._mean_s + SMOOTHING * (seconds - self._mean_s)

    def idle(self, worker: _SerialWorker) -> None:
        self._idle.append(worker)
        self.assign()

    def lost(self, worker: _SerialWorker) -> None:
        """A process has ended; make the calls that it had not begun elsewhere."""
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        self.waiting.extendleft(reversed(worker.calls))
        worker.calls.clear()
        self.assign()

    def close(self) -> None:
        if self._growth is not None:
            self._growth.cancel()
        super().close()
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        self._idle.clear()

    def _next_batch(self) -> list[_Pending]:
        size = 1 if self._mean_s is None else int(BATCH_S / max(self._mean_s, 1e-9))
        share = -(-len(self.waiting) // len(self._workers))
        size = max(1, min(size, share, MAX_BATCH))
        return [each for each in (self.waiting.popleft() for _ in range(size)) if not each.future.done()]

    def _grow(self) -> None:
        """Double the processes if the calls that wait would wait for long."""
        self._growth = None
        if not self.waiting:
            return
        silent_s = asyncio.get_running_loop().time() - self._replied_s
        expected_s = (self._mean_s or 0.0) * len(self.waiting) / max(1, len(self._workers))
        if not self._starting and max(silent_s, expected_s) > GROW_S:
            for _ in range(min(len(self.waiting), len(self._workers), self._most - len(self._workers))):
                self._add_worker()
        self.assign()

    def _add_worker(self) -> None:
        worker = _SerialWorker(self)
        self._workers.add(worker)
        self.begin(self._start(worker))

    async def _start(self, worker: _SerialWorker) -> None:
        try:
            await worker.process.start()
        except LostError as error:
            self._workers.discard(worker)
            if not self._workers:
                self.fail_waiting(str(error))
            return
        self._replied_s = asyncio.get_running_loop().time()
        self.idle(worker)


_replies = msgspec.msgpack.Decoder(Reply)


class _SerialWorker:
    """A process, and the calls that were sent to it: it makes the first, and has not begun the others."""

    def __init__(self, pool: SerialPool) -> None:
        self.process = pool.new_process(self._received, lambda how: self._lose(CallError(how)))
        self.calls: deque[_Pending] = deque()
        self._pool = pool
        self._deadline: asyncio.TimerHandle | None = None

    def send(self, batch: list[_Pending]) -> None:
        self.calls.extend(batch)
        self.process.send(msgspec.msgpack.encode([each.call for each in batch]))
        self._watch()

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.process.kill()
        for each in self.calls:
            each.fail(CallError(CLOSED))

    def _watch(self) -> None:
        """Set the deadline of the first call, which begins now."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.calls:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self.calls[0].timeout_s, self._lose, CallTimeout())

    def _received(self, data: bytes) -> None:
        reply = _replies.decode(data)
        if not self.calls or reply.number != self.calls[0].call.number:
            self._lose(CallError("its process sent an answer to no question"))
            return
        self.calls.popleft().settle(reply)
        self._pool.replied(reply.seconds)
        self._watch()
        if not self.calls:
            self._pool.idle(self)

    def _lose(self, error: Exception) -> None:
        """End the process, and with it the call that it makes."""
        if self._deadline is not None:
            self._deadline.cancel()
        self.process.kill()
        if self.calls:
            self.calls.popleft().fail(error)
        self._pool.lost(self)


class TogetherPool(_Pool):
    """One process, whose event loop runs up to `most` calls at the same time.

    Which call blocks the loop or ends the process cannot be seen from outside if several run: they are made again, one
    at a time.
    """

    def __init__(self, new_process: NewProcess, most: int) -> None:
        super().__init__(new_process)
        self._most = most
        self._suspects = 0  # calls at the head of those that wait, and the one that runs, which are made one at a time
        self._worker: _TogetherWorker | None = None

    def assign(self) -> None:
        if not self.waiting:
            return
        if self._worker is None:
            self._worker = _TogetherWorker(self)
            self.begin(self._start(self._worker))
        elif self._worker.started:
            while self.waiting and len(self._worker.calls) < (1 if self._suspects else self._most):
                pending = self.waiting.popleft()
                if pending.future.done():
                    self._suspects = max(0, self._suspects - 1)
                else:
                    self._worker.send(pending)

    def ended(self) -> None:
        """A call has ended."""
        self._suspects = max(0, self._suspects - 1)
        self.assign()

    def lost(self, calls: Sequence[_Pending], error: Exception) -> None:
        """The process has ended, with the calls that it made."""
        self._worker = None
        if len(calls) == 1:
            calls[0].fail(error)
            self._suspects = max(0, self._suspects - 1)
        else:
            self._suspects = len(calls) + max(0, self._suspects - 1)
            self.waiting.extendleft(reversed(calls))
        self.assign()

    def close(self) -> None:
        super().close()
        if self._worker is not None:
            self._worker.close()

    async def _start(self, worker: _TogetherWorker) -> None:
        try:
            await worker.process.start()
        except LostError as error:
            self._worker = None
            self.fail_waiting(str(error))
            return
        worker.started = True
        self.assign()


class _TogetherWorker:
    """The process of `async` functions, and the calls that it makes."""

    def __init__(self, pool: TogetherPool) -> None:
        self.process = pool.new_process(self._received, lambda how: self._lose(CallError(how)))
        self.calls: dict[int, _Pending] = {}  # by number
        self.started = False
        self._pool = pool
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._late: set[int] = set()  # calls past their deadline, while it is not known whether the loop is blocked
        self._hanging: set[int] = set()  # cancelled calls that have not ended
        self._response: asyncio.TimerHandle | None = None  # deadline of the reply to a cancellation

    def send(self, pending: _Pending) -> None:
        number = pending.call.number
        self.calls[number] = pending
        self.process.send(msgspec.msgpack.encode([pending.call]))
        loop = asyncio.get_running_loop()
        self._deadlines[number] = loop.call_later(pending.timeout_s, self._cancel, number)

    def close(self) -> None:
        self._stop()
        for each in self.calls.values():
            each.fail(CallError(CLOSED))

    def _stop(self) -> None:
        for each in (*self._deadlines.values(), *([self._response] if self._response else ())):
            each.cancel()
        self.process.kill()

    def _received(self, data: bytes) -> None:
        reply = _replies.decode(data)
        if reply.number == ALIVE:
            self._responded()
            return
        self._hanging.discard(reply.number)
        if (pending := self._take(reply.number)) is not None:
            if reply.number in self._late:  # the reply only says that it was cancelled
                pending.fail(CallTimeout())
            pending.settle(reply)
            self._pool.ended()

    def _take(self, number: int) -> _Pending | None:
        if (deadline := self._deadlines.pop(number, None)) is not None:
            deadline.cancel()
        return self.calls.pop(number, None)

    def _cancel(self, number: int) -> None:
        """A call is late: cancel it, and see whether the event loop responds."""
        self._late.add(number)
        self.process.send(msgspec.msgpack.encode([Cancel(number=number)]))
        if self._response is None:
            self._response = asyncio.get_running_loop().call_later(RESPONSE_S, self._lose, CallTimeout())

    def _responded(self) -> None:
        if self._response is not None:
            self._response.cancel()
            self._response = None
        for number in self._late:
            if (pending := self._take(number)) is not None:
                pending.fail(CallTimeout())
                self._hanging.add(number)
                self._pool.ended()
        self._late.clear()
        if len(self._hanging) > MAX_HANGING:
            self._lose(CallError("too many earlier calls ignore that they were cancelled"))

    def _lose(self, error: Exception) -> None:
        """End the process."""
        self._stop()
        calls = list(self.calls.values())
        self.calls.clear()
        self._pool.lost(calls, error)
