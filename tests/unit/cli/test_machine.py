from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidemill.cli.doctor import cache_contents, cpu, cpu_share, disk, memory, probe_torch
from tidemill.cli.probe import probe
from tidemill.models.cache import MANIFEST

MEMINFO = "MemTotal:       16000 kB\nMemFree: 1 kB\nMemAvailable:   8000 kB\n"


def test_the_probe_itself() -> None:
    threads = torch.get_num_threads()
    try:
        found = probe()
    finally:
        torch.set_num_threads(threads)
    assert found["version"] == torch.__version__
    assert found["threads"]["1"] > 0
    # 2 × 256 × 576 × 1536 = 453 million operations
    assert found["gflops"] == pytest.approx(0.453 / found["threads"]["1"], rel=1e-2)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("limit", "share"), [("150000 100000", 1.5), ("max 100000", None)])
def test_cpu_share(tmp_path: Path, limit: str, share: float | None) -> None:
    write(tmp_path / "cpu.max", limit)
    assert cpu_share(tmp_path) == share


def test_cpu_share_of_older_systems(tmp_path: Path) -> None:
    assert cpu_share(tmp_path) is None
    write(tmp_path / "cpu/cpu.cfs_quota_us", "50000")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    assert cpu_share(tmp_path) == 0.5
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1")
    assert cpu_share(tmp_path) is None


def test_memory_without_and_with_a_limit(tmp_path: Path) -> None:
    meminfo = write(tmp_path / "meminfo", MEMINFO)
    assert memory(tmp_path, meminfo) == {"total": 16_384_000, "available": 8_192_000, "limit": None}
    write(tmp_path / "memory.max", "max")
    assert memory(tmp_path, meminfo)["limit"] is None
    write(tmp_path / "memory.max", "6000000")
    write(tmp_path / "memory.current", "1000000")
    assert memory(tmp_path, meminfo) == {"total": 16_384_000, "available": 5_000_000, "limit": 6_000_000}
    write(tmp_path / "memory.current", "7000000")
    assert memory(tmp_path, meminfo)["available"] == 0


def test_memory_where_there_is_no_meminfo(tmp_path: Path) -> None:
    found = memory(tmp_path, tmp_path / "none")
    assert found["total"] == found["available"] > 0


def test_disk_of_a_folder_yet_to_be_made(tmp_path: Path) -> None:
    found = disk(tmp_path / "a" / "b")
    assert found["writable"]
    assert 0 < found["free"] <= found["total"]
    assert not disk(write(tmp_path / "file", "") / "below")["writable"]


def test_cores() -> None:
    found = cpu()
    assert 1 <= found["usable"] <= found["cores"]


def test_cache_contents(tmp_path: Path) -> None:
    assert cache_contents(tmp_path / "none")["models"] == []
    write(tmp_path / "b" / MANIFEST, "12345")
    write(tmp_path / "a" / "weights", "123")
    write(tmp_path / "b.lock", "")
    write(tmp_path / "profiles" / "1.json", "{}")  # what calibrate keeps is no model
    assert cache_contents(tmp_path)["models"] == [
        {"name": "a", "bytes": 3, "complete": False},
        {"name": "b", "bytes": 5, "complete": True},
    ]


def test_an_unreadable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert cache_contents(tmp_path) == {"path": str(tmp_path), "models": [], "error": "permission denied"}


def test_a_disk_behind_a_folder_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    assert disk(tmp_path / "a")["writable"]


def outcome(monkeypatch: pytest.MonkeyPatch, code: str) -> dict[str, object]:
    real = subprocess.run
    monkeypatch.setattr("subprocess.run", lambda _, **options: real([sys.executable, "-c", code], **options))
    return probe_torch(deadline_s=20.0)


def test_the_probes_last_line_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, f"print('noise'); print({json.dumps('{}')!r}.strip('\"'))") == {}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('no torch')", "ImportError: no torch"),
        ("raise SystemExit(3)", "ended with code 3"),
        ("pass", "list index out of range"),
        ("print('nonsense')", "Expecting value"),
    ],
)
def test_a_broken_torch_is_reported(monkeypatch: pytest.MonkeyPatch, code: str, says: str) -> None:
    assert says in str(outcome(monkeypatch, code)["error"])


def test_a_hanging_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run
    monkeypatch.setattr(
        "subprocess.run", lambda _, **o: real([sys.executable, "-c", "import time; time.sleep(60)"], **o)
    )
    assert probe_torch(deadline_s=0.2) == {"error": "no answer within 0 s"}
