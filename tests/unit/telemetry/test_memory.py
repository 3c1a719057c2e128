from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tidemill.telemetry.manifest import peak_rss_bytes


def test_peak_memory_does_not_fall() -> None:
    before = peak_rss_bytes()
    block = bytearray(before + 64_000_000)
    size = len(block)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert peak_rss_bytes() >= size


def test_peak_memory_without_proc_is_read_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path, encoding: str = "") -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert peak_rss_bytes() in {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit for unit in (1, 1024)}
