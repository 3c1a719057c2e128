"""Formats counts, numbers, sizes and durations for display."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence


def duration(seconds: float) -> str:
    """`4.1 s`, `2:31`, `1:02:07`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def long_duration(seconds: float) -> str:
    """`42 s`, `3 min 12 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def compact(value: float) -> str:
    """Three significant digits and a suffix: `987`, `1.24k`, `3.1M`, `2.05G`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def decimal(value: float | None) -> str:
    """About three significant digits: `0.123`, `12.3`, `1.2e-4`; `-` for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def between(low: float | None, high: float | None) -> str:
    """`0.620 to 0.751`."""
    return f"{decimal(low)} to {decimal(high)}"


def interval(ends: Sequence[float | None] | None) -> str:
    """A 95 % interval as `0.620 to 0.751`; `no interval: no two values differ` without ends."""
    if not ends or None in ends:
        return "no interval: no two values differ"
    return between(*ends)


def percent(share: float | None) -> str:
    """A fraction as `0 %`, `0.8 %`, `42 %`."""
    if share is None or not math.isfinite(share):
        return "-"
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def dollars(value: float) -> str:
    """`$1,234`, `$12.34`, `$0.0123`."""
    return f"${value:,.0f}" if value >= 1000 else f"${value:.2f}" if value >= 1 else f"${value:.4f}"


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort key that orders `spot-2` before `spot-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """`2.52 TB`, `140 GB`, `3.1 MB`."""
    for limit, unit in BYTE_UNITS:
        if abs(count) >= limit * 0.9995:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def quantity(value: float, unit: str) -> str:
    """A value with its unit; bytes as `size`."""
    if unit == "bytes":
        return size(value)
    return f"{value:,.4g} {unit}" if abs(value) < 1e6 else f"{value:.4g} {unit}"


def number(value: int) -> str:
    return f"{value:,}"


def counted(value: int, noun: str) -> str:
    """`1 sample`, `64 samples`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("batch") else f"{noun}s"
    return f"{number(value)} {noun if value == 1 else plural}"


def doing(value: int, noun: str, verb: str) -> str:
    """`1 GPU learns`, `8 GPUs learn`."""
    return f"{counted(value, noun)} {verb}{'s' if value == 1 else ''}"


def left_out_text(left_out: Mapping[str, int]) -> str:
    """`3 repeated, 1 kept for evaluation`; empty if nothing is left out."""
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
