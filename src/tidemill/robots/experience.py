"""The experience of chunks while it is recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


class Experience:
    """Arrays of all shards by name: some grow by a step, others by the worlds to which something happened."""

    def __init__(self, shards: int = 1) -> None:
        self._shards = shards
        self._steps: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._rows: dict[str, list[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]] = defaultdict(list)

    def add(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Record a step: arrays [N, ...], which nobody changes from now on."""
        for name, values in columns.items():
            self._steps[name].append(values)

    def add_rows(self, worlds: npt.NDArray[np.int64], rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Record events of worlds: arrays [events, ...]."""
        for name, values in rows.items():
            self._rows[name].append((worlds, values))

    def arrays(self) -> list[dict[str, npt.NDArray[Any]]]:
        """[N, steps, ...] and [events, ...] of each shard, sorted by name."""
        found: list[dict[str, npt.NDArray[Any]]] = [{} for _ in range(self._shards)]
        for name, values in self._steps.items():
            for arrays, part in zip(found, np.split(np.stack(values, axis=1), self._shards), strict=True):
                arrays[name] = part
        size = len(found[0]["rewards"])
        for name, events in self._rows.items():
            shards = np.concatenate([worlds for worlds, _ in events]) // size
            rows = np.concatenate([values for _, values in events])
            for shard in np.unique(shards):
                found[shard][name] = rows[shards == shard]
        return [dict(sorted(arrays.items())) for arrays in found]
