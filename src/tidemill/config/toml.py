"""TOML in both directions: reading with file and line in the errors, and writing every value of a run."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.config.issues import ConfigError, ConfigIssue, Location
from tidemill.config.schema import RunSpec

_HEADER = re.compile(r"^\s*\[(?P<array>\[?)\s*(?P<path>[^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"""^\s*(?P<path>[\w"'. -]+?)\s*=""")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """The tables of a TOML text; a syntax error is a ConfigError that names `source` and the line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, thousands of brackets
        message = str(error)
        place = re.search(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        line = (place and place[1]) or max(len(text.splitlines()), 1)
        what = message[: place.start()] if place else message
        what = what[:1].lower() + what[1:]
        column = f", column {place[2]}" if place and place[2] else ""
        fault = ConfigIssue(key=f"{source}:{line}", what=f"not valid TOML{column}: {what}", hint="correct that line")
        raise ConfigError([fault]) from None


def line_of(text: str, location: Sequence[str | int]) -> int | None:
    """The line that sets a key in a TOML text, or the one that opens its table; None if neither is found.

    A scan, not a parse: it serves error messages and may be off in unusual layouts.
    """
    best, best_depth = None, 0
    table: Location = ()
    elements = Counter[Location]()  # tables seen so far in each array of tables
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _placed(_parts(header["path"]), elements, opens=bool(header["array"]))
            here = table
        elif assignment := _ASSIGNMENT.match(line):
            here = (*table, *_parts(assignment["path"]))
        else:
            continue
        if here == tuple(location[: len(here)]) and len(here) > best_depth:
            best, best_depth = number, len(here)
    return best


def _placed(path: tuple[str, ...], elements: Counter[Location], *, opens: bool) -> Location:
    """A header's path with the position of the newest element after each array of tables in it.

    Args:
        opens: the header begins a new element of the array it names.
    """
    placed: Location = ()
    for depth, part in enumerate(path, 1):
        placed = (*placed, part)
        if opens and depth == len(path):
            elements[placed] += 1
        if placed in elements:
            placed = (*placed, elements[placed] - 1)
    return placed


def to_toml(spec: RunSpec) -> str:
    """Every value of a run, written out; reading it back gives an equal run. Unset keys are comments."""
    return tables_to_toml(spec.model_dump(mode="json"))


def tables_to_toml(sections: dict[str, Any]) -> str:
    """Plain data as TOML: values first, then tables, then arrays of tables."""
    lines: list[str] = []
    _write_contents(lines, (), sections)
    return "\n".join(lines).lstrip("\n") + "\n"


def write_value(value: Any) -> str:
    """One value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _string(str(value))
    if isinstance(value, dict):
        inner = ", ".join(f"{_name(name)} = {write_value(each)}" for name, each in value.items() if each is not None)
        return f"{{ {inner} }}" if inner else "{}"
    return f"[{', '.join(write_value(each) for each in value)}]"


def _write_table(lines: list[str], path: tuple[str, ...], table: dict[str, Any], *, element: bool = False) -> None:
    header = ".".join(map(_name, path))
    lines += ["", f"[[{header}]]" if element else f"[{header}]"]
    _write_contents(lines, path, table)


def _write_contents(lines: list[str], path: tuple[str, ...], table: dict[str, Any]) -> None:
    tables, arrays = [], []
    for name, value in table.items():
        if isinstance(value, dict):
            tables.append(name)
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            arrays.append(name)
        else:
            lines.append(f"# {_name(name)} is not set" if value is None else f"{_name(name)} = {write_value(value)}")
    for name in tables:
        _write_table(lines, (*path, name), table[name])
    for name in arrays:
        for each in table[name]:
            _write_table(lines, (*path, name), each, element=True)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in path.split("."))


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    escaped = "".join(
        _ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char) for char in text
    )
    return f'"{escaped}"'
