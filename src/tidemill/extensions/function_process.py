"""Service of `fork_server`: calls reward functions of the user, and answers with their scores.

The client sends calls with pickled arguments and receives numbers and texts only, so that nothing a function does can
send objects to the run.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import msgspec

from tidemill.core import ipc
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.extensions.calls import CallError, call_error
from tidemill.extensions.fork_server import DATA, READY, receive, send
from tidemill.extensions.portable import Target
from tidemill.extensions.results import Score, score_of

SERVICE = __name__
ALIVE = 0
"""Number of the reply to a `Cancel`: the event loop is not blocked."""


class Role(Record):
    """What a process is for."""

    functions: tuple[int, ...]  # indices of the settings
    together: bool  # its calls are tasks of one event loop; else they run one after another


class FunctionTarget(Record):
    """A function, and the factors of the named numbers that it returns."""

    target: Target
    weights: dict[str, float] = {}


class Call(Record, tag="call"):
    number: int  # from 1
    function: int  # index of the settings
    arguments: bytes  # pickled, by name
    count: int = 0  # samples of a function of lists; 0: the function takes one sample


class Cancel(Record, tag="cancel"):
    """Cancel a call that runs together with others."""

    number: int


Requests: TypeAlias = tuple[Call | Cancel, ...]


class Reply(Record):
    """Of a call, with one entry for each sample: its score, or the error as text."""

    number: int
    scores: tuple[tuple[float, dict[str, float]] | str | None, ...] = ()
    error: str = ""  # of the whole call
    seconds: float = 0.0  # that the call took; 0: not measured


def preload(settings: bytes) -> list[int]:
    for each in _functions(settings):
        with suppress(UserError):  # every call reports it
            each.load()
    return []


def attend(stream: socket.socket, settings: bytes, role: bytes) -> None:
    given = msgspec.msgpack.decode(role, type=Role)
    functions = _functions(settings)
    for index in given.functions:  # before a deadline runs
        with suppress(UserError):
            functions[index].load()
    send(stream, b"", READY)
    if given.together:
        asyncio.run(_attend_together(stream, functions))
        return
    loop = asyncio.new_event_loop()  # one for all calls, because clients of a module belong to one
    asyncio.set_event_loop(loop)
    while data := receive(stream):
        for call in _requests.decode(data):
            assert isinstance(call, Call)
            send(stream, _encoded(_reply(functions[call.function], call, loop)))


class _Function:
    """A function, loaded on first use unless the server has loaded it."""

    def __init__(self, given: FunctionTarget) -> None:
        self.weights = given.weights
        self._target = given.target
        self._function: Any = None

    def load(self) -> Any:
        """Raises UserError: it cannot be imported."""
        if self._function is None:
            self._function = self._target.load(where="scoring.rewards.function")
        return self._function

    def call(self, call: Call) -> Any:
        """Its result, which may be awaitable."""
        return self.load()(**pickle.loads(call.arguments))

    def reply(self, call: Call, result: Any, seconds: float = 0.0) -> Reply:
        """Raises CallError: the result is no score."""
        return Reply(number=call.number, scores=scores_of(result, call.count, self.weights), seconds=seconds)


_requests = msgspec.msgpack.Decoder(Requests)


@cache
def _functions(settings: bytes) -> list[_Function]:
    """The functions of the settings; those that the server has loaded, in its forks."""
    return [_Function(each) for each in msgspec.msgpack.decode(settings, type=list[FunctionTarget])]


async def _attend_together(stream: socket.socket, functions: list[_Function]) -> None:
    reader, writer = await asyncio.open_connection(sock=stream)
    tasks: dict[int, asyncio.Task[None]] = {}

    def answer(reply: Reply) -> None:
        writer.write(ipc.framed(DATA + _encoded(reply)))

    async def make(call: Call) -> None:
        function = functions[call.function]
        try:
            result = function.call(call)
            answer(function.reply(call, await result if inspect.isawaitable(result) else result))
        except BaseException as error:  # noqa: BLE001 -- also SystemExit is the function's
            answer(_failed(call, error))
        del tasks[call.number]

    with suppress(asyncio.IncompleteReadError, ConnectionResetError):
        while True:
            for request in _requests.decode((await ipc.read(reader))[1:]):
                if isinstance(request, Call):
                    tasks[request.number] = asyncio.create_task(make(request))
                else:
                    if request.number in tasks:
                        tasks[request.number].cancel()
                    answer(Reply(number=ALIVE))


def _reply(function: _Function, call: Call, loop: asyncio.AbstractEventLoop) -> Reply:
    start_s = time.perf_counter()
    try:
        result = function.call(call)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(result)
        return function.reply(call, result, time.perf_counter() - start_s)
    except BaseException as error:  # noqa: BLE001 -- also SystemExit is the function's
        return _failed(call, error)


def _failed(call: Call, error: BaseException) -> Reply:
    cancelled = isinstance(error, asyncio.CancelledError)
    return Reply(number=call.number, error="it was cancelled" if cancelled else str(call_error(error)))


def scores_of(result: Any, count: int, weights: Mapping[str, float]) -> tuple[Score | str, ...]:
    """The scores that a function returned; for a function of lists, the error of an entry as text.

    Args:
        count: samples, of a function of lists; 0: it takes one sample.

    Raises:
        CallError: the result of a function of one sample is no score, or there is not one result for each sample.
    """
    if not count:
        return (score_of(result, weights),)
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
        raise CallError(f"TypeError: returned a {type(result).__name__} instead of one reward per sample")
    if len(result) != count:
        raise CallError(f"ValueError: returned {len(result)} rewards for {count} samples")
    scores: list[Score | str] = []
    for each in result:
        try:
            scores.append(score_of(each, weights))
        except Exception as error:  # noqa: BLE001 -- of a number that float cannot convert
            scores.append(str(call_error(error)))
    return tuple(scores)


def _encoded(reply: Reply) -> bytes:
    try:
        return msgspec.msgpack.encode(reply)
    except UnicodeEncodeError:
        error = "ValueError: returned a name that is not valid Unicode"
        return msgspec.msgpack.encode(msgspec.structs.replace(reply, scores=(), error=error))
