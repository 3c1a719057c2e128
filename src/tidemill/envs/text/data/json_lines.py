"""Rows from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tidemill.core.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CURE = "one JSON object per line, as UTF-8"


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, value) of every line that is not blank, lines counted from 1.

    Raises:
        UserError: naming file and line of the first that is not JSON text.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).rstrip(b"\r\n")
            if text.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(text, where)


def _parsed(line: bytes, where: str) -> Any:
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # an escaped half of a character pair cannot be encoded
    except UnicodeError as error:
        raise UserError("not valid UTF-8 text", where=where, cure="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        fault = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(f"broken JSON: {fault}", where=where, cure=CURE) from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
