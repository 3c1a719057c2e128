"""Training and evaluation rows of the configured files, and their order over several sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from tidemill.config.task import RowsConfig
from tidemill.core.errors import UserError
from tidemill.data.prompts import EpochOrder, Order, hash_number, ids_digest
from tidemill.data.row_files import name_of_rows
from tidemill.data.row_table import ExampleT, Progress, RowTable, RowUse, join, read_table

Mask = NDArray[np.bool_]


class Ids(Sequence[str]):
    """Content ids as text, decoded when they are used."""

    def __init__(self, encoded: NDArray[np.bytes_]) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        return Ids(self._encoded[at]) if isinstance(at, slice) else self._encoded[at].decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSide(Generic[ExampleT]):
    """Some rows of a table, in order."""

    table: RowTable[ExampleT]
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> Ids:
        return Ids(self.table.index["id"][self.rows])

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self.table.index["tokens"][self.rows].astype(np.int64)

    @property
    def sources(self) -> NDArray[np.int64]:
        return self.table.index["source"][self.rows].astype(np.int64)

    def where(self, mask: Mask) -> SplitSide[ExampleT]:
        """The rows that a mask selects."""
        return replace(self, rows=self.rows[mask])

    def in_content_order(self) -> SplitSide[ExampleT]:
        """Shuffled by content hash, so that the first n are always the same random sample."""
        keys = np.array([hash_number("order", name) for name in self.ids], np.uint64)
        return replace(self, rows=self.rows[np.argsort(keys, kind="stable")])

    def examples(self) -> Sequence[ExampleT]:
        return self.table.examples(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalSplit(Generic[ExampleT]):
    """Rows split by question: no question is on both sides, unless all prompts are evaluated."""

    train: SplitSide[ExampleT]
    held_out: SplitSide[ExampleT]  # in content order: any first n are a random sample
    weights: tuple[float, ...]  # of the sources
    kept: int = 0  # rows left out of training because the evaluation file has the same question

    @property
    def left_out(self) -> dict[str, int]:
        """Rows that are not used, by reason."""
        tables = {id(side.table): side.table for side in (self.train, self.held_out)}
        repeated = sum(table.figures.repeated for table in tables.values())
        counts = {"repeated": repeated, "kept_for_evaluation": self.kept}
        return {why: count for why, count in counts.items() if count}

    @property
    def digest(self) -> str:
        """Changes if the rows of a side change; their order and files do not matter."""
        return ids_digest(self.train.ids, self.held_out.ids)

    def at_most(self, limit: int) -> tuple[TrainEvalSplit[ExampleT], list[SplitSide[ExampleT]]]:
        """The rows of both sides with at most `limit` tokens, and the longer ones of each."""
        sides = (self.train, self.held_out)
        train, held_out = (side.where(side.tokens <= limit) for side in sides)
        return replace(self, train=train, held_out=held_out), [side.where(side.tokens > limit) for side in sides]

    def order(self, *, batch: int, seed: int) -> Order:
        """The order of the training side."""
        if len(self.weights) == 1:
            return EpochOrder(self.train.ids, batch=batch, seed=seed)
        return MixedOrder(self.train.ids, self.train.sources, self.weights, batch=batch, seed=seed)


def read_split(
    config: RowsConfig, use: Callable[..., RowUse[Any, ExampleT]], *, section: str, progress: Progress
) -> TrainEvalSplit[ExampleT]:
    """Split the rows of one or several files, or read training and evaluation files.

    Appending or moving rows does not change the side of any other row. A duplicate row is used once. A question in
    several files, or with several answers, is on one side only.

    Args:
        use: called with `columns` and `system_prompt` of a file.
        section: of the configuration: "task" or "data".

    Raises:
        UserError: a file cannot be read or has an invalid row; one side or one source would be empty.
    """

    def table(path: Path, columns: Mapping[Any, str]) -> RowTable[ExampleT]:
        named = {str(name): column for name, column in columns.items()}
        how = use(columns=named, system_prompt=config.system_prompt)
        return read_table(path, how, index_above_mb=config.index_above_mb, progress=progress)

    sources = config.all_sources
    rows = join([table(source.path, source.columns or config.columns) for source in sources])
    held_out = None if config.held_out_path is None else table(config.held_out_path, config.columns)
    weights = tuple(source.weight for source in sources)
    where = ", ".join(name_of_rows(source.path) for source in sources)
    split = split_rows(rows, held_out, config.held_out_fraction, weights=weights, where=where, section=section)
    for number, source in enumerate(sources):
        if source.weight and not (split.train.sources == number).any():
            what = "has no training rows that other sources or the evaluation rows do not have"
            raise UserError(
                what, where=name_of_rows(source.path), hint=f"remove it from {section}.sources, or add rows"
            )
    return split


def split_rows(
    rows: RowTable[ExampleT],
    held_out: RowTable[ExampleT] | None,
    held_out_fraction: float,
    *,
    weights: tuple[float, ...] = (1.0,),
    where: str,
    section: str,
) -> TrainEvalSplit[ExampleT]:
    """Split a table, or take the evaluation rows from another one.

    Args:
        held_out_fraction: share of the questions of `rows`; 0 holds out none, 1 evaluates the training rows.
        where: names the rows in messages.

    Raises:
        UserError: one side would be empty.
    """
    questions = rows.index["question"]
    train = every = SplitSide(table=rows, rows=np.arange(len(questions)))
    kept = 0
    if held_out is None:
        mask = _held_out(questions, held_out_fraction)
        evaluated = every.where(mask)
        if 0 < held_out_fraction < 1:
            train = every.where(~mask)
            if not (len(train) and len(evaluated)):
                what = "a single question cannot be split into training and evaluation"
                raise UserError(what, where=where, hint=f"add rows, or give {section}.held_out_path")
    else:
        evaluated = SplitSide(table=held_out, rows=np.arange(len(held_out.index)))
        train = every.where(~np.isin(questions, held_out.index["question"]))
        kept = len(every) - len(train)
        if not len(train):
            what = "every question is also an evaluation question; no training data is left"
            raise UserError(what, where=where, hint="remove the shared rows from the evaluation rows")
    return TrainEvalSplit(train=train, held_out=evaluated.in_content_order(), weights=weights, kept=kept)


def _held_out(questions: NDArray[np.uint64], fraction: float) -> Mask:
    """Each question's side depends only on its content.

    With at least two different questions no side is empty: it gets the question nearest to the boundary.
    """
    if fraction in (0, 1):
        return np.full(len(questions), bool(fraction))
    shares = (questions >> np.uint64(11)).astype(np.float64) / 2**53
    ranked = np.unique(shares)
    boundary = fraction if len(ranked) < 2 else min(max(fraction, ranked[1]), ranked[-1])
    return shares < boundary


GOLDEN_STEP = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: n · GOLDEN_STEP mod 2^64 fills the range evenly (Weyl sequence)."""
COUNTED = 1 << 20  # positions at a time


class MixedOrder:
    """The examples of each step from several sources.

    Position p takes its source from the Weyl sequence, so the share of a source is close to its weight in every step.
    Within a source the order is an `EpochOrder`. Both are functions of seed and position.

    Args:
        ids: of all examples.
        sources: [N], the source of each.
        weights: of the sources; not all zero.
    """

    def __init__(
        self, ids: Sequence[str], sources: NDArray[np.int64], weights: Sequence[float], *, batch: int, seed: int
    ) -> None:
        used = [number for number, weight in enumerate(weights) if weight]
        shares = np.array([weights[number] for number in used]) / sum(weights)
        self._batch = batch
        self._bounds = np.cumsum(shares)[:-1]
        self._start = hash_number("sources", seed)
        self._rows = [np.flatnonzero(sources == number) for number in used]
        self._orders = [
            # About the most examples of this source in a step.
            EpochOrder(
                [ids[row] for row in rows.tolist()], batch=min(batch, int(batch * share) + 4), seed=seed, aligned=False
            )
            for rows, share in zip(self._rows, shares, strict=True)
        ]
        self._counted = (0, np.zeros(len(used), np.int64))  # positions, and how many of them each source has

    def batch(self, step: int) -> list[tuple[int, int]]:
        """The (epoch, index into `ids`) pairs of 1-based `step`; an epoch is of the source."""
        first = (step - 1) * self._batch
        position, counts = self._counted if self._counted[0] <= first else (0, 0 * self._counted[1])
        for start in range(position, first, COUNTED):
            chunk = np.arange(start, min(start + COUNTED, first))
            counts = counts + np.bincount(self._sources(chunk), minlength=len(counts))
        self._counted = (first, counts)
        found = []
        next_of = counts.tolist()
        for source in self._sources(np.arange(first, first + self._batch)).tolist():
            epoch, place = self._orders[source].at(next_of[source])
            next_of[source] += 1
            found.append((epoch, int(self._rows[source][place])))
        return found

    def _sources(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        points = positions.astype(np.uint64) * np.uint64(GOLDEN_STEP) + np.uint64(self._start)
        return np.searchsorted(self._bounds, (points >> np.uint64(11)).astype(np.float64) / 2**53, side="right")
