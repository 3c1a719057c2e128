from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.config_issues import issues_of
from tidemill.config.pipeline import load_overridden
from tidemill.config.schema import RunSpec
from tidemill.config.toml import line_of, parse_toml, tables_to_toml, to_toml, write_value

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
        (("trainer", "threads"), 3),  # not set: the header of its table
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
    ("text", "place", "what"),
    [
        ("a = 1\nb = = 2\n", "r.toml:2", "column 5: invalid value"),
        ("a = 1\nb = [1,\n", "r.toml:2", "invalid value"),  # at the end of the document
        ("a = 1\na = 2\n", "r.toml:2", "cannot overwrite a value"),
    ],
)
def test_syntax_errors_name_file_and_line(text: str, place: str, what: str) -> None:
    (issue,) = issues_of(lambda: parse_toml(text, source="r.toml"))
    assert issue.key == place
    assert what in issue.what


VALUES: list[Any] = [
    *(True, False, 0, 3, -7, 2**64 - 1, 1e-05, 1.0, -0.5, 1e300, 1e22),
    *("", "plain", 'a"b\\c\n\t\r\x00\x1f\x7f', "é 😀 \u2028", "# no comment", "[no] = table"),
    *([], ["a", 1], [[1, 2], [3]], [True, 1.5, "x"], [{"a": 1}, {"b": [2]}]),
    *({}, {"k v": 1, "": 2, "a.b": {"c": [{"d": "e"}]}, "é": False, 'quo"te': 1, "new\nline": 1}),
]


@pytest.mark.parametrize("value", VALUES)
def test_a_written_value_parses_back_equal(value: Any) -> None:
    parsed = tomllib.loads(f"value = {write_value(value)}")["value"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("value", VALUES)
def test_a_written_document_parses_back_equal(value: Any) -> None:
    tables = {"table": {"value": value, "last": 1}, "value": value, "array": [{"value": value}, {"last": 1}]}
    assert tomllib.loads(tables_to_toml(tables)) == tables


def test_unset_values_become_comments() -> None:
    text = tables_to_toml({"run": {"dir": None, "seed": 1}})
    assert tomllib.loads(text) == {"run": {"seed": 1}}
    assert "# dir is not set" in text.splitlines()


def test_every_section_is_written_with_every_value() -> None:
    text = to_toml(RunSpec())
    tree = tomllib.loads(text)
    assert set(tree) == set(RunSpec.model_fields) - {"robot"}  # only stages may have one
    assert tree["scoring"]["rewards"][0]["kind"] == "exact"
    assert "# dir is not set" in text
    assert text.startswith('runtime = "inprocess"\n\n[run]\n')
    assert text.endswith("\n")


def test_a_configuration_can_be_copied_and_trained_elsewhere(tmp_path: Path) -> None:
    copied = tmp_path / "copied.toml"
    copied.write_text(to_toml(RunSpec()), encoding="utf-8")
    assert load_overridden(copied, {}) == RunSpec()
