"""Whole episodes of a policy without exploration: evaluations, cells of a twin, recordings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.config.robot import WORLDS_PER_SHARD
from tidemill.core.chunks import ChunkKey, ChunkRequest, Chunks
from tidemill.robots.policy_arrays import unpack
from tidemill.robots.simulation import State

PREFIX = "episode/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisodes:
    """E episodes, one of each world, so that short ones are not counted more often."""

    figures: dict[str, npt.NDArray[np.generic]]  # [E]: `episode/NAME` of `simulation`, without the prefix
    chunks: tuple[State, ...]  # experience of each shard, [64, T, ...]

    def mean(self, name: str) -> float:
        """The mean of a figure over the episodes."""
        return float(np.mean(self.figures[name].astype(np.float64)))

    def count(self, name: str) -> int:
        """The number of episodes in which a figure, `success` or `fell`, holds."""
        return int(np.sum(self.figures[name]))

    def __len__(self) -> int:
        return len(self.figures["return"])


async def play_episodes(
    chunks: Chunks,
    version: int,
    *,
    purpose: str,
    seed: int,
    episodes: int,
    steps: int,
    setup: int = 0,
    deterministic: bool = True,
    record: bool = False,
) -> PlayedEpisodes:
    """Play episodes, rounded up to whole shards: every chunk is one whole episode of its worlds.

    Args:
        purpose: names the episodes; with the seed it determines their starts and parameters.
        steps: of one episode until its time limit.
        record: also record poses.
    """
    requests = [
        ChunkRequest(
            key=ChunkKey(seed=seed, purpose=purpose, shard=shard, iteration=0),
            steps=steps,
            setup=setup,
            deterministic=deterministic,
            record=record,
        )
        for shard in range(math.ceil(episodes / WORLDS_PER_SHARD))
    ]
    answers = [unpack(answer.experience) for answer in await chunks.run(version, requests)]
    ended = ended_episodes(answers)
    figures = {name: values[ended["number"] == 0] for name, values in ended.items()}
    return PlayedEpisodes(figures=figures, chunks=tuple(answers))


def ended_episodes(chunks: Sequence[State]) -> State:
    """`episode/NAME` of all chunks, without the prefix. A shard whose environments mention no success has none."""
    chunks = [chunk for chunk in chunks if "episode/return" in chunk]
    names = dict.fromkeys(name for chunk in chunks for name in chunk if name.startswith(PREFIX))
    return {
        name.removeprefix(PREFIX): np.concatenate(
            [chunk[name] if name in chunk else np.zeros_like(chunk["episode/fell"]) for chunk in chunks]
        )
        for name in names
    }
