from __future__ import annotations

import pytest

from tidemill.core.formatting import (
    compact,
    counted,
    decimal,
    doing,
    dollars,
    duration,
    gigabytes,
    interval,
    long_duration,
    natural_sort_key,
    percent,
    quantity,
    size,
)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0 s"), (4.12, "4.1 s"), (59.4, "59 s"), (151, "2:31"), (3727, "1:02:07")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (987, "987"), (999.7, "1k"), (1240, "1.24k"), (3.1e6, "3.1M"), (2.05e9, "2.05G")]
)
def test_compact_counts(value: float, shown: str) -> None:
    assert compact(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (0.0, "0.000"),
        (0.5312, "0.531"),
        (12.34, "12.3"),
        (2.4e-4, "2.4e-4"),
        (-3e-7, "-3.0e-7"),
        (1.5e12, "1.5e12"),
        (1.5e5, "1.5e5"),
    ],
)
def test_decimals(value: float | None, shown: str) -> None:
    assert decimal(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(None, "-"), (0.0, "0 %"), (0.008, "0.8 %"), (0.42, "42 %"), (0.0996, "10 %"), (1.0, "100 %")]
)
def test_percentages(share: float | None, shown: str) -> None:
    assert percent(share) == shown


def test_gigabytes_are_decimal() -> None:
    assert gigabytes(2_950_000_000) == "2.95 GB"


@pytest.mark.parametrize(
    ("value", "shown"), [(1234.4, "$1,234"), (12.345, "$12.35"), (0.01234, "$0.0123"), (0, "$0.0000")]
)
def test_dollars(value: float, shown: str) -> None:
    assert dollars(value) == shown


def test_names_with_numbers_sort_by_them() -> None:
    names = ["spot-10", "local", "spot-2", "7", "spot"]
    assert sorted(names, key=natural_sort_key) == ["7", "local", "spot", "spot-2", "spot-10"]


@pytest.mark.parametrize(
    ("value", "noun", "text"),
    [
        (1, "sample", "1 sample"),
        (1280, "sample", "1,280 samples"),
        (2, "microbatch", "2 microbatches"),
        (2, "epoch", "2 epochs"),
    ],
)
def test_counted(value: int, noun: str, text: str) -> None:
    assert counted(value, noun) == text


@pytest.mark.parametrize(("seconds", "shown"), [(41.6, "42 s"), (192, "3 min 12 s"), (7500, "2 h 05 min")])
def test_long_durations(seconds: float, shown: str) -> None:
    assert long_duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (999_700, "1 MB"), (1.4e11, "140 GB"), (2.52e12, "2.52 TB")]
)
def test_sizes(count: float, shown: str) -> None:
    assert size(count) == quantity(count, "bytes") == shown


def test_other_quantities() -> None:
    assert [quantity(value, "s") for value in (12.3456, 1234.5, 3.1e7)] == ["12.35 s", "1,234 s", "3.1e+07 s"]
    assert [doing(count, "GPU", "learn") for count in (1, 8)] == ["1 GPU learns", "8 GPUs learn"]
    assert interval((0.62, 0.751)) == "0.620 to 0.751"
    assert interval((None, 0.5)) == interval(None) == "no interval: no two values differ"
