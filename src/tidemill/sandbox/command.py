"""A running command of a sandbox, in the launcher's event loop; and what its processes use, from /proc."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core import ipc
from tidemill.sandbox.network import Relay
from tidemill.sandbox.records import Ending, Finished, Limits, SandboxLostError
from tidemill.sandbox.slots import Spawn

OWN_THREADS = 8
"""Of bubblewrap, within the limit that is watched; the kernel refuses the processes beyond the command's own."""
REPORT_BYTES = 1 << 16
KILL_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB", re.MULTILINE)
"""Anonymous memory; and shared memory, which is anonymous or of a mapped file of a tmpfs."""
PROPORTIONAL = re.compile(rb"^Pss_(?:Anon|Shmem):\s*(\d+) kB", re.MULTILINE)
"""The same with each shared page divided by the number of processes that share it."""


class Command:
    """Starts when it is made. `finish` must follow, which ends it in every case."""

    def __init__(self, spawn: Spawn, limits: Limits, stream: socket.socket | None) -> None:
        """Raises OSError."""
        given = stream.fileno() if stream else subprocess.PIPE
        self._spawn, self._limits = spawn, limits
        self._descriptors = ExitStack()
        for each in (spawn.status_fd, spawn.block_fd):
            if each is not None:
                self._descriptors.callback(os.close, each)
        try:
            self._process = subprocess.Popen(
                spawn.argv, stdin=given, stdout=given, stderr=subprocess.PIPE, **spawn.options
            )
        except BaseException:
            self._descriptors.close()
            raise
        self._ended: Ending = ""
        self._began_s, self._cpu_s = time.monotonic(), 0.0
        self._reports = Reports()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_namespace(self) -> bool:
        """Whether all its processes end with it."""
        return self._spawn.status_fd is not None

    def watch(self, processes: dict[int, Process]) -> None:
        """End the command if all its processes together exceed a limit."""
        usage = usage_of(self.pid, processes)
        self._cpu_s = max(self._cpu_s, usage.cpu_s)
        if usage.cpu_s > self._limits.cpu_s:
            self._end("cpu")
        elif usage.threads > self._limits.processes + OWN_THREADS:
            self._end("processes")
        elif usage.memory_bytes > self._limits.memory_bytes and usage.exact_bytes() > self._limits.memory_bytes:
            self._end("memory")

    async def finish(self, stdin: bytes, wait_s: float, network: tuple[str, ...]) -> Finished:
        """Give it its input and connections, and collect its output, until it ends.

        Args:
            wait_s: its deadline; may be infinite.

        Raises:
            SandboxLostError: it did not start.
            OSError: the same.
        """
        exited = asyncio.create_task(_reaped(self.pid))
        relay, reports = Relay(), self._reports
        outputs = [Output(self._limits.output_bytes) for _ in range(2)]
        try:
            status_fd = self._spawn.status_fd
            await _read(reports, None if status_fd is None else os.fdopen(os.dup(status_fd), "rb"))
            if self._spawn.block_fd is not None:
                async with asyncio.timeout(KILL_S):
                    await reports.begun
                if reports.first is None:
                    raise SandboxLostError("the sandbox did not start: bubblewrap ended")
                await relay.open(reports.first, network)
                os.write(self._spawn.block_fd, b"\n")
            for output, pipe in zip(outputs, (self._process.stdout, self._process.stderr), strict=True):
                await _read(output, pipe)
            if self._process.stdin is not None:
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_write_pipe(asyncio.Protocol, self._process.stdin)
                transport.write(stdin)
                transport.write_eof()
            try:
                async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                    await asyncio.shield(exited)
            except TimeoutError:
                self._end("wall")
            await exited
            await asyncio.wait([output.closed for output in outputs], timeout=KILL_S)
        finally:
            if not exited.done():
                self._end("")
            self._process.returncode, used = await exited
            used += await self._namespace_ended()
            relay.close()
            self._descriptors.close()
        stdout, stderr = outputs
        code = self._reports.code  # as bubblewrap reports it, where the command cannot write
        if code is None and self.has_namespace and not self._ended:
            last_line = stderr.data.decode(errors="replace").strip().split("\n")[-1]
            why = last_line or f"bubblewrap ended with {self._process.returncode}"
            raise SandboxLostError(f"the sandbox did not start: {why}")
        return Finished(
            stdout=bytes(stdout.data),
            stderr=bytes(stderr.data),
            code=self._process.returncode if code is None else code,
            ended=self._ended,
            discarded_bytes=stdout.discarded + stderr.discarded,
            cpu_s=max(self._cpu_s, used),
            wall_s=time.monotonic() - self._began_s,
        )

    async def _namespace_ended(self) -> float:
        """CPU seconds of the namespace's first process, when it has ended: bubblewrap may end before it."""
        if self.has_namespace:
            try:
                async with asyncio.timeout(KILL_S):
                    await self._reports.closed
                    if self._reports.first is not None:
                        return (await _reaped(self._reports.first))[1]
            except (ChildProcessError, TimeoutError):
                pass  # bubblewrap has waited for it, and counts it
        return 0.0

    def _end(self, why: Ending) -> None:
        self._ended = self._ended or why
        kill_tree(self.pid)


class Output(asyncio.Protocol):
    """Keeps the first bytes of a stream, and counts the others."""

    def __init__(self, most: int) -> None:
        self.data, self.discarded, self._most = bytearray(), 0, most
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        kept = data[: self._most - len(self.data)]
        self.data += kept
        self.discarded += len(data) - len(kept)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Reports(Output):
    """Lines in which bubblewrap names the first process of a sandbox, and the exit code of the command."""

    def __init__(self) -> None:
        super().__init__(REPORT_BYTES)
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first: int | None = None  # known when the sandbox has begun

    @property
    def code(self) -> int | None:
        codes = [report["exit-code"] for report in self._all() if "exit-code" in report]
        return int(codes[0]) if codes else None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.first is None and (reports := self._all()):
            self.first = int(reports[0]["child-pid"])
            self.begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if not self.begun.done():
            self.begun.set_result(None)

    def _all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines(keepends=True) if line.endswith(b"\n")]


@dataclass
class Process:
    """One process, with the processor time of its ended children that it has waited for."""

    parent: int
    cpu_s: float
    threads: int
    memory_bytes: int  # resident and not of a file on disk; several processes count a page that they share


@dataclass
class Usage:
    """Of a process and all its descendants."""

    pids: list[int]
    cpu_s: float = 0.0
    threads: int = 0
    memory_bytes: int = 0

    def exact_bytes(self) -> int:
        """As `memory_bytes`, with pages that processes share counted once; slow."""
        total = 0
        for pid in self.pids:
            with suppress(OSError):
                total += sum(map(int, PROPORTIONAL.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes()))) << 10
        return total


def read_processes() -> dict[int, Process]:
    """All processes that /proc shows, by id."""
    processes = {}
    for pid, fields in ipc.process_stats():
        with suppress(OSError):  # it has ended
            memory = RESIDENT.findall(Path(f"/proc/{pid}/status").read_bytes())
            processes[pid] = Process(
                parent=int(fields[1]),
                cpu_s=sum(map(int, fields[11:15])) / TICKS,
                threads=int(fields[17]),
                memory_bytes=sum(map(int, memory)) << 10,
            )
    return processes


def usage_of(root: int, processes: dict[int, Process]) -> Usage:
    """The use of a process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    usage, left = Usage([]), [root]
    while left:
        pid = left.pop()
        if pid in processes:
            process = processes[pid]
            usage.pids.append(pid)
            usage.cpu_s += process.cpu_s
            usage.threads += process.threads
            usage.memory_bytes += process.memory_bytes
            left += children.get(pid, ())
    return usage


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants, the first process of a namespace before its parent."""
    for pid in reversed(usage_of(root, read_processes()).pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _read(output: Output, pipe: Any) -> None:
    """Let an output receive what a pipe gives; None: nothing."""
    if pipe is None:
        output.connection_lost(None)
    else:
        await asyncio.get_running_loop().connect_read_pipe(lambda: output, pipe)


async def _reaped(pid: int) -> tuple[int, float]:
    """Exit code of a child when it has ended, and CPU seconds of it and the children that it has waited for.

    Raises:
        ChildProcessError: it is no child of this process.
    """
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise ChildProcessError(f"there is no process {pid}") from error
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        while True:
            found, status, used = os.wait4(pid, os.WNOHANG)  # noqa: ASYNC222 -- it does not wait
            if found:
                return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
