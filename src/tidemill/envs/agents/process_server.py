"""Program that forks environment processes, and ends each of them with everything that it started.

It imports the user's class once, so that a fork takes milliseconds; if the import starts threads, which do not survive
a fork, every process imports the class itself. Each environment process is the subreaper of its descendants. When it
ends, the server inherits them, and kills them. When the control socket closes, or the process that started the server
dies, all are killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import os
import select
import signal
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.records import Record
from tidemill.envs.agents.environment import Environment, ProgramLostError
from tidemill.envs.agents.instances import Instances, Outcome, Work
from tidemill.extensions.loading import import_now
from tidemill.sandbox.records import SandboxLostError

if TYPE_CHECKING:
    from tidemill.config.sandbox import SandboxConfig

PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[2])["path"]
from tidemill.envs.agents.process_server import main
main()
"""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PROCESS = -1
"""Index of outcomes of the process itself: the first one without text when it is ready, and then, or instead, one with
the cause of its end."""
MAX_THREADS = 256
LENGTH_BYTES = 4
"""Every message on a stream is preceded by its length, little-endian."""


class Setup(Record):
    """What the processes run."""

    parent: int  # process id
    path: tuple[str, ...]  # sys.path
    environment: str  # import path of the class
    params: dict[str, bool | int | float | str]
    longest: int  # characters of a text
    sandbox: str = ""  # settings as JSON; empty: the class needs none
    preload: bool = True


class Command(Record):
    """Sent to the server: fork, with a socket, or kill."""

    process: int  # number given by the client
    kill: bool = False


def server_command(control: str, setup: Setup) -> list[str]:
    """Command line of the server.

    Args:
        control: number of an inherited socket.
    """
    return [sys.executable, "-c", PROGRAM, control, msgspec.json.encode(setup).decode()]


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.json.decode(sys.argv[2], type=Setup)
    _die_with_parent(setup.parent, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then closes the socket
    sys.path[:] = setup.path
    if setup.preload:
        with suppress(UserError):  # every process reports it
            import_now(setup.environment, "env.name")
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            os.execv(sys.executable, server_command(sys.argv[1], msgspec.structs.replace(setup, preload=False)))
    if setup.sandbox:
        _start_sandboxes(_sandbox_config(setup))
    gc.collect()
    gc.freeze()  # memory stays shared with the forks
    try:
        with suppress(ConnectionResetError):
            _serve(control, setup)
    finally:
        _kill_all()


_launchers: list[int] = []
"""Process ids of launchers of sandboxes."""


def _sandbox_config(setup: Setup) -> SandboxConfig:
    from tidemill.config.sandbox import SandboxConfig  # slow to import

    return SandboxConfig.model_validate_json(setup.sandbox)


def _start_sandboxes(config: SandboxConfig) -> None:
    """Start the launcher that all processes will use."""
    from tidemill.sandbox.local import launcher

    if config.backend != "http":
        with suppress(UserError):  # every process reports it
            _launchers.append(launcher(config.backend).pid)


def _serve(control: socket.socket, setup: Setup) -> None:
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # only wakes `select`: an exception could interrupt the killing
    processes: dict[int, tuple[int, socket.socket]] = {}  # process id and its socket, by the client's number
    while True:
        ready, _, _ = select.select([control.fileno(), wake], [], [])
        if wake in ready:
            if signal.SIGTERM in os.read(wake, 4096):
                return
            _reap(processes)
        if control.fileno() in ready:
            text, files, _, _ = socket.recv_fds(control, 4096, 1)
            if not text:
                return
            command = msgspec.json.decode(text, type=Command)
            if not command.kill:
                stream = socket.socket(fileno=files[0])
                try:
                    processes[command.process] = (_fork(stream, control, setup), stream)
                except OSError:  # no process can be started; the client sees that the socket closes
                    stream.close()
            elif command.process in processes:
                os.kill(processes[command.process][0], signal.SIGKILL)


def _kill_all() -> None:
    """Kill all descendants of this process, which inherits the children of the killed."""
    while children := _children():
        for each in children:
            os.kill(each, signal.SIGKILL)
        while children and os.waitpid(-1, os.WNOHANG)[0]:
            children.pop()


def _reap(processes: dict[int, tuple[int, socket.socket]]) -> None:
    """Report processes that have ended, and kill what they left."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            for number, (pid, stream) in list(processes.items()):
                if pid == ended[0]:
                    del processes[number]
                    code = os.waitstatus_to_exitcode(ended[1])
                    how = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
                    with stream, suppress(OSError):  # the client has closed it
                        _send(stream, Outcome(index=PROCESS, text=f"its process {how}"))
    for each in set(_children()) - {pid for pid, _ in processes.values()} - set(_launchers):
        os.kill(each, signal.SIGKILL)  # its children come next, when its end is reported


def _send(stream: socket.socket, outcome: Outcome) -> None:
    data = msgspec.msgpack.encode(outcome)
    stream.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


def _children() -> list[int]:
    """Children of this process, zombies included. (The kernel's list of children misses some while others end.)"""
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                stat = (folder / "stat").read_text()
                parent = int(stat[stat.rindex(")") + 1 :].split()[1])  # a name in parentheses may contain spaces
                if parent == os.getpid():
                    children.append(int(folder.name))
    return children


def _fork(stream: socket.socket, control: socket.socket, setup: Setup) -> int:
    """Fork a process that serves `stream`."""
    server = os.getpid()
    if pid := os.fork():
        return pid
    try:
        os.close(signal.set_wakeup_fd(-1))
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent(server, signal.SIGKILL)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        control.close()
        _attend(stream, setup)
    finally:
        os._exit(1)


def _attend(stream: socket.socket, setup: Setup) -> None:
    """Make calls until the socket closes."""
    try:
        environment: Any = import_now(setup.environment, "env.name")
    except UserError as error:
        _send(stream, Outcome(index=PROCESS, text=f"its process did not start: {error}"))
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    threads = ThreadPoolExecutor(MAX_THREADS)
    decoder = msgspec.msgpack.Decoder(tuple[Work, ...])
    instances = Instances(environment, setup.params, setup.longest, _sandbox_config(setup) if setup.sandbox else None)
    _send(stream, Outcome(index=PROCESS))
    with stream.makefile("rb") as reader:
        while head := reader.read(LENGTH_BYTES):
            works = decoder.decode(reader.read(int.from_bytes(head, "little")))
            calls = [_make_call(instances, environment, work, threads if len(works) > 1 else None) for work in works]
            loop.run_until_complete(_send_each(stream, calls))
    os._exit(0)


async def _send_each(stream: socket.socket, calls: list[Coroutine[Any, Any, Outcome]]) -> None:
    tasks = [asyncio.ensure_future(call) for call in calls]  # in their order: `as_completed` alone starts them in any
    for each in asyncio.as_completed(tasks):
        _send(stream, await each)


async def _make_call(
    instances: Instances, environment: type[Environment], work: Work, threads: ThreadPoolExecutor | None
) -> Outcome:
    """Make a call; without `threads` on the main thread, as objects such as sqlite's connections require."""
    try:
        if threads is None or inspect.iscoroutinefunction(getattr(environment, work.method, None)):
            value = instances.invoke(work)
        else:
            run = copy_context().run
            value = await asyncio.get_running_loop().run_in_executor(threads, run, instances.invoke, work)
        return instances.outcome(work, await value if inspect.isawaitable(value) else value)
    except (SandboxLostError, ProgramLostError) as error:
        print(f"{work.method}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(1)  # not the agent's mistake: the call is made again in another process
    except BaseException as error:  # noqa: BLE001 -- a tool may call sys.exit
        return instances.failed(work, error)


def _die_with_parent(parent: int, number: signal.Signals) -> None:
    """Receive a signal when the parent ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
