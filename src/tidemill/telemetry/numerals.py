"""Numbers, and names with numbers in them, as people read them."""

from __future__ import annotations

import math
import re


def duration(seconds: float) -> str:
    """`4.1 s`, `2:31`, `1:02:07`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration_in_words(seconds: float) -> str:
    """`42 s`, `3 min 12 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def compact(value: float) -> str:
    """Three figures and a suffix: `987`, `1.24k`, `3.1M`, `2.05G`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def decimal(value: float | None) -> str:
    """Three figures whatever the size; `-` for nothing and for what is not a number."""
    if value is None or not math.isfinite(value):
        return "-"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def between(low: float | None, high: float | None) -> str:
    """`0.620 to 0.751`: the ends of an interval."""
    return f"{decimal(low)} to {decimal(high)}"


def percent(share: float | None) -> str:
    """A share of one as `0 %`, `0.8 %`, `42 %`."""
    if share is None or not math.isfinite(share):
        return "-"
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 9.95 else f"{value:.0f} %"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def dollars(value: float) -> str:
    """`$1,234`, `$12.34`, `$0.0123`."""
    return f"${value:,.0f}" if value >= 1000 else f"${value:.2f}" if value >= 1 else f"${value:.4f}"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts spot-2 before spot-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
