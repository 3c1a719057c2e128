"""The default size of microbatches must be nearly the fastest."""

from __future__ import annotations

from benchmarks.measuring import exit_code
from benchmarks.microbatches import DEFAULT, SIZES, record_of


def test_a_slow_default_misses_the_aim() -> None:
    cpu_s = dict.fromkeys(map(str, SIZES), 1.0)
    assert exit_code(record_of("even", cpu_s, {"512": 0.9, "1024": 1.05})) == 0
    assert exit_code(record_of("slow", cpu_s, {"512": 0.9, "1024": 1.2})) == 1


def test_the_default_is_among_the_sizes() -> None:
    assert DEFAULT in SIZES
