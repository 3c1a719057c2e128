from __future__ import annotations

import pytest

from tidemill.telemetry.binning import BINS, make_bins
from tidemill.telemetry.report.charts import histograms
from tidemill.telemetry.report.sample_cards import SampleWindow
from tidemill.telemetry.sample_files import Sample


def test_few_whole_values_have_a_bin_each() -> None:
    bins = make_bins([1, 1, 2], [2, 3, 3, 3])
    assert list(bins.edges) == [0.5, 1.5, 2.5, 3.5]
    assert list(bins.values) == [1, 2, 3]
    assert bins.first == pytest.approx([2 / 3, 1 / 3, 0])
    assert bins.last == (0, 0.25, 0.75)


def test_few_other_values_have_a_bin_each_too() -> None:
    bins = make_bins([0.0, 0.1], [1.0])
    assert list(bins.edges) == [-0.5, 0.05, 0.55, 1.5]
    assert (*bins.first, *bins.last) == (0.5, 0.5, 0, 0, 0, 1)
    assert list(bins.values) == [0.0, 0.1, 1.0], "labelled by the values, not by the middle of uneven bins"


def test_many_values_share_bins_and_the_highest_is_counted() -> None:
    values = [index / 100 for index in range(101)]
    bins = make_bins(values, [1.0])
    assert len(bins.first) == BINS and not bins.values
    assert sum(bins.first) == pytest.approx(1) and bins.last[-1] == 1


def test_long_completions_have_bins_of_whole_tokens() -> None:
    bins = make_bins(list(range(3, 250)), [])
    # 247 lengths in 24 bins: 11 tokens each (ceil(247 / 24)), from 3 to 267.
    assert (bins.edges[0], bins.edges[1], bins.edges[-1]) == (3, 14, 267)
    assert sum(bins.first) == pytest.approx(1) and sum(bins.last) == 0


def test_a_span_fixes_the_edges() -> None:
    bins = make_bins([-8.0, 0.0], [-0.01], span=(-8.0, 0.0))
    assert (bins.edges[0], bins.edges[-1]) == (-8.0, 0.0)
    assert bins.first[0] == bins.first[-1] == 0.5 and bins.last[-1] == 1


def test_invalid_rewards_and_nan_are_excluded_from_histograms() -> None:
    assert make_bins([float("nan"), 1.0], []).first == (1.0,)
    samples = (
        Sample(step=1, reward=5.0, valid=False, token_ids=(1, 2, 3), logprobs=(-20.0, None)),
        Sample(step=1, token_ids=(1, 2, 3)),
    )
    found = histograms(SampleWindow(steps=(1,), samples=samples), SampleWindow())
    assert [one.title for one in found] == ["Completion length", "Token logprob"]
    assert found[1].bars[0].first > 0, "values below the floor are counted in the lowest bin"


def test_no_samples_make_no_histograms() -> None:
    assert histograms(SampleWindow(), SampleWindow()) == []
