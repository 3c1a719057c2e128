"""Serves the environments of another package over standard input and output.

The programs of this folder run in the Python environment of that package, and import nothing of Tidemill. A message of
`multiprocessing.connection` is a MessagePack map: {"id", "method", "arguments"}, answered in any order by
{"id", "value"} or {"id", "error", "fault"}. The first message, sent when the program is ready, is
{"id": 0, "value": description} or {"id": 0, "error": text}.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec

LONGEST_TEXT = 1 << 25
"""Characters; an answer of more than 256 MB is refused."""
SURROGATE = re.compile(r"[\ud800-\udfff]")
PR_SET_DUMPABLE = 4


class EnvironmentAdapter:
    """Environments by episode. Methods may be `async`; an exception of `step` or `call` is the agent's mistake,
    one of another method a fault."""

    async def start(self) -> None:
        """Prepare what all episodes use."""

    async def describe(self) -> dict[str, Any]:
        """`tools`: a list of {"name", "description", "parameters", "idempotent"}."""
        return {}

    def tasks(self, split: str, count: int) -> Any:
        """Rows; training rows and held-out ones must differ."""
        raise NotImplementedError

    def reset(self, episode: int, task: dict[str, Any], seed: int) -> Any:
        """The first message, text."""
        raise NotImplementedError

    def step(self, episode: int, action: str) -> Any:
        """Observation, reward, and whether the episode is over."""
        raise NotImplementedError

    def call(self, episode: int, tool: str, arguments: dict[str, Any]) -> Any:
        """The result of a tool, text."""
        raise NotImplementedError

    def close(self, episode: int) -> Any:
        """Forget an episode."""


class AgentMistakeError(Exception):
    """A mistake of the agent, which sees this text."""


class EnvironmentFaultError(Exception):
    """The environment failed, whatever the agent did: the episode is left out."""


class ServiceLostError(Exception):
    """What the environment needs has ended, and so does this program: calls are made again in another one."""


class EpisodeRandomness:
    """Gives every episode global random numbers of its own, whichever others are played between its steps."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def enter(self, method: str, arguments: dict[str, Any]) -> None:
        numpy = sys.modules.get("numpy")
        if method == "reset":
            random.seed(arguments["seed"])
            if numpy is not None:
                numpy.random.seed(arguments["seed"] % 2**32)
        elif (state := self._states.get(arguments["episode"])) is not None:
            random.setstate(state[0])
            if numpy is not None and state[1] is not None:
                numpy.random.set_state(state[1])

    def leave(self, method: str, arguments: dict[str, Any]) -> None:
        numpy = sys.modules.get("numpy")
        self._states[arguments["episode"]] = (random.getstate(), numpy.random.get_state() if numpy else None)
        if method == "close":
            del self._states[arguments["episode"]]


def serve(make: Callable[..., EnvironmentAdapter]) -> None:
    """Answer calls until standard input ends. The program's argument is a JSON object, the arguments of `make`."""
    source, sink = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # what the package prints is no message
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor is what its own processes write
    if sys.platform == "linux":  # and they may not read or write this process's memory
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    asyncio.run(_serve(make, source, sink))
    os._exit(0)  # not delayed by threads of the package


async def _serve(make: Callable[..., EnvironmentAdapter], source: Connection, sink: Connection) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    randomness = EpisodeRandomness()
    try:
        adapter = make(**msgspec.json.decode(sys.argv[1]))
        await adapter.start()
        _send(sink, {"id": 0, "value": await adapter.describe()})
    except BaseException as error:  # noqa: BLE001 -- of the package
        _send(sink, {"id": 0, "error": _text(error)})
        return
    reading = threading.Thread(target=_read, args=(source, loop, requests), daemon=True)
    reading.start()
    running: set[asyncio.Task[None]] = set()
    while (request := await requests.get()) is not None:
        task = asyncio.create_task(_answer(adapter, randomness, sink, request))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(
    adapter: EnvironmentAdapter, randomness: EpisodeRandomness, sink: Connection, request: dict[str, Any]
) -> None:
    name, arguments = request["method"], request["arguments"]
    function = getattr(adapter, name)
    returned = False
    swaps = "episode" in arguments and not inspect.iscoroutinefunction(function)
    try:
        if swaps:
            randomness.enter(name, arguments)
        try:
            value = function(**arguments)
        finally:
            if swaps:
                randomness.leave(name, arguments)
        value = await value if inspect.isawaitable(value) else value
        returned = True
        _send(sink, {"id": request["id"], "value": value if name == "tasks" else _sendable(value)})
    except ServiceLostError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 -- of the package
        fault = isinstance(error, EnvironmentFaultError) or name not in ("step", "call") or returned
        _send(sink, {"id": request["id"], "error": _text(error), "fault": fault})


def _read(source: Connection, loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[dict[str, Any] | None]) -> None:
    with suppress(EOFError, OSError):
        while True:
            request = msgspec.msgpack.decode(source.recv_bytes())
            loop.call_soon_threadsafe(requests.put_nowait, request)
    loop.call_soon_threadsafe(requests.put_nowait, None)


def _send(sink: Connection, message: dict[str, Any]) -> None:
    sink.send_bytes(msgspec.msgpack.encode(message))


def _sendable(value: Any) -> Any:
    """A result whose texts can be sent. Tidemill replaces NUL, counts it, and cuts texts further."""
    if isinstance(value, (list, tuple)):
        return [_sendable(each) for each in value]
    if getattr(value, "shape", None) == ():  # a scalar of NumPy
        value = value.item()
    if not isinstance(value, str):
        return value
    if (cut := len(value) - LONGEST_TEXT) > 0:
        value = f"{value[: LONGEST_TEXT // 2]}\n[{cut} characters cut]\n{value[-LONGEST_TEXT // 2 :]}"
    return SURROGATE.sub("\0", value)


def _text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        text = str(error)
    except BaseException as raised:  # noqa: BLE001 -- of the package
        text = f"its __str__ raised {type(raised).__name__}"
    if not isinstance(error, AgentMistakeError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return str(_sendable(text))
