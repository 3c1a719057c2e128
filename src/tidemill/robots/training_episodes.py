"""`training_episodes.jsonl` of a run: the episodes that ended in each iteration, with their seeds and parameters.

A line has `step`, the number of the iteration, and a list for each column: shard, world, number (of the world's
episodes), seed, length in control steps, return, fell, success if it is known, and every figure and parameter. A
seed determines where the episode starts, its parameters, its observation noise and its pushes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidemill.robots.episodes import ended_episodes
from tidemill.robots.simulation import State
from tidemill.telemetry.jsonl import JsonlWriter, read_lines

EPISODES = "training_episodes.jsonl"


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
        shards = [
            chunk | {"episode/shard": np.full_like(chunk.get("episode/world", 0), at)}
            for at, chunk in enumerate(experience)
        ]
        if ended := ended_episodes(shards):
            self._writer.write({"step": step} | {name: values.tolist() for name, values in ended.items()})

    def close(self) -> None:
        self._writer.close()
