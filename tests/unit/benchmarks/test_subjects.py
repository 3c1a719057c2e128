"""The checks that several benchmarks share: counts, equal sides, groups with signal."""

from __future__ import annotations

import pytest

from benchmarks.subjects import check_counts, check_equal, check_signal
from benchmarks.turns import SideResult, Turn, Work


def side(*turns: dict[str, float]) -> SideResult:
    work = Work(samples=64, prompt_tokens=1, completion_tokens=1)
    return SideResult(turns=[Turn(wall_s=1, cpu_s=1, work=work, notes=notes) for notes in turns], peak_rss_bytes=1)


def test_a_count_of_zero_or_of_no_number_fails() -> None:
    check_counts("seed 0", evictions=1, migrated_samples=2)
    with pytest.raises(RuntimeError, match=r"^seed 0: no evictions, no migrated samples, so there is nothing"):
        check_counts("seed 0", evictions=0, migrated_samples=float("nan"), steps=3)


def test_sides_with_different_values_fail() -> None:
    check_equal("samples", {"ours": [1, 2], "theirs": [1, 2]})
    with pytest.raises(RuntimeError, match=r"different samples: {'ours': 1, 'theirs': 2}"):
        check_equal("samples", {"ours": 1, "theirs": 2})


def test_a_step_whose_groups_have_no_signal_fails() -> None:
    result = side({"groups_without_signal": 0}, {"groups_without_signal": 1})
    check_signal("TRL", result, most=1)
    with pytest.raises(RuntimeError, match="TRL: 1 groups of a step have no signal, allowed are 0"):
        check_signal("TRL", result)
