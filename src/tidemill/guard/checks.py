"""Which samples people should judge, and how their verdicts agree with the reward."""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tidemill.controller.entries import Judged, decode
from tidemill.core.errors import UserError
from tidemill.core.evidence import GoldPair
from tidemill.guard.verdicts import SampleKey, Verdict, sample_key
from tidemill.telemetry.run_dir import TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.sample_files import Sample, read_samples
from tidemill.telemetry.statistics import Interval, share_interval

MOST_STEPS = 40
"""Steps whose samples are read."""
Stratum: TypeAlias = Literal["disagreement", "high reward", "low reward", "middle"]
ORDER: tuple[Stratum, ...] = ("disagreement", "high reward", "disagreement", "low reward", "disagreement", "middle")
"""The strata take turns, each as often as it is here."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sample to judge."""

    sample: Sample
    reward: float
    stratum: Stratum


def read_pairs(journal: Path) -> list[GoldPair]:
    """All gold scores of a run's guard, in order, also while it is in progress; empty if the file cannot be read."""
    never_pruned = "SELECT blob FROM entries WHERE step = (SELECT max(step) FROM entries) ORDER BY id"
    try:
        with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            entries = [decode(blob) for (blob,) in connection.execute(never_pruned) if b"judged" in blob]
    except (sqlite3.Error, UserError):
        return []
    return [pair for entry in entries if isinstance(entry, Judged) for pair in entry.evidence.pairs]


def candidates(run: RunDirectory, gold: Sequence[str], pairs: Iterable[GoldPair]) -> list[Candidate]:
    """The samples with a valid reward, of steps evenly over the run, the newest included.

    Args:
        gold: names of the rewards of role gold.
        pairs: have the gold scores of samples that are scored for the guard alone.
    """
    files = [(step, path) for step, purpose, path in run.sample_files() if purpose == TRAINING_PURPOSE]
    kept = (
        files if len(files) <= MOST_STEPS else [files[-1 - at * len(files) // MOST_STEPS] for at in range(MOST_STEPS)]
    )
    samples = [
        sample for _, path in kept for sample in read_samples(path) if sample.valid and sample.reward is not None
    ]
    reward_rank = _ranks([sample.reward or 0.0 for sample in samples])
    asked = {(pair.step, pair.prompt_id, pair.index): pair.gold for pair in pairs if pair.source == "batch"}
    second = list[float | None]()
    for sample in samples:
        scores = [sample.components[name] for name in gold if name in sample.components]
        second.append(scores[0] if scores else asked.get((sample.step, sample.prompt_id, sample.index)))
    gold_rank = _ranks([score for score in second if score is not None])
    return [
        Candidate(sample, sample.reward or 0.0, _stratum(reward_rank(sample.reward or 0.0), score, gold_rank))
        for sample, score in zip(samples, second, strict=True)
    ]


def _ranks(values: Sequence[float]) -> Callable[[float], float]:
    """A function from a value to the share of values below it, and half of those equal to it."""
    ordered = sorted(values)
    return lambda value: (bisect_left(ordered, value) + bisect_right(ordered, value)) / (2 * len(ordered))


def _stratum(reward: float, score: float | None, gold_rank: Callable[[float], float]) -> Stratum:
    if score is not None and abs(reward - gold_rank(score)) >= 1 / 3:
        return "disagreement"
    return "high reward" if reward > 2 / 3 else "low reward" if reward < 1 / 3 else "middle"


def chosen(found: Sequence[Candidate], judged: Collection[SampleKey], n: int) -> list[Candidate]:
    """At most `n` candidates that were not judged: the strata in turn, in each the newest step first, then one of each
    earlier step. The same files give the same choice."""
    queues = {stratum: _by_step([each for each in found if each.stratum == stratum], judged) for stratum in ORDER}
    turns = [next(queues[stratum], None) for _ in range(n) for stratum in ORDER]
    return [candidate for candidate in turns if candidate is not None][:n]


def _by_step(found: Sequence[Candidate], judged: Collection[SampleKey]) -> Iterator[Candidate]:
    left = [candidate for candidate in found if sample_key(candidate.sample) not in judged]
    left.sort(key=lambda each: sample_key(each.sample))  # prompts are named by a hash
    number: Counter[int] = Counter()  # in its step
    turns = list[tuple[int, int, int]]()
    for at, candidate in enumerate(left):
        turns.append((number[candidate.sample.step], -candidate.sample.step, at))
        number[candidate.sample.step] += 1
    return (left[at] for _, _, at in sorted(turns))


def agreement(verdicts: Sequence[Verdict], rewards: Sequence[float]) -> dict[str, Interval]:
    """Verdicts against rewards: the mean verdict, also on samples with a high and with a low reward, and the share of
    samples on which both agree. People see a choice of samples, so that these are no figures of all samples.

    Args:
        rewards: of all samples; the middle of their range separates high from low.
    """
    every = [*rewards, *(each.reward for each in verdicts)]
    middle = (min(every) + max(every)) / 2
    high = [each.verdict for each in verdicts if each.reward >= middle]
    low = [each.verdict for each in verdicts if each.reward < middle]
    agree = [*high, *(1 - verdict for verdict in low)]
    shares = {
        "people accept": [*high, *low],
        "with a high reward:": high,
        "with a low reward:": low,
        "reward and people agree on": agree,
    }
    return {name: share_interval(values) for name, values in shares.items() if values}
