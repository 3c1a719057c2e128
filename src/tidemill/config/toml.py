"""Reading and writing TOML, with the file and line of every key."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit
import tomlkit.container
import tomlkit.items

from tidemill.config.issues import ConfigError, ConfigIssue, Location
from tidemill.config.robot import RobotConfig
from tidemill.config.schema import RunSpec

_HEADER = re.compile(r"^\s*\[(?P<array>\[?)\s*(?P<path>[^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""^\s*(?P<path>[\w"'. -]+?)\s*=""")
SYNTAX_HINTS = {
    "invalid value": 'quote text, as in source = "char", and write true and false in lower case',
    "hex value": "write / in paths, or put them in single quotes",
    "unescaped '\\'": "write / in paths, or put them in single quotes",
    "expected '=' after a key": "write key = value",
    "cannot overwrite a value": "set each key once",
    "cannot declare": "write each header once, with all keys of the section below it",
}
"""By a part of the parser's message."""


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """Parse a TOML document. Raises ConfigError: a syntax error, with `source` and the line."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        message = str(error)
        position = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = (position and position[1]) or max(len(text.splitlines()), 1)
        what = message[: position.start()] if position else message
        what = what[:1].lower() + what[1:]
        column = f", column {position[2]}" if position and position[2] else ""
        hint = next((hint for part, hint in SYNTAX_HINTS.items() if part in what), "correct that line")
        issue = ConfigIssue(key=f"{source}:{line}", what=f"not valid TOML{column}: {what}", hint=hint)
        raise ConfigError([issue]) from None


def line_of(text: str, location: Sequence[str | int]) -> int | None:
    """The number of the line that sets a key, or of its table's header; None if neither is found.

    Only for error messages: it scans lines instead of parsing, and may be wrong in unusual layouts.
    """
    best, best_depth = None, 0
    table: Location = ()
    elements = Counter[Location]()  # headers seen so far of each array of tables
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table, parts = (), _parts(header["path"])
            for depth, part in enumerate(parts, 1):
                table = (*table, part)
                if header["array"] and depth == len(parts):
                    elements[table] += 1
                if table in elements:  # the index of the current element after each array of tables
                    table = (*table, elements[table] - 1)
            here = table
        elif assignment := _ASSIGNMENT.match(line):
            here = (*table, *_parts(assignment["path"]))
        else:
            continue
        if here == tuple(location[: len(here)]) and len(here) > best_depth:
            best, best_depth = number, len(here)
    return best


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in path.split("."))


def to_toml(spec: RunSpec) -> str:
    """Every value of a run as TOML, which parses back to an equal run. Unset keys become comments.

    A robot that is not configured is left out: only the stages of a recipe may have a [robot].
    """
    values = spec.model_dump(mode="json")
    if values["robot"] == RobotConfig().model_dump(mode="json"):
        del values["robot"]
    return tables_to_toml(values)


def tables_to_toml(tables: Mapping[str, Any]) -> str:
    """Nested plain data as TOML; None becomes a comment."""
    document = tomlkit.document()
    _fill(document, tables)
    return tomlkit.dumps(document)


def _fill(target: tomlkit.container.Container | tomlkit.items.Table, values: Mapping[str, Any]) -> None:
    for name, value in sorted(values.items(), key=lambda item: _is_table(item[1])):  # plain values precede tables
        if value is None:
            target.add(tomlkit.comment(f"{name} is not set"))
        elif isinstance(value, Mapping):
            target.add(name, _table(value))
        elif _is_table(value):
            array = tomlkit.aot()
            for element in value:
                array.append(_table(element))
            target.add(name, array)
        else:
            target.add(name, value)


def _table(values: Mapping[str, Any]) -> tomlkit.items.Table:
    table = tomlkit.table()
    _fill(table, values)
    return table


def _is_table(value: Any) -> bool:
    """Whether a value is written below a header: a table, or an array of tables."""
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
    )


def write_value(value: Any) -> str:
    """One value as TOML; tables are written inline, without keys that are None."""
    table = tomlkit.inline_table()
    table.append("value", _set_keys(value))
    item = table.value.item("value")
    assert isinstance(item, tomlkit.items.Item)
    return item.as_string()


def _set_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _set_keys(each) for name, each in value.items() if each is not None}
    return [_set_keys(each) for each in value] if isinstance(value, list) else value
