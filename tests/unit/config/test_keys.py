from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tidemill.config.keys import (
    all_keys,
    default_kind,
    dotted,
    element_words,
    find,
    sections,
    suggest,
    type_words,
    variants,
    without_none,
)


class Table(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (("trainer", "steps"), "trainer.steps"),
        (("scoring", "rewards", 0, "kind"), "scoring.rewards[0].kind"),
        (("scoring", "rewards", "[]", "kind"), "scoring.rewards[].kind"),
        ((), ""),
    ],
)
def test_dotted(path: tuple[str | int, ...], text: str) -> None:
    assert dotted(path) == text


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"),
        (Path | None, "path or none"),
        (Literal["a"], '"a"'),
        (Literal["a", "b"], 'one of "a", "b"'),
        (tuple[str, ...], "array of text"),
        (tuple[Table, ...], "array of tables"),
        (tuple[float, float], "array of 2: number, number"),
        (Annotated[int, Field(ge=1, le=6)], "integer >= 1 and <= 6"),
        (Annotated[float, Field(gt=0, lt=1)], "number > 0 and < 1"),
        (dict[str, int], "table"),
        (Table, "table"),
        (bool | str, "true or false or text"),
    ],
)
def test_type_words(annotation: Any, words: str) -> None:
    assert type_words(annotation) == words


def test_metadata_that_is_no_bound_says_nothing() -> None:
    assert type_words(int, ["unrelated"]) == "integer"


def test_without_none_keeps_wider_unions() -> None:
    assert without_none(int | None) is int
    assert without_none(int | str) == int | str


def test_every_key_has_words_and_documentation() -> None:
    undocumented = [key.dotted for key in all_keys() if not key.words]
    # Sections are explained by their keys; reward fields carry their own text.
    assert undocumented == []
    assert [key.dotted for key in all_keys() if not key.doc] == []


def test_every_key_that_may_be_unset_is_unset_by_default() -> None:
    # to_toml leaves unset keys out, which reads back only if their default is "not set".
    assert [key.dotted for key in all_keys() if key.optional and key.default is not None] == []


def test_sections_and_variants() -> None:
    assert ("model", "char") in sections()
    assert set(variants()[("task",)]) == {"arithmetic", "reasoning_gym", "file", "jsonl"}
    assert default_kind(("task",)) == "arithmetic"


def test_find_matches_any_array_position() -> None:
    found = find(("scoring", "rewards", 7, "weight"))
    assert found is not None
    assert found.words == "number"
    assert find(("scoring", "nothing")) is None


def test_element_words() -> None:
    params, stop, seed = (find(path) for path in (("task", "params"), ("sampling", "stop"), ("run", "seed")))
    assert params and stop and seed
    assert element_words(params) == "true or false or integer or number or text"
    assert element_words(stop) == "text"
    assert element_words(seed) == "integer"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.stpes", "trainer.steps"),  # a slip in the last word
        ("batch.group-size", "batch.group_size"),  # a hyphen
        ("trainer.learning_rate", "optimizer.learning_rate"),  # the right word in the wrong section
        ("steps", "trainer.steps"),  # no section at all
        ("trian.steps", "trainer.steps"),
        ("samplng", "sampling"),
        ("task.digts", "task.digits"),
        ("optimizer.lr", "optimizer.learning_rate"),  # initials
        ("optimizer.momentum", ""),  # the right section does not make another key alike
        ("bogus", ""),
    ],
)
def test_suggestions(written: str, meant: str) -> None:
    assert suggest(tuple(written.split(".")), kind="arithmetic") == meant


def test_keys_of_other_kinds_are_not_suggested() -> None:
    assert suggest(("task", "digts"), kind="jsonl") != "task.digits"


def test_inside_an_array_of_tables() -> None:
    assert suggest(("scoring", "rewards", 1, "wieght")) == "scoring.rewards[].weight"
