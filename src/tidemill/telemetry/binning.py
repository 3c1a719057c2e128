"""Bins of histograms: one for each value if there are few, otherwise of equal width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tidemill.core.records import Record

BINS = 24
CATEGORIES = 12


class Bins(Record):
    """Share of the values in each bin, of the first and the last steps; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    values: tuple[float, ...] = ()  # the value of each bin, if each value has its own


def make_bins(first: Sequence[float], last: Sequence[float], span: tuple[float, float] | None = None) -> Bins:
    """Common bins of both windows: one per value if there are few values, otherwise of equal width (over `span`)."""
    first, last = ([value for value in part if math.isfinite(value)] for part in (first, last))
    edges, values = bin_edges(sorted({*first, *last}), span)
    return Bins(edges=tuple(edges), first=_shares(first, edges), last=_shares(last, edges), values=values)


def bin_edges(
    distinct: Sequence[float], span: tuple[float, float] | None = None
) -> tuple[list[float], tuple[float, ...]]:
    """Edges of the bins of some values (distinct and ascending), and the value of each bin if each has its own."""
    low, high = (distinct[0], distinct[-1]) if distinct else (0.0, 0.0)
    whole = all(value == int(value) for value in distinct)
    discrete = span is None and (high - low < BINS if whole else len(distinct) <= CATEGORIES)
    low, high, whole = (*span, False) if span else (low, high, whole)
    if discrete and whole:
        distinct = [low + index for index in range(int(high - low) + 1)]
    if discrete:
        middles = [(one + other) / 2 for one, other in pairwise(distinct)]
        return [low - 0.5, *middles, high + 0.5], tuple(distinct)
    width = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS
    return [low + index * width for index in range(BINS + 1)], ()


def _shares(values: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return tuple((counts / max(len(values), 1)).tolist())
