"""The machines of the comparison with the published system were chosen by their means alone."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.market_statistics import statistics
from benchmarks.simulator.availability import HELD, MOST, SEED, WITHIN, fitting_seeds, held, segments
from tidemill.pool.traces import CapacityTrace


def test_the_seed_is_the_first_whose_means_are_the_published_ones() -> None:
    assert next(fitting_seeds()) == SEED


@pytest.mark.parametrize("row", ["8B", "14B"])
def test_as_many_instances_are_held_as_were_in_the_published_runs(row: str) -> None:
    assert fmean(held(trace, MOST[row]) for trace in segments().values()) == pytest.approx(HELD[row], abs=WITHIN)


def test_the_segments_are_of_three_kinds() -> None:
    found = {name: statistics(trace) for name, trace in segments().items()}

    assert max(found, key=lambda name: found[name].mean) == "A"
    assert max(found, key=lambda name: found[name].evictions) == "B"
    assert min(found, key=lambda name: found[name].mean) == "C"


def test_held_machines_are_limited_by_those_wanted() -> None:
    # 5 machines for an hour and 1 for another, of which 4 are taken: (4 + 1) / 2.
    assert held(CapacityTrace.of([(0.0, 5), (3600.0, 1)], end_s=7200.0), 4) == pytest.approx(2.5)
