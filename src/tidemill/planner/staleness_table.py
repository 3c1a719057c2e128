"""The table that `plan staleness` reads: CSV with or without a heading, or JSON; shares as 0.35 or 35 %."""

from __future__ import annotations

import csv
import difflib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.core.records import Record

FIELDS = ("lag", "reward_per_step", "utilisation", "uncertainty")
NAMES = {
    "max_policy_lag": "lag",
    "policy_lag": "lag",
    "staleness": "lag",
    "reward": "reward_per_step",
    "utilization": "utilisation",
    "trainer_utilisation": "utilisation",
    "trainer_utilization": "utilisation",
    "stderr": "uncertainty",
    "standard_error": "uncertainty",
    "reward_stderr": "uncertainty",
}
SHAPE = (
    "a line looks like `3,0.10,75%`: lag, reward per step, utilisation, and if known the standard error of the reward; "
    "several lines of one lag are repeats"
)


class Measured(Record):
    """One row: what a run at this lag gained per step, and how busy its trainer was."""

    lag: float
    reward_per_step: float
    utilisation: float  # a share
    uncertainty: float | None = None  # standard error of the reward per step
    where: str = ""  # file and row, for errors


def read_table(path: Path) -> list[Measured]:
    """Raises UserError: naming file, row and field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the table: {error.strerror or error}", where=str(path), cure=SHAPE) from error
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text", where=str(path), cure=SHAPE) from error
    return parse_table(text, source=str(path))


def parse_table(text: str, *, source: str) -> list[Measured]:
    """What begins with a bracket is JSON: a list of objects or of arrays, or one such list under any key.

    Raises:
        UserError: naming `source`, row and field.
    """
    plain = text.strip().replace("\N{MINUS SIGN}", "-")
    rows = _json_rows(plain, source) if plain[:1] in ("[", "{") else _csv_rows(plain, source)
    found = [_measured(fields, where) for where, fields in rows]
    if not found:
        raise UserError("the table is empty", where=source, cure=SHAPE)
    return found


def _csv_rows(text: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    delimiter = next((each for each in ("\t", ";", ",") if each in text), " ")
    cells_of = csv.reader(text.replace(" %", "%").splitlines(), delimiter=delimiter, skipinitialspace=True)
    try:
        lines = [
            (f"{source}:{number}", [cell.strip() for cell in cells if cell.strip() or delimiter != " "])
            for number, cells in enumerate(cells_of, 1)
            if any(cell.strip() for cell in cells) and not cells[0].strip().startswith("#")
        ]
    except csv.Error as error:
        raise UserError(f"broken CSV: {error}", where=f"{source}:{cells_of.line_num}", cure=SHAPE) from error
    if not lines:
        return []
    names: Sequence[str] = FIELDS
    if not _is_number(lines[0][1][0]):
        names = [_name(cell, lines[0][0]) for cell in lines[0][1]]
        lines = lines[1:]
    return [(where, _named(cells, names, where)) for where, cells in lines]


def _json_rows(text: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"broken JSON: {error.msg}", where=f"{source}:{error.lineno}", cure=SHAPE) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"broken JSON: {error}", where=source, cure=SHAPE) from error
    if isinstance(tree, dict):
        tree = next((value for value in tree.values() if isinstance(value, list)), None)
    if not isinstance(tree, list):
        raise UserError("holds no list of rows", where=source, cure='[{"lag": 0, "reward_per_step": 0.15, ...}, ...]')
    rows = []
    for number, row in enumerate(tree):
        where = f"{source}: [{number}]"
        if isinstance(row, list):
            rows.append((where, _named(row, FIELDS, where)))
        elif isinstance(row, dict):
            rows.append((where, {_name(str(name), where): value for name, value in row.items()}))
        else:
            raise UserError(f"{row!r} is no row", where=where, cure=SHAPE)
    return rows


def _named(cells: Sequence[Any], names: Sequence[str], where: str) -> dict[str, Any]:
    if len(cells) > len(names):
        raise UserError(f"{len(cells)} fields where {len(names)} are known", where=where, cure=SHAPE)
    return dict(zip(names, cells, strict=False))


def _name(heading: str, where: str) -> str:
    plain = heading.strip(" %").lower().replace(" ", "_").replace("-", "_")
    if (name := NAMES.get(plain, plain)) in FIELDS:
        return name
    close = difflib.get_close_matches(plain, (*FIELDS, *NAMES), 1, 0.6)
    cure = f"did you mean {close[0]}?" if close else f"columns: {', '.join(FIELDS)}"
    raise UserError(f"unknown column {heading!r}", where=where, cure=cure)


def _measured(fields: dict[str, Any], where: str) -> Measured:
    for name in FIELDS[:3]:
        if fields.get(name) in (None, ""):
            raise UserError(f"has no {name}", where=where, cure=SHAPE)
    lag, reward = (_number(fields[name], name, where) for name in FIELDS[:2])
    uncertainty = (
        None if fields.get("uncertainty") in (None, "") else _number(fields["uncertainty"], "uncertainty", where)
    )
    if lag < 0:
        raise UserError(f"lag {lag:g} cannot be", where=where, cure="a lag is 0 or more versions")
    if uncertainty is not None and uncertainty < 0:
        raise UserError(f"uncertainty {uncertainty:g} cannot be", where=where, cure="a standard error is 0 or more")
    return Measured(
        lag=lag,
        reward_per_step=reward,
        utilisation=_share(fields["utilisation"], where),
        uncertainty=uncertainty,
        where=where,
    )


def _share(given: Any, where: str) -> float:
    """0.35, 35 % and 35 alike."""
    text = str(given)
    value = _number(text.rstrip(" %") if "%" in text else given, "utilisation", where)
    share = value / 100 if "%" in text or value > 1 else value
    if not 0 < share <= 1:
        what = f"utilisation {given!r} is not above 0 and at most 100 %"
        raise UserError(what, where=where, cure="write 0.35 or 35%")
    return share


def _number(given: Any, name: str, where: str) -> float:
    try:
        value = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} {given!r} is not a number", where=where, cure=SHAPE)
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
