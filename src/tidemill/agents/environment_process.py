"""Service of `fork_server`: makes the calls of the episodes of an environment."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.agents.environment import Environment, ProgramLostError
from tidemill.agents.instances import CallOutcome, Instances, Work
from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.extensions.fork_server import ENDED, READY, receive, send
from tidemill.extensions.portable import Target
from tidemill.sandbox.records import SandboxLostError

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig

SERVICE = __name__
WHERE = "env.name"
MAX_THREADS = 256


class EnvironmentSettings(Record):
    """What the processes run."""

    environment: Target  # class
    params: dict[str, bool | int | float | str]
    longest: int  # characters of a text
    sandbox: str = ""  # settings as JSON; empty: the class needs none


def preload(settings: bytes) -> list[int]:
    given = msgspec.msgpack.decode(settings, type=EnvironmentSettings)
    with suppress(UserError):  # every process reports it
        _load(given.environment)
    if given.sandbox and (config := _sandbox_config(given)).backend != "http":
        from tidemill.sandbox.local import launcher

        with suppress(UserError):
            return [launcher(config.backend).pid]  # which all processes will use
    return []


def attend(stream: socket.socket, settings: bytes, role: bytes) -> None:
    """Make calls until the socket closes."""
    given = msgspec.msgpack.decode(settings, type=EnvironmentSettings)
    try:
        environment = _load(given.environment)
    except UserError as error:
        send(stream, f"its process did not start: {error}".encode(errors="replace"), ENDED)
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    threads = ThreadPoolExecutor(MAX_THREADS)
    decoder = msgspec.msgpack.Decoder(tuple[Work, ...])
    sandbox = _sandbox_config(given) if given.sandbox else None
    instances = Instances(environment, given.params, given.longest, sandbox)
    send(stream, b"", READY)
    while data := receive(stream):
        works = decoder.decode(data)
        calls = [_make_call(instances, environment, work, threads if len(works) > 1 else None) for work in works]
        loop.run_until_complete(_send_each(stream, calls))


@cache
def _load(target: Target) -> Any:
    """The class, which forks have from the server."""
    return target.load(where=WHERE)


def _sandbox_config(given: EnvironmentSettings) -> SandboxConfig:
    from tidemill.config.sandbox import SandboxConfig  # slow to import

    return SandboxConfig.model_validate_json(given.sandbox)


async def _send_each(stream: socket.socket, calls: list[Coroutine[Any, Any, CallOutcome]]) -> None:
    tasks = [asyncio.ensure_future(call) for call in calls]  # in their order: `as_completed` alone starts them in any
    for each in asyncio.as_completed(tasks):
        send(stream, msgspec.msgpack.encode(await each))


async def _make_call(
    instances: Instances, environment: type[Environment], work: Work, threads: ThreadPoolExecutor | None
) -> CallOutcome:
    """Make a call; without `threads` on the main thread, as objects such as sqlite's connections require."""
    try:
        if threads is None or inspect.iscoroutinefunction(getattr(environment, work.method, None)):
            value = instances.invoke(work)
        else:
            invoke = partial(copy_context().run, _invoked, instances, work)
            value, error = await asyncio.get_running_loop().run_in_executor(threads, invoke)
            if error is not None:
                raise error
        return instances.outcome(work, await value if inspect.isawaitable(value) else value)
    except (SandboxLostError, ProgramLostError) as error:
        print(f"{work.method}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # not the agent's mistake: the call is made again in another process
    except BaseException as error:  # noqa: BLE001 -- a tool may call sys.exit
        return instances.failed(work, error)


def _invoked(instances: Instances, work: Work) -> tuple[Any, BaseException | None]:
    """What a method returned or raised: a future cannot raise StopIteration."""
    try:
        return instances.invoke(work), None
    except BaseException as error:  # noqa: BLE001 -- as above
        return None, error
