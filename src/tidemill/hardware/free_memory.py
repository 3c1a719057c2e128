"""Host memory that a process can still use: the machine's, or less under a limit of its control groups.

A process that exceeds the limit of a control group is killed like one that exhausts the machine's memory. Page cache of
files is not counted as used: the kernel frees it first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tidemill.core.records import Record

CACHES = ("inactive_file", "active_file", "slab_reclaimable")
"""Fields of memory.stat, in bytes, that the kernel frees when memory is short."""
V1_CACHES = ("total_inactive_file", "total_active_file")
THIS_MACHINE = "this machine"
ANY_LIMIT = 2**60
"""Version 1 writes a limit close to 2**63 where there is none."""


class FreeMemory(Record):
    """Free memory, and what limits it."""

    bytes: float
    limit: str  # `this machine`, or the file of a control group


def free_host_memory(root: Path = Path("/")) -> FreeMemory | None:
    """The least of what the machine and all control groups of this process leave; None if the system does not tell.

    Args:
        root: where /proc and /sys are.
    """
    available = _bytes_of("MemAvailable", root / "proc/meminfo")
    if available is None:
        return None
    found = [FreeMemory(bytes=available, limit=THIS_MACHINE), *_of_groups(root)]
    return min(found, key=lambda free: free.bytes)


def resident_bytes(root: Path = Path("/")) -> float:
    """Resident memory of this process; 0 if the system does not tell."""
    return _bytes_of("VmRSS", root / "proc/self/status") or 0.0


def _bytes_of(field: str, file: Path) -> float | None:
    """The amount on one line of a file of /proc, which counts in kB."""
    found = re.search(rf"^{field}:\s+(\d+) kB", _text(file), re.MULTILINE)
    return 1024.0 * int(found[1]) if found else None


def _of_groups(root: Path) -> Iterator[FreeMemory]:
    """Every limit of a group of this process and of the groups around it."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            for base in (mounted, mounted / "unified"):
                for group in _around(base, path):
                    yield from _limit(group, "memory.max", "memory.current", CACHES)
        elif "memory" in controllers.split(","):
            for group in _around(mounted / "memory", path):
                yield from _limit(group, "memory.limit_in_bytes", "memory.usage_in_bytes", V1_CACHES)


def _around(base: Path, path: str) -> Iterator[Path]:
    """A group and its parents up to `base`. In a container the path may be one of the host, which is not visible."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _limit(group: Path, limit: str, usage: str, caches: tuple[str, ...]) -> Iterator[FreeMemory]:
    """The rest of a group's limit; nothing without one."""
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not (most.isdigit() and used.isdigit()) or int(most) >= ANY_LIMIT:
        return
    fields = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    cached = sum(int(fields[name]) for name in caches if fields.get(name, "").isdigit())
    yield FreeMemory(bytes=max(0.0, float(int(most) - int(used) + cached)), limit=str(group / limit))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
