"""Processes from /proc; Linux only."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTEN = "0A"
GONE = (
    FileNotFoundError,
    ProcessLookupError,
)  # depends on whether it ended before its file was opened or while it was read


def processes_below(pid: int) -> Iterator[int]:
    """All live descendants of a process.

    They are found by their parents: the kernel's list of children misses some while others end.
    """
    children: dict[int, list[int]] = {}
    for each in process_ids():
        try:
            stat = Path(f"/proc/{each}/stat").read_bytes()
        except GONE:
            continue
        parent = int(stat[stat.rindex(b")") + 1 :].split()[1])  # a name in parentheses may contain spaces
        children.setdefault(parent, []).append(each)
    below = [pid]
    for each in below:  # grows
        below += children.get(each, [])
    yield from below[1:]


def process_ids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def session_of(pid: int) -> int | None:
    """The leader of its session."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def command_lines(pids: Iterable[int]) -> dict[int, str]:
    """Command lines of the live ones; zombies have none."""
    lines = {}
    for pid in pids:
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except GONE:
            continue
        if line:
            lines[pid] = line
    return lines


def end_namespace(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    """Kill `unshare --kill-child`, and with it all processes of its namespace; raises TimeoutError if some stay."""
    below = list(processes_below(process.pid))
    process.kill()
    process.wait(deadline_s)
    end = time.monotonic() + deadline_s
    while left := command_lines(below):
        if time.monotonic() > end:
            raise TimeoutError(f"processes of the namespace after {deadline_s:g} s: {left}")
        time.sleep(0.05)


def listening(pids: Iterable[int]) -> list[str]:
    """Addresses ("127.0.0.1:8265") on which processes listen for TCP connections."""
    inodes = {link for pid in pids for link in _open_files(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.append(_address(fields[1]))
    return found


def _open_files(pid: int) -> Iterator[str]:
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(*GONE):  # closed meanwhile
                yield str(fd.readlink())
    except GONE:
        return


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's byte order."""
    host, port = text.split(":")
    words = bytes.fromhex(host)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    name = socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)
    return f"{name.removeprefix('::ffff:')}:{int(port, 16)}"
