"""Capacity traces as files: CSV lines `seconds,count`, with or without that heading, and the JSON of the SkyPilot
spot-traces data set."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.pool.capacity import CapacityTrace

HEADING = ["seconds", "count"]
CSV_SHAPE = "a line looks like `1800,12`: seconds and machines from then on; a change may be two lines at one time"
JSON_SHAPE = 'the file looks like {"metadata": {"gap_seconds": 300}, "data": [12, 12, 7]}'


def read_trace(path: Path, read: Callable[[Path], bytes]) -> CapacityTrace:
    """The trace in a file, of either format; `read` returns the file's bytes.

    Raises:
        UserError: naming file and line; it cannot be read, or is no trace.
    """
    try:
        text = read(path).decode("utf-8-sig")
    except OSError as error:
        what = f"cannot read the capacity trace: {error.strerror or error}"
        raise UserError(what, where=str(path), cure="check pool.path") from error
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8 text", where=str(path), cure=CSV_SHAPE + "; " + JSON_SHAPE) from error
    return parse_trace(text, source=str(path))


def parse_trace(text: str, *, source: str) -> CapacityTrace:
    """The trace in a file's text; what begins with a bracket is JSON.

    Raises:
        UserError: naming `source` and the line.
    """
    if not text.strip():
        raise UserError("the file is empty", where=source, cure=CSV_SHAPE + "; " + JSON_SHAPE)
    return _from_json(text, source) if text.lstrip()[0] in "{[" else _from_csv(text, source)


def _from_csv(text: str, source: str) -> CapacityTrace:
    points: list[tuple[float, int]] = []
    heading = False
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where, fields = f"{source}:{number}", [field.strip() for field in line.split(",")]
        if not (points or heading) and [field.lower() for field in fields] == HEADING:
            heading = True
            continue
        if len(fields) != 2:
            raise UserError(f"expected two numbers, found {line.strip()!r}", where=where, cure=CSV_SHAPE)
        seconds, count = _seconds(fields[0], where), _count(fields[1], where)
        if points and seconds < points[-1][0]:
            what = f"time goes back, from {points[-1][0]:g} to {seconds:g}"
            raise UserError(what, where=where, cure="sort the lines by time")
        points.append((seconds, count))
    if not points:
        raise UserError("no lines below the heading", where=source, cure=CSV_SHAPE)
    return CapacityTrace.of(points)


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a number of seconds", where=where, cure=CSV_SHAPE)
    if seconds < 0:
        raise UserError(f"{text} is a negative time", where=where, cure="count seconds from the trace's beginning, 0")
    return seconds


def _count(text: str, where: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise UserError(f"{text!r} is not a whole number of machines", where=where, cure=CSV_SHAPE) from None
    if count < 0:
        raise UserError(f"{count} machines cannot be", where=where, cure="a count is 0 or more")
    return count


def _from_json(text: str, source: str) -> CapacityTrace:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{source}:{error.lineno}"
        raise UserError(f"broken JSON: {error.msg} at column {error.colno}", where=where, cure=JSON_SHAPE) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"broken JSON: {error}", where=source, cure=JSON_SHAPE) from error
    gap_s, data = _parts(tree, source)
    for at, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            what = f"{json.dumps(count)} is not a number of machines"
            raise UserError(what, where=f"{source}: data[{at}]", cure="each is 0, 1, 2, ...")
    return CapacityTrace.of(((at * gap_s, count) for at, count in enumerate(data)), end_s=len(data) * gap_s)


def _parts(tree: Any, source: str) -> tuple[float, list[Any]]:
    metadata = tree.get("metadata") if isinstance(tree, dict) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, int | float) and gap_s < 0:
        what = f"{gap_s:g} is a negative time between two rows"
        raise UserError(what, where=f"{source}: metadata.gap_seconds", cure=JSON_SHAPE)
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 0 < gap_s < 1e9:
        raise UserError("no metadata.gap_seconds above 0", where=source, cure=JSON_SHAPE)
    if not isinstance(tree.get("data"), list):
        raise UserError("no list `data`", where=source, cure=JSON_SHAPE)
    if not tree["data"]:
        raise UserError("`data` is empty", where=source, cure=JSON_SHAPE)
    return float(gap_s), tree["data"]
