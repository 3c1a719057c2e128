"""The experience of a chunk while it is recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class Experience:
    """Arrays by name: some grow by a step, others by the worlds to which something happened."""

    def __init__(self) -> None:
        self._steps: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._rows: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)

    def add(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Record a step: arrays [N, ...], which nobody changes from now on."""
        for name, values in columns.items():
            self._steps[name].append(values)

    def add_rows(self, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Record events: arrays [events, ...]."""
        for name, values in rows.items():
            self._rows[name].append(values)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """[N, steps, ...] and [events, ...]."""
        steps = {name: np.stack(values, axis=1) for name, values in self._steps.items()}
        return steps | {name: np.concatenate(values) for name, values in self._rows.items()}
