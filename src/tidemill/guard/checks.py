"""Which samples people should judge, and the queue of `tidemill check` and of the page with keys."""

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
from tidemill.guard.verdicts import SampleKey, VerdictFiles, append_verdict, sample_key, text_digest
from tidemill.telemetry.run_data import NO_RUN
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


def chosen(samples: Sequence[Sequence[Sample]], judged: Collection[SampleKey]) -> list[Sample]:
    """The samples that were not judged, of each stratum in turn."""
    left = [[sample for sample in stratum if sample_key(sample) not in judged] for stratum in samples]
    return [sample for turn in zip_longest(*left) for sample in turn if sample is not None]


class CheckQueue:
    """The samples of a run that wait for a person's verdict; the run may be in progress.

    Args:
        run_dir: the run directory.
        warn: gets one message for each file of verdicts with lines that are left out.

    Raises:
        UserError: there is no run, or it has no samples with a valid reward.
    """

    def __init__(self, run_dir: Path, *, warn: Callable[[str], None]) -> None:
        self._run = run = RunDirectory(run_dir)
        self._run_id = str(run.read_manifest().get("run_id", ""))
        if not self._run_id:
            raise UserError("no run there (no manifest.json)", where=str(run_dir), hint=NO_RUN)
        samples = strata(run, read_pairs(run.ledger))
        if not any(samples):
            hint = "wait for the first step, or set telemetry.samples_per_step"
            raise UserError("no samples with a valid reward", where=str(run.samples), hint=hint)
        self._files = VerdictFiles(run.checks, self._run_id, warn=warn)
        self._judged = {verdict.sample for verdict in self._files.new_verdicts()}
        self._waiting = {sample_key(sample): sample for sample in chosen(samples, self._judged)}

    @property
    def judged(self) -> int:
        """Samples with a verdict."""
        return len(self._judged)

    def waiting(self) -> list[Sample]:
        """Those without, in the order in which they should be judged."""
        self._judged |= {verdict.sample for verdict in self._files.new_verdicts()}  # of others who judge now
        return [sample for key, sample in self._waiting.items() if key not in self._judged]

    def find(self, key: SampleKey) -> Sample | None:
        """A sample that waits, or has waited."""
        return self._waiting.get(key)

    def skip(self, sample: Sample) -> None:
        """Ask for it last."""
        key = sample_key(sample)
        self._waiting[key] = self._waiting.pop(key)

    def judge(self, sample: Sample, verdict: float) -> None:
        """Store a verdict, from 0 (bad) to 1. Raises UserError: it cannot be written."""
        append_verdict(self._run.checks, self._run_id, sample, verdict)
        self._judged.add(sample_key(sample))


def shown_parts(sample: Sample) -> list[tuple[str, str]]:
    """(author, text) of prompt, turns and answer, without rewards."""
    parts = [(message.role, message.content) for message in sample.messages] or [("prompt", sample.prompt)]
    for number, turn in enumerate(sample.turns, 1):
        parts += [(f"turn {number}", turn.text), ("environment", turn.observation)]
    if not sample.turns:
        parts.append(("completion", sample.completion))
    if sample.answer is not None:
        parts.append(("reference answer", sample.answer))
    return parts
