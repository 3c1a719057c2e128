"""When Python looks for reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (50_000, 50, 100)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """For a process that schedules and computes nothing: it keeps very many samples and makes hardly any cycles, and
    with Python's own thresholds looking through them all takes a tenth of its time (`benchmarks/controller_scale.py`).

    Not for one that holds models: what engines and simulated workers leave behind lies in cycles, and is large.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
