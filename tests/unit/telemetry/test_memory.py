from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tidemill.telemetry.manifest import peak_rss_bytes


def test_the_peak_keeps_what_was_once_held() -> None:
    before = peak_rss_bytes()
    block = bytearray(before + 64_000_000)
    size = len(block)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert peak_rss_bytes() >= size


def test_without_proc_the_system_call_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: Path, encoding: str = "") -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert peak_rss_bytes() in {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit for unit in (1, 1024)}
