"""Quantities as people read them."""

from __future__ import annotations

BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """`2.52 TB`, `140 GB`, `3.1 MB`."""
    for limit, unit in BYTE_UNITS:
        if abs(count) >= limit * 0.9995:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def quantity(value: float, unit: str) -> str:
    """A figure's value with its unit."""
    if unit == "bytes":
        return size(value)
    return f"{value:,.4g} {unit}" if abs(value) < 1e6 else f"{value:.4g} {unit}"
