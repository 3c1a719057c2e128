"""Which samples people should judge."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from itertools import zip_longest
from pathlib import Path

from tidemill.controller.entries import Judged, decode
from tidemill.core.errors import UserError
from tidemill.core.evidence import GoldPair
from tidemill.guard.verdicts import SampleKey, sample_key, text_digest
from tidemill.telemetry.run_dir import TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.sample_files import Sample, read_samples

MOST_STEPS = 40
"""Steps whose samples are read."""
DISAGREE = 1 / 3
"""Difference of the ranks of reward and gold, from 0 to 1."""


def read_pairs(journal: Path) -> list[GoldPair]:
    """All gold scores of a run's guard, in order, also while it is in progress; empty if the file cannot be read."""
    never_pruned = "SELECT blob FROM entries WHERE step = (SELECT max(step) FROM entries) ORDER BY id"
    try:
        with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            entries = [decode(blob) for (blob,) in connection.execute(never_pruned) if b"judged" in blob]
    except (sqlite3.Error, UserError):
        return []
    return [pair for entry in entries if isinstance(entry, Judged) for pair in entry.evidence.pairs]


def strata(run: RunDirectory, pairs: Iterable[GoldPair]) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Samples with a valid reward: those on which reward and gold disagree; others with a high, and with a low reward.

    Each list is in a fixed random order. The samples are of steps evenly over the run, the newest included.
    """
    files = [path for _, purpose, path in run.sample_files() if purpose == TRAINING_PURPOSE]
    stride = -(-len(files) // MOST_STEPS) or 1
    read = [sample for path in files[::-stride] for sample in read_samples(path)]
    samples = sorted(
        (sample for sample in read if sample.valid and sample.reward is not None),
        key=lambda sample: text_digest(str(sample_key(sample))),
    )
    gold = {(pair.step, pair.prompt_id, pair.index): pair.gold for pair in pairs if pair.source == "batch"}
    scores = [gold.get((sample.step, sample.prompt_id, sample.index)) for sample in samples]
    gold_rank = _ranks([score for score in scores if score is not None])
    reward_rank = _ranks([sample.reward or 0.0 for sample in samples])
    disputed, high, low = list[Sample](), list[Sample](), list[Sample]()
    for sample, score in zip(samples, scores, strict=True):
        rank = reward_rank(sample.reward or 0.0)
        if score is not None and abs(rank - gold_rank(score)) >= DISAGREE:
            disputed.append(sample)
        else:
            (high if rank > 0.5 else low).append(sample)
    return disputed, high, low


def _ranks(values: Sequence[float]) -> Callable[[float], float]:
    """A function from a value to the share of values below it, and half of those equal to it."""
    ordered = sorted(values)
    return lambda value: (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered))


def chosen(samples: Sequence[Sequence[Sample]], judged: Collection[SampleKey], n: int) -> list[Sample]:
    """At most `n` samples that were not judged, of each stratum in turn."""
    left = [[sample for sample in stratum if sample_key(sample) not in judged] for stratum in samples]
    return [sample for turn in zip_longest(*left) for sample in turn if sample is not None][:n]
