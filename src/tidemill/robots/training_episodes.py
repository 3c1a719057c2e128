"""`training_episodes.jsonl` of a run: the episodes that ended in each iteration, with their seeds and parameters.

A line has `step`, the number of the iteration, and a list for each column: shard, world, number (of the world's
episodes), seed, length in control steps, return, success, fell, and every figure and parameter of the simulation. A
seed determines where the episode starts, its parameters, its observation noise and its pushes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidemill.robots.simulation import State
from tidemill.telemetry.jsonl import JsonlWriter, read_lines

EPISODES = "training_episodes.jsonl"
PREFIX = "episode/"


class TrainingEpisodes:
    """Writes the file in the folder of a run. Raises UserError: it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / EPISODES
        self._writer = JsonlWriter(self._path)

    def resume(self, step: int) -> None:
        """Delete the lines of iterations after `step`, which are computed again."""
        for offset, line in read_lines(self._path):
            if line["step"] > step:
                os.truncate(self._path, offset)
                break

    def write(self, step: int, experience: Sequence[State]) -> None:
        """Record what ended in an iteration, by shard. Raises UserError: the disk is full."""
        ended = [
            {name.removeprefix(PREFIX): values for name, values in chunk.items() if name.startswith(PREFIX)}
            for chunk in experience
        ]
        some = [columns | {"shard": np.full(len(columns["world"]), at)} for at, columns in enumerate(ended) if columns]
        if some:
            joined = {name: np.concatenate([columns[name] for columns in some]).tolist() for name in some[0]}
            self._writer.write({"step": step} | joined)

    def close(self) -> None:
        self._writer.close()
