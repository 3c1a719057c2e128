"""Free memory under limits of control groups, in folders that take the place of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.hardware.free_memory import free_host_memory

MACHINE = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"
MIB = 1024**2
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in {"proc/meminfo": MACHINE, **contents}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def v2(group: str, most: int | str, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"anon 1\ninactive_file {cached}\nfile_mapped 7\n"
    path = f"{V2}{group}"
    return {f"{path}/memory.max": f"{most}\n", f"{path}/memory.current": f"{used}\n", f"{path}/memory.stat": stat}


def v1(group: str, most: int, used: int, cached: int = 0) -> dict[str, str]:
    path, stat = f"{V1}{group}", f"total_inactive_file {cached}\n"
    return {
        f"{path}/memory.limit_in_bytes": f"{most}\n",
        f"{path}/memory.usage_in_bytes": f"{used}\n",
        f"{path}/memory.stat": stat,
    }


HOST = 8000 * 1024


@pytest.mark.parametrize(
    ("groups", "tree", "free", "limit"),
    [
        ("", {}, HOST, "this machine"),
        ("0::/\n", {}, HOST, "this machine"),
        ("0::/a/b\n", v2("/a/b", "max", 5), HOST, "this machine"),
        ("0::/a/b\n", v2("/a/b", 6 * MIB, 2 * MIB), 4 * MIB, f"{V2}/a/b/memory.max"),
        ("0::/a/b\n", v2("/a/b", 6 * MIB, 4 * MIB, cached=3 * MIB), 5 * MIB, f"{V2}/a/b/memory.max"),
        ("0::/a/b\n", v2("/a/b", 2 * MIB, 3 * MIB), 0, f"{V2}/a/b/memory.max"),
        # A group around it is tighter, even if the inner one has no limit.
        ("0::/a/b\n", v2("/a/b", "max", 5) | v2("/a", 3 * MIB, MIB), 2 * MIB, f"{V2}/a/memory.max"),
        ("0::/a/b\n", v2("/a/b", 6 * MIB, 0) | v2("/a", 3 * MIB, MIB), 2 * MIB, f"{V2}/a/memory.max"),
        # In a container the path is that of the host, and the limit is at the root of what is mounted.
        ("0::/docker/1f\n", v2("", 3 * MIB, MIB), 2 * MIB, f"{V2}/memory.max"),
        ("0::/../../x\n", v2("", 3 * MIB, MIB), 2 * MIB, f"{V2}/memory.max"),
        ("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n", v1("/a", 3 * MIB, 2 * MIB, cached=MIB), 2 * MIB,
         f"{V1}/a/memory.limit_in_bytes"),
        ("4:memory:/a\n", v1("/a", 9223372036854771712, 5), HOST, "this machine"),
        ("4:memory:/a/b\n", v1("/a/b", 9223372036854771712, 5) | v1("/a", 3 * MIB, MIB), 2 * MIB,
         f"{V1}/a/memory.limit_in_bytes"),
        ("4:memory:/docker/1f\n", v1("", 3 * MIB, MIB), 2 * MIB, f"{V1}/memory.limit_in_bytes"),
        ("nonsense\n0::/a\n", {f"{V2}/a/memory.max": "many\n"}, HOST, "this machine"),
    ],
)  # fmt: skip
def test_the_tightest_limit_counts(tmp_path: Path, groups: str, tree: dict[str, str], free: float, limit: str) -> None:
    files(tmp_path, {"proc/self/cgroup": groups, **tree})
    found = free_host_memory(tmp_path)
    assert found is not None
    assert (found.bytes, found.limit.removeprefix(f"{tmp_path}/")) == (free, limit)


def test_a_system_without_proc_tells_nothing(tmp_path: Path) -> None:
    assert free_host_memory(tmp_path) is None
