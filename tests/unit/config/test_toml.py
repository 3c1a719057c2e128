from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tidemill.config.issues import ConfigError
from tidemill.config.schema import RunSpec
from tidemill.config.toml import line_of, parse_toml, to_toml, write_value

TEXT = """\
# a comment
run.name = "top"
[trainer]
steps = 3
"precision" = "fp32"

[model.char]  # a header with a comment
layers = 2
[[scoring.rewards]]
kind = "exact"
[[ scoring.rewards ]]
kind = "numeric"
weight = 2.0
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("run", "name"), 2),
        (("trainer",), 3),
        (("trainer", "steps"), 4),
        (("trainer", "precision"), 5),
        (("trainer", "threads"), 3),  # not set: where its table begins
        (("model", "char", "layers"), 8),
        (("scoring", "rewards", 0, "kind"), 10),
        (("scoring", "rewards", 1, "kind"), 12),
        (("scoring", "rewards", 1), 11),
        (("engine", "slots"), None),
    ],
)
def test_lines_of_keys(location: tuple[str | int, ...], line: int | None) -> None:
    assert line_of(TEXT, location) == line


STAGES = """\
[[stage]]
name = "a"
[stage.model]
source = "char"
[[stage.scoring.rewards]]
kind = "exact"
[[stage.scoring.rewards]]
kind = "numeric"

[[stage]]
name = "b"
model.source = "stage:a"
[stage.scoring]
timeout_s = 3
[[stage.scoring.rewards]]
kind = "exact"
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("stage", 0), 1),
        (("stage", 0, "model", "source"), 4),
        (("stage", 0, "scoring", "rewards", 1, "kind"), 8),
        (("stage", 1, "name"), 11),
        (("stage", 1, "model", "source"), 12),
        (("stage", 1, "scoring", "timeout_s"), 14),
        (("stage", 1, "scoring", "rewards", 0, "kind"), 16),
        (("stage", 1, "trainer", "steps"), 10),
        (("stage", 2), None),
    ],
)
def test_lines_of_tables_in_arrays_of_tables(location: tuple[str | int, ...], line: int | None) -> None:
    assert line_of(STAGES, location) == line


def test_lines_in_inline_arrays() -> None:
    assert line_of('[scoring]\nrewards = [{kind = "x"}]', ("scoring", "rewards", 0, "kind")) == 2


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("a = 1\nb = = 2\n", "r.toml:2", "column 5: invalid value"),
        ("a = 1\nb = [1,\n", "r.toml:2", "invalid value"),  # at the end of the document
        ("a = 1\na = 2\n", "r.toml:2", "cannot overwrite a value"),
        ("a = " + "[" * 100_000, "r.toml:1", "recursion"),
        ("a = " + "1" * 5000, "r.toml:1", "exceeds the limit"),
    ],
)
def test_syntax_errors_name_file_and_line(text: str, place: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, source="r.toml")
    assert caught.value.faults[0].key == place
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (3, "3"),
        (1e-05, "1e-05"),
        (1.0, "1.0"),
        ('a"b\\c\n\x00\x7f', '"a\\"b\\\\c\\n\\u0000\\u007f"'),
        (Path("x/y"), '"x/y"'),
        (["a", 1], '["a", 1]'),
        ({"k v": 1, "n": None}, '{ "k v" = 1 }'),
        ({}, "{}"),
    ],
)
def test_values(value: Any, text: str) -> None:
    assert write_value(value) == text


def test_every_section_is_written_with_every_value() -> None:
    text = to_toml(RunSpec())
    tree = tomllib.loads(text)
    assert list(tree) == list(RunSpec.model_fields)
    assert tree["scoring"]["rewards"][0]["kind"] == "exact"
    assert "# dir is not set" in text  # said, since TOML has no null
    assert text.startswith('runtime = "inprocess"\n\n[run]\n')
    assert text.endswith("\n")
