"""Messages between processes, and the end of processes with everything that they started.

A message is its length in four bytes, big-endian, and then its bytes. Below 2 GiB `multiprocessing.connection` frames
bytes in the same way, and programs that cannot import Tidemill use that.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LENGTH_BYTES = 4
MOST_BYTES = 2**32 - 2  # `multiprocessing` has another use for 2**32 - 1
KILL_S, KILL_PAUSE_S = 10.0, 0.001
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def framed(data: bytes) -> bytes:
    """A message as it is sent. Raises ValueError: it is longer than 4 GiB."""
    return _checked(len(data), MOST_BYTES).to_bytes(LENGTH_BYTES, "big") + data


def receive(stream: socket.socket, most_bytes: int = MOST_BYTES) -> bytearray:
    """The next message of a socket that blocks.

    Raises:
        EOFError: the other end has closed it.
        ValueError: the message is longer than `most_bytes`.
        OSError: of the socket, its timeout included.
    """
    return _exactly(stream, _length(_exactly(stream, LENGTH_BYTES), most_bytes))


async def read(reader: asyncio.StreamReader, most_bytes: int = MOST_BYTES) -> bytes:
    """The next message of a stream. Raises: see `receive`."""
    return await reader.readexactly(_length(await reader.readexactly(LENGTH_BYTES), most_bytes))


def take(buffer: bytearray) -> Iterator[bytes]:
    """Remove the whole messages from the start of a buffer."""
    while len(buffer) >= LENGTH_BYTES:
        end = LENGTH_BYTES + _length(buffer[:LENGTH_BYTES], MOST_BYTES)
        if len(buffer) < end:
            return
        message = bytes(buffer[LENGTH_BYTES:end])
        del buffer[:end]
        yield message


def _length(head: bytes | bytearray, most_bytes: int) -> int:
    return _checked(int.from_bytes(head, "big"), most_bytes)


def _checked(length: int, most_bytes: int) -> int:
    if length > most_bytes:
        raise ValueError(f"a message of {length:,} bytes; at most {most_bytes:,} are accepted")
    return length


def _exactly(stream: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        received = stream.recv_into(left)
        if not received:
            raise EOFError("the other end has closed the connection")
        left = left[received:]
    return data


def child_processes() -> list[int]:
    """Children of this process, zombies included.

    They are found by their parents: `/proc/PID/task/TID/children` misses some while others end, see proc(5).
    """
    return [pid for pid, fields in process_stats() if int(fields[1]) == os.getpid()]


def process_stats() -> Iterator[tuple[int, list[bytes]]]:
    """The processes that /proc shows, with the fields of their `stat` from the third, the state."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):  # it has ended, or is another user's, which some machines hide
                stat = (folder / "stat").read_bytes()
                fields = stat[stat.rindex(b")") + 1 :].split()  # a name in parentheses may contain anything
                yield int(folder.name), fields


def adopt_descendants() -> None:
    """Make this process the parent of descendants whose parent ends, so that `kill_children` finds them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_children(timeout_s: float = KILL_S) -> None:
    """Kill the children of this process, and those that it adopts from them, until none is left."""
    deadline_s = time.monotonic() + timeout_s
    while (children := child_processes()) and time.monotonic() < deadline_s:
        for child in children:
            with suppress(ProcessLookupError):  # another thread may have waited for it
                os.kill(child, signal.SIGKILL)
        reap_children()
        time.sleep(KILL_PAUSE_S)


def reap_children() -> None:
    """Wait for the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Receive a signal when the parent ends.

    Args:
        parent: its process id; this process exits if it has ended already.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def wait_or_kill(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for a process that is to end by itself, and kill it if it does not in time."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
