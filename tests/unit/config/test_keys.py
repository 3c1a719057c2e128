from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tidemill.config.base import Neutral
from tidemill.config.keys import (
    all_keys,
    belongs_to,
    default_kind,
    differ_in_resumable_keys,
    dotted,
    find,
    neutral_keys,
    resumable_keys,
    sections,
    suggest,
    type_text,
    variants,
    without_none,
)
from tidemill.config.pipeline import KINDS


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
    ("annotation", "text"),
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
def test_type_text(annotation: Any, text: str) -> None:
    assert type_text(annotation) == text


def test_metadata_other_than_bounds_is_ignored() -> None:
    assert type_text(int, ["unrelated"]) == "integer"


def test_without_none_keeps_wider_unions() -> None:
    assert without_none(int | None) is int
    assert without_none(int | str) == int | str


def test_every_key_has_a_type_and_documentation() -> None:
    assert [key.dotted for key in all_keys() if not key.accepts] == []
    assert [key.dotted for key in all_keys() if not key.doc] == []


def test_every_key_that_may_be_unset_is_unset_by_default() -> None:
    # to_toml omits unset keys, so their default must be None.
    assert [key.dotted for key in all_keys() if key.optional and key.default is not None] == []


def test_sections_and_variants() -> None:
    assert ("model", "char") in sections()
    assert set(variants()["task"]) == {"arithmetic", "reasoning_gym", "file", "python", "environment", "served"}
    assert default_kind("task") == "arithmetic"


def test_find_matches_any_array_position() -> None:
    found = find(("scoring", "rewards", 7, "weight"))
    assert found is not None
    assert found.accepts == "number"
    assert find(("scoring", "nothing")) is None


def test_element_types() -> None:
    params, stop, seed = (find(path) for path in (("task", "params"), ("sampling", "stop"), ("run", "seed")))
    assert params and stop and seed
    assert type_text(params.element_type) == "true or false or integer or number or text"
    assert type_text(stop.element_type) == "text"
    assert type_text(seed.element_type) == "integer"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.stpes", "trainer.steps"),  # a typo in the name
        ("batch.group-size", "batch.group_size"),  # a hyphen
        ("trainer.learning_rate", "optimizer.learning_rate"),  # the right name in the wrong section
        ("steps", "trainer.steps"),  # no section at all
        ("trian.steps", "trainer.steps"),
        ("samplng", "sampling"),
        ("task.digts", "task.digits"),
        ("optimizer.lr", "optimizer.learning_rate"),  # initials
        ("port", "gateway.port"),  # of the sections that have it, the main one
        ("threads", "trainer.threads"),
        ("optimizer.momentum", ""),  # no similar key in the right section
        ("bogus", ""),
    ],
)
def test_suggestions(written: str, meant: str) -> None:
    assert suggest(tuple(written.split(".")), kind="arithmetic") == meant


def test_keys_of_other_kinds_are_not_suggested() -> None:
    assert suggest(("task", "digts"), kind="file") != "task.digits"


def test_inside_an_array_of_tables() -> None:
    assert suggest(("scoring", "rewards", 1, "wieght")) == "scoring.rewards[].weight"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("run.seed", {"export"}),
        ("eval.every_steps", {"rl", "eval"}),  # of its section, and its own
        ("ray.reserved_selector.zone", set(KINDS)),  # in a free-form table
        ("pool.kind", set(KINDS)),
        ("trainer.steps", {"pairs", "eval"}),
        ("optimizer.learning_rate", set()),
    ],
)
def test_kinds_whose_output_a_key_does_not_affect(name: str, kinds: set[str]) -> None:
    assert {kind for kind in KINDS if belongs_to(name, neutral_keys(kind))} == kinds
    assert belongs_to(name, resumable_keys()) == ("rl" in kinds or name == "trainer.steps")


def test_neutral_keys_name_kinds_of_stages() -> None:
    named = {kind for key in all_keys() for mark in key.metadata if isinstance(mark, Neutral) for kind in mark.kinds}
    assert named <= set(KINDS)


def test_a_budget_may_differ_when_a_run_is_resumed_and_a_reward_may_not() -> None:
    judge = {"kind": "judge", "url": "https://a/v1", "most_calls": 5}
    exact = {"kind": "exact"}
    rewards = "scoring.rewards"
    assert differ_in_resumable_keys(rewards, [exact, judge], [exact, judge | {"most_calls": 9, "most_usd": 1.0}])
    assert not differ_in_resumable_keys(rewards, [judge], [judge | {"most_calls": 9, "url": "https://b/v1"}])
    assert not differ_in_resumable_keys(rewards, [judge], [judge, exact])
    assert not differ_in_resumable_keys("task.path", "a", "b")
    assert not differ_in_resumable_keys("algorithm.clip", [0.1], [0.2])


def test_conditions_of_a_section_are_those_of_its_keys() -> None:
    reasons = {key.dotted: [condition.reason for condition in key.active_if] for key in all_keys()}
    assert reasons["critic.value_clip"] == reasons["algorithm.lam"] != []
    assert len(reasons["fleet.hand_over"]) == 2
