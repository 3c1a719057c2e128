"""Which rows are learned from and which are kept for evaluation: decided by their content alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from tidemill.core.errors import UserError
from tidemill.envs.text.content import (
    QuestionT,
    distinct,
    in_content_order,
    question_key,
    split_by_content,
)

Read = Callable[[Path], Iterable[QuestionT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides(Generic[QuestionT]):
    """Rows apart: no question is on both sides."""

    train: list[QuestionT]
    held_out: list[QuestionT]  # in content order: any first n are a fair selection
    repeated: int  # rows of `path` that say what another says
    kept: int  # of `path`, left out of training because the evaluation file asks the same

    @property
    def left_out(self) -> str:
        """`3 repeated, 1 kept for evaluation`; empty where nothing is."""
        counts = {"repeated": self.repeated, "kept for evaluation": self.kept}
        return ", ".join(f"{count} {why}" for why, count in counts.items() if count)


def read_sides(
    read: Read[QuestionT], path: Path, held_out_path: Path | None, held_out_fraction: float, *, section: str
) -> Sides[QuestionT]:
    """One file split, or a training and an evaluation file.

    Rows appended or moved leave every other on its side. A row repeated is taken once. A question in both files, or in
    one file with several answers, is on one side only.

    Args:
        held_out_fraction: share of the questions of `path`; 0 keeps none.
        section: of the configuration: "task" or "data".

    Raises:
        UserError: a file cannot be read or has a faulty row; one side would be empty.
    """
    rows = list(read(path))
    items = distinct(rows)
    repeated = len(rows) - len(items)
    if held_out_path is None:
        train, held_out = split_by_content(items, held_out_fraction) if held_out_fraction else (items, [])
        if held_out_fraction and not (train and held_out):
            raise _one_question(path, section)
        return Sides(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=0)
    held_out = distinct(read(held_out_path))
    asked = {question_key(item) for item in held_out}
    train = [item for item in items if question_key(item) not in asked]
    if not train:
        raise _none_left(path, held_out_path)
    kept = len(items) - len(train)
    return Sides(train=train, held_out=in_content_order(held_out), repeated=repeated, kept=kept)


def _one_question(path: Path, section: str) -> UserError:
    return UserError(
        "one question alone cannot be split into training and evaluation",
        where=str(path),
        cure=f"add rows, or give {section}.held_out_path",
    )


def _none_left(path: Path, held_out_path: Path) -> UserError:
    return UserError(
        "every question is also an evaluation question, so none is left to train on",
        where=str(path),
        cure=f"take the shared rows out of {held_out_path}",
    )
