from __future__ import annotations

from typing import Any

import pytest

from tidemill.config.explain import describe, reader_notes, reader_topics
from tidemill.config.schema import RunSpec

MODEL = {"rewards": [{"kind": "model", "model": "a"}, {"kind": "model", "model": "b"}, {"kind": "model", "model": "a"}]}
ACTORS = {"reward_model": "actor", "reference": "actor"}


def spec(**sections: Any) -> RunSpec:
    return RunSpec.model_validate(sections)


def test_where_models_are_and_how_they_read() -> None:
    assert reader_topics(spec()) == []
    assert reader_topics(spec(scoring=MODEL)) == [("scoring", "2 reward models in the controller's process")]
    both = spec(scoring=MODEL, algorithm={"kl_beta": 0.1}, runtime="ray", placement=ACTORS, reading={"ahead": True})
    words = (
        "2 reward models on an actor each and the reference on an actor of its own; samples are read while they are "
        "generated, 256 tokens at a time, 65,536 kept"
    )
    assert reader_topics(both) == [("scoring", words)]
    assert words in describe(both)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"scoring": MODEL, "reading": {"ahead": True, "own_thread": True, "chunk_tokens": 65}},
            "no completion fills a chunk of reading.chunk_tokens = 65",
        ),
        ({"scoring": MODEL, "reading": {"ahead": True, "chunk_tokens": 64}}, "one thread generates, learns and reads"),
    ],
)
def test_settings_that_do_little(sections: dict[str, Any], says: str) -> None:
    (note,) = reader_notes(spec(**sections))
    assert says in note


def test_settings_that_do_something() -> None:
    sections = {"scoring": MODEL, "reading": {"ahead": True, "own_thread": True, "chunk_tokens": 64}}
    assert reader_notes(spec(**sections)) == []
    assert reader_notes(spec()) == []
