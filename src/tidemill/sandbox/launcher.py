"""Program that runs the commands of sandboxes: a small process, so that a fork is cheap and the caller's memory safe.

Every connection is one sandbox, which ends with it. When standard input closes, because the process that started the
launcher has ended, so does the launcher, and with it every sandbox.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core import ipc
from tidemill.sandbox import bubblewrap
from tidemill.sandbox.command import KILL_S, Command, kill_tree, read_processes
from tidemill.sandbox.messages import Backend, Reply, Request, Setup
from tidemill.sandbox.records import Finished, SandboxError, SandboxLostError
from tidemill.sandbox.slots import BubblewrapSlots, PlainSlots, RunscSlots, Slot, Slots

PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from tidemill.sandbox.launcher import main
main()
"""
READY = b"ready\n"
CREDENTIALS = struct.Struct("3i")
"""Process, user and group that a socket is connected to."""
WATCH_S, MOST_WATCH_S = 0.02, 0.1
"""Pause between two looks at the processes: ten times as long as a look takes, within these bounds."""


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which every command would inherit
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    ipc.adopt_descendants()
    if setup.backend != "none":
        bubblewrap.mount_processes()
        # The image's host names, over which those of a sandbox are mounted.
        Path(f"{bubblewrap.IMAGE}/etc/hosts").write_text("127.0.0.1 localhost\n")
    makers: dict[Backend, Callable[[], Slots]] = {"bwrap": BubblewrapSlots, "runsc": RunscSlots, "none": PlainSlots}
    launcher = Launcher(makers[setup.backend]())
    try:
        asyncio.run(launcher.serve(setup.address))
    finally:
        ipc.kill_children(KILL_S)


class Launcher:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._commands: set[Command] = set()
        self._streams: dict[str, socket.socket] = {}

    async def serve(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        loop.add_reader(0, lambda: None if os.read(0, 1) else stopped.set())
        watching = asyncio.create_task(self._watch())
        server = await asyncio.start_unix_server(self._attend, "\0" + address)
        os.write(1, READY)
        await stopped.wait()
        watching.cancel()
        server.close()

    async def _watch(self) -> None:
        while True:
            began_s = time.monotonic()
            if self._commands:
                processes = read_processes()
                for command in list(self._commands):
                    command.watch(processes)
            await asyncio.sleep(min(max(WATCH_S, 10 * (time.monotonic() - began_s)), MOST_WATCH_S))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        requests: asyncio.Queue[Request | None] = asyncio.Queue()
        ours: socket.socket = writer.get_extra_info("socket")
        credentials = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(credentials)[1] != os.getuid():
            writer.close()
            return
        reading = asyncio.create_task(_read_requests(reader, requests))
        slot: Slot | None = None
        try:
            first = await requests.get()
            if first is None:
                return
            if first.method == "attach":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                stream = socket.socket(fileno=os.dup(ours.fileno()))
                stream.setblocking(True)
                self._streams[first.stream] = stream
                _answer(writer, Reply())
                await writer.drain()
                return
            slot = self._slots.open(first)
            _answer(writer, Reply())
            while (request := await requests.get()) is not None:
                serving = asyncio.create_task(self._serve(slot, request))
                await asyncio.wait([serving, reading], return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():  # the owner has left
                    serving.cancel()
                    await asyncio.gather(serving, return_exceptions=True)
                    return
                _answer(writer, serving.result())
                await writer.drain()
        except OSError as error:
            with suppress(OSError):
                _answer(writer, Reply(error=f"the sandbox cannot be made: {error}", lost=True))
        finally:
            reading.cancel()
            if slot is not None:
                self._slots.close(slot)
            writer.close()

    async def _serve(self, slot: Slot, request: Request) -> Reply:
        try:
            match request.method:
                case "run" | "start":
                    value: Any = await self._run(slot, request)
                case "read":
                    value = slot.scratch.read(request.path)
                case "write":
                    value = None
                    slot.scratch.write(request.path, request.data)
                case "snapshot":
                    value = slot.scratch.snapshot()
                case "restore":
                    value = None
                    slot.scratch.restore(request.data)
                case _:
                    raise SandboxError(f"{request.method} comes first")
            return Reply(value=msgspec.Raw(msgspec.msgpack.encode(value)))
        except RecursionError:
            return Reply(error="its folders are nested too deeply")
        except (SandboxError, OSError) as error:
            return Reply(
                error=str(error), lost=not isinstance(error, SandboxError) or isinstance(error, SandboxLostError)
            )

    async def _run(self, slot: Slot, request: Request) -> Finished:
        """Raises SandboxLostError: it did not start; OSError."""
        limits, stream = slot.limits, None
        if request.method == "start":
            stream = self._streams.pop(request.stream)
            limits = msgspec.structs.replace(limits, cpu_s=math.inf, wall_s=math.inf)
        with stream or nullcontext(), self._slots.spawn(slot, request, limits) as spawn:
            if spawn.search_path is not None and not shutil.which(request.argv[0], path=spawn.search_path):
                return Finished(stdout=b"", stderr=f"{request.argv[0]}: not found\n".encode(), code=127)
            command = Command(spawn, limits, stream)
        self._commands.add(command)
        try:
            wait_s = min(request.timeout_s or limits.wall_s, limits.wall_s)
            return await command.finish(request.stdin, wait_s, slot.network)
        finally:
            self._commands.discard(command)
            if not command.has_namespace:  # end processes whose parents have ended
                for pid in set(ipc.child_processes()) - {command.pid for command in self._commands}:
                    kill_tree(pid)
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 -- it does not wait


def _answer(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(ipc.framed(msgspec.msgpack.encode(reply)))


async def _read_requests(reader: asyncio.StreamReader, requests: asyncio.Queue[Request | None]) -> None:
    """Pass on requests until the connection closes, then None."""
    decoder = msgspec.msgpack.Decoder(Request)
    with suppress(OSError, EOFError, ValueError):
        while True:
            requests.put_nowait(decoder.decode(await ipc.read(reader)))
    requests.put_nowait(None)
