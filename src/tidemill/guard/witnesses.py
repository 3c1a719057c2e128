"""Figures that explain an alarm or support one, but never raise one: they need no gold, and honest runs move them, too.

They are computed from at most 64 samples of a batch, and compared with those of the run's first steps.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Final, Literal

import numpy as np

from tidemill.core.records import Prompt, Record, Trajectory

MOST_SAMPLES: Final = 64
MOST_CHARACTERS: Final = 2000  # of a text
SKELETON_CHARACTERS: Final = 80
START_STEPS, NEWEST_STEPS = 8, 5
DEVIATIONS: Final = 4.0  # standard deviations over the first steps
Direction = Literal["up", "down", "both"]
LEAST: Final[dict[str, tuple[Direction, float]]] = {
    "length": ("both", 0.25),
    "entropy": ("down", 0.25),
    "kl": ("up", 1.0),
    "compression": ("down", 0.15),
    "duplicates": ("up", 0.15),
    "format": ("up", 0.15),
    "disagreement": ("up", 0.25),
    "tool_calls": ("both", 0.25),
}
"""By witness: the direction that supports an alarm, and the least change, relative to the start."""


class Change(Record):
    """A witness that has left its start."""

    name: str
    start: float
    now: float


def witnesses(
    samples: Sequence[tuple[Prompt, Trajectory]], metrics: Mapping[str, float], *, reward_models: Sequence[str] = ()
) -> dict[str, float]:
    """Figures of one step, by name; a figure that the run does not have is left out.

    Args:
        samples: of the batch, in their order.
        metrics: of its update.
        reward_models: the names of rewards that are models; two or more can disagree.
    """
    chosen = [trajectory for _, trajectory in samples[:: -(-len(samples) // MOST_SAMPLES) or 1]]
    if not chosen:
        return {}
    texts = [trajectory.text[:MOST_CHARACTERS] for trajectory in chosen]
    found = {"length": fmean(trajectory.completion_length for trajectory in chosen), **of_texts(texts)}
    if "entropy" in metrics:
        found["entropy"] = metrics["entropy"]
    if (kl := metrics.get("kl_ref", metrics.get("approx_kl"))) is not None:
        found["kl"] = kl
    if any(trajectory.turns for trajectory in chosen):
        found["tool_calls"] = fmean(sum(len(turn.calls) for turn in trajectory.turns) for trajectory in chosen)
    scores = [
        [trajectory.reward.components[name] for name in reward_models]
        for trajectory in chosen
        if trajectory.reward is not None and all(name in trajectory.reward.components for name in reward_models)
    ]
    if len(reward_models) > 1 and len(scores) > 1 and np.std(scores, axis=0).min() > 0:
        correlations = np.corrcoef(np.array(scores), rowvar=False)
        found["disagreement"] = float(1 - correlations[np.triu_indices(len(reward_models), k=1)].mean())
    return found


def of_texts(texts: Sequence[str]) -> dict[str, float]:
    """compression: compressed bytes of all texts, as a share of their bytes; duplicates: share of texts that another
    equals; format: share of texts with the most frequent skeleton."""
    joined = "\x1e".join(texts).encode()
    copies = Counter(texts)
    skeletons = Counter(map(skeleton, texts))
    return {
        "compression": len(zlib.compress(joined, 1)) / max(len(joined), 1),
        "duplicates": sum(count for count in copies.values() if count > 1) / len(texts),
        "format": skeletons.most_common(1)[0][1] / len(texts),
    }


def skeleton(text: str) -> str:
    """The beginning of a text without its words and numbers: "The answer is 42." is "a a a 9."."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "9", text[: 4 * SKELETON_CHARACTERS]))[:SKELETON_CHARACTERS]


def changes(first: Sequence[Mapping[str, float]], newest: Sequence[Mapping[str, float]]) -> list[Change]:
    """The witnesses that have left their start: in `newest`, compared with the `first` steps."""
    found = list[Change]()
    for name, (direction, least) in LEAST.items():
        early = [step[name] for step in first if name in step]
        late = [step[name] for step in newest if name in step]
        if not early or not late:
            continue
        start, now = fmean(early), fmean(late)
        moved = {"up": now - start, "down": start - now, "both": abs(now - start)}[direction]
        if moved > max(DEVIATIONS * pstdev(early), least * abs(start)):
            found.append(Change(name=name, start=start, now=now))
    return found
