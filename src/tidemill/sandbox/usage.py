"""What the processes of sandboxes use, read from /proc."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidemill.core import ipc

TICKS = os.sysconf("SC_CLK_TCK")
RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s*(\d+) kB", re.MULTILINE)
"""Anonymous memory; and shared memory, which is anonymous or of a mapped file of a tmpfs."""


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
            with suppress(OSError, IndexError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
                    if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                        total += int(line.split()[1]) << 10
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
