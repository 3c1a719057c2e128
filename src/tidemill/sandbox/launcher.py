"""Program that runs the commands of sandboxes: a small process, so that a fork is cheap and the caller's memory safe.

Every connection is one sandbox, which ends with it. When standard input closes, because the process that started the
launcher has ended, so does the launcher, and with it every sandbox.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from tidemill.sandbox import bubblewrap
from tidemill.sandbox.messages import LENGTH_BYTES, Backend, Reply, Request, Setup
from tidemill.sandbox.network import Relay
from tidemill.sandbox.records import Ending, Finished, Limits, SandboxError, SandboxLostError
from tidemill.sandbox.slots import BubblewrapSlots, PlainSlots, RunscSlots, Slot, Slots, Spawn
from tidemill.sandbox.usage import read_processes, usage_of

PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from tidemill.sandbox.launcher import main
main()
"""
READY = b"ready\n"
WATCH_S = 0.02
"""Pause between two looks at the processes; longer if a look takes more than a tenth of it."""
MOST_BYTES = 1 << 28
"""Of a request."""
KILL_S = 5.0
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    bubblewrap.LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if setup.backend != "none":
        bubblewrap.mount_processes()
        bubblewrap.write_hosts()
    makers: dict[Backend, Callable[[], Slots]] = {"bwrap": BubblewrapSlots, "runsc": RunscSlots, "none": PlainSlots}
    slots = makers[setup.backend]()
    launcher = Launcher(slots)
    try:
        asyncio.run(launcher.serve(setup.address))
    finally:
        launcher.kill_all()


class Output(asyncio.Protocol):
    """Keeps the first bytes of a stream, and counts the others."""

    def __init__(self, most: int) -> None:
        self.data, self.discarded, self._most = bytearray(), 0, most
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        kept = data[: self._most - len(self.data)]
        self.data += kept
        self.discarded += len(data) - len(kept)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Job:
    """A running command."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits) -> None:
        self.process, self.limits = process, limits
        self.ended: Ending = ""
        self.cpu_s = 0.0
        self.exited = asyncio.get_running_loop().create_future()
        self._began_s = time.monotonic()
        self._descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._began_s

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = max(self.cpu_s, used.ru_utime + used.ru_stime)
        self.exited.set_result(None)

    def watch(self, processes: dict[int, Any]) -> None:
        """End the command if all its processes together exceed a limit."""
        usage = usage_of(self.process.pid, processes)
        self.cpu_s = max(self.cpu_s, usage.cpu_s)
        if usage.cpu_s > self.limits.cpu_s:
            self.end("cpu")
        elif usage.threads > self.limits.processes + 8:  # bubblewrap's own; the kernel refuses the others
            self.end("processes")
        elif usage.private_bytes > self.limits.memory_bytes and usage.exact_bytes() > self.limits.memory_bytes:
            self.end("memory")

    def end(self, why: Ending) -> None:
        self.ended = self.ended or why
        kill_tree(self.process.pid)


class Launcher:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._jobs: set[Job] = set()
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

    def kill_all(self) -> None:
        """End all processes that this one started."""
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            left = [pid for pid, process in read_processes().items() if process.parent == os.getpid()]
            if not left:
                return
            for pid in left:
                kill_tree(pid)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _kill_strays(self) -> None:
        """End processes whose parents have ended."""
        known = {job.process.pid for job in self._jobs}
        for pid, process in read_processes().items():
            if process.parent == os.getpid() and pid not in known:
                kill_tree(pid)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    async def _watch(self) -> None:
        while True:
            began_s = time.monotonic()
            if self._jobs:
                processes = read_processes()
                for job in list(self._jobs):
                    job.watch(processes)
            await asyncio.sleep(max(WATCH_S, 10 * (time.monotonic() - began_s)))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        requests: asyncio.Queue[Request | None] = asyncio.Queue()
        if not _same_user(writer.get_extra_info("socket")):
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
                stream = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
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
        except (SandboxError, OSError) as error:
            return Reply(
                error=str(error), lost=not isinstance(error, SandboxError) or isinstance(error, SandboxLostError)
            )

    async def _run(self, slot: Slot, request: Request) -> Finished:
        """Raises SandboxLostError: it did not start; OSError."""
        loop, limits, relay = asyncio.get_running_loop(), slot.limits, Relay()
        stream = None
        if request.method == "start":
            stream = self._streams.pop(request.stream)
            limits = msgspec.structs.replace(limits, cpu_s=math.inf, wall_s=math.inf)
        with self._slots.spawn(slot, request, limits) as spawn:
            if "cwd" in spawn.options and not shutil.which(request.argv[0], path=spawn.options["env"]["PATH"]):
                return Finished(stdout=b"", stderr=f"{request.argv[0]}: not found\n".encode(), code=127)
            process = _start(spawn, stream)
        if stream is not None:
            stream.close()
        job = Job(process, limits)
        self._jobs.add(job)
        outputs = [Output(limits.output_bytes) for _ in range(2)]
        try:
            if spawn.block_fd is not None:
                assert spawn.status_fd is not None
                with os.fdopen(spawn.block_fd, "wb") as block:
                    child = json.loads(await _first_report(spawn.status_fd))["child-pid"]
                    await relay.open(child, slot.network)
                    block.write(b"\n")
            for output, pipe in zip(outputs, (process.stdout, process.stderr), strict=True):
                if pipe is None:
                    output.closed.set_result(None)
                else:
                    await loop.connect_read_pipe(lambda output=output: output, pipe)  # type: ignore[misc]
            if process.stdin is not None:
                transport, _ = await loop.connect_write_pipe(asyncio.Protocol, process.stdin)
                transport.write(request.stdin)
                transport.write_eof()
            wait_s = min(request.timeout_s or limits.wall_s, limits.wall_s)
            try:
                async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                    await asyncio.shield(job.exited)
            except TimeoutError:
                job.end("wall")
                await job.exited
            await asyncio.wait([output.closed for output in outputs], timeout=KILL_S)
        finally:
            if not job.exited.done():
                job.end("")
                await job.exited
            relay.close()
            self._jobs.discard(job)
            self._kill_strays()
        code = process.returncode
        if spawn.status_fd is not None:
            code = _exit_code(spawn.status_fd, code, started=bool(job.ended), errors=bytes(outputs[1].data))
        return Finished(
            stdout=bytes(outputs[0].data),
            stderr=bytes(outputs[1].data),
            code=code,
            ended=job.ended,
            discarded_bytes=sum(each.discarded for each in outputs),
            cpu_s=job.cpu_s,
            wall_s=job.wall_s,
        )


def _start(spawn: Spawn, stream: socket.socket | None) -> subprocess.Popen[bytes]:
    given = stream.fileno() if stream else subprocess.PIPE
    return subprocess.Popen(spawn.argv, stdin=given, stdout=given, stderr=subprocess.PIPE, **spawn.options)


async def _first_report(status_fd: int) -> bytes:
    """The line in which bubblewrap names the command's process.

    Raises:
        SandboxLostError: it ended instead.
    """
    loop, report = asyncio.get_running_loop(), b""
    async with asyncio.timeout(KILL_S):
        while not report.endswith(b"\n"):
            readable = loop.create_future()
            loop.add_reader(status_fd, readable.set_result, None)
            try:
                await readable
            finally:
                loop.remove_reader(status_fd)
            if not (byte := os.read(status_fd, 1)):
                raise SandboxLostError("the sandbox did not start: bubblewrap ended")
            report += byte
    return report


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants, the first process of a namespace before its parent."""
    for pid in reversed(usage_of(root, read_processes()).pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _exit_code(status_fd: int, code: int, *, started: bool, errors: bytes) -> int:
    """What bubblewrap reports, where the command cannot write.

    Raises:
        SandboxLostError: the command did not start.
    """
    with os.fdopen(status_fd) as status:
        reports = [json.loads(line) for line in status]
    for report in reports:
        if "exit-code" in report:
            return int(report["exit-code"])
    if started:
        return code
    first = errors.decode(errors="replace").strip().split("\n")[-1]
    raise SandboxLostError(f"the sandbox did not start: {first or f'bubblewrap ended with {code}'}")


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _answer(writer: asyncio.StreamWriter, reply: Reply) -> None:
    data = msgspec.msgpack.encode(reply)
    writer.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)


async def _read_requests(reader: asyncio.StreamReader, requests: asyncio.Queue[Request | None]) -> None:
    """Pass on requests until the connection closes, then None."""
    decoder = msgspec.msgpack.Decoder(Request)
    with suppress(OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
        while (length := int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")) <= MOST_BYTES:
            requests.put_nowait(decoder.decode(await reader.readexactly(length)))
    requests.put_nowait(None)
