"""The default size of microbatches must be nearly the fastest, and sizes must make a difference."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import microbatches
from benchmarks.grpo_step import CASES
from benchmarks.measuring import exit_code
from benchmarks.microbatches import DEFAULT, NAMES, SIZES, record_of
from benchmarks.turns import SideResult, Turn, Work


def test_a_slow_default_misses_the_aim() -> None:
    cpu_s = dict.fromkeys(map(str, SIZES), 1.0)
    assert exit_code(record_of("even", cpu_s, {"512": 0.9, "1024": 1.05})) == 0
    assert exit_code(record_of("slow", cpu_s, {"512": 0.9, "1024": 1.2})) == 1


def test_the_default_is_among_the_sizes() -> None:
    assert DEFAULT in SIZES


def test_a_size_without_effect_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignored(sides: dict[str, Any], **more: Any) -> dict[str, SideResult]:
        notes = {"groups_without_signal": 0.0, "microbatches": 3.0}
        turn = Turn(wall_s=1, cpu_s=1, work=Work(samples=1, prompt_tokens=1, completion_tokens=1), notes=notes)
        return {name: SideResult(turns=[turn], peak_rss_bytes=1) for name in sides}

    monkeypatch.setattr(microbatches, "take_turns", ignored)
    monkeypatch.setattr(microbatches, "char_model", lambda: "model")
    (small,) = [case for case in CASES if case.name in NAMES and case.small]
    with pytest.raises(RuntimeError, match="2048 tokens and 512 tokens have the same number of microbatches"):
        microbatches._measured(small, 1)
