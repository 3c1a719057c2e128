"""Standard output: one JSON object under `--json`, text or tables otherwise."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from tidemill.cli.result import Result

STDOUT = 1
NARROWEST = 40
"""Columns: in fewer, neither help nor tables can be laid out. Some containers say 0."""


class ReaderGone(Exception):
    """Nobody reads standard output any more (`| head`)."""


def prepare_streams() -> None:
    """Let standard output and error take whatever is written: closed ones take it nowhere, and what their encoding has
    no character for becomes a question mark."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if (columns := os.environ.get("COLUMNS", "")).isdigit() and int(columns) < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)


def close_stdout() -> None:
    """What could not be written is dropped, lest the interpreter try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)


def reader_has_gone(error: BaseException) -> bool:
    """Whether that is all an exception tells; rich ends the process when it finds out."""
    return isinstance(error, ReaderGone) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    )


@contextmanager
def reserved_stdout(reserved: bool) -> Iterator[TextIO]:
    """Standard output as a stream. When reserved, what libraries and child processes write there goes to stderr.

    The file descriptor itself is moved, since a reward function's child process knows nothing of `sys.stdout`.
    """
    if not reserved:
        yield sys.stdout
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        if not _is_process_stdout(stdout):
            yield stdout
            return
        stdout.flush()
        kept = os.dup(STDOUT)
        os.dup2(sys.stderr.fileno(), STDOUT)
        try:
            with open(kept, "w", encoding="utf-8", closefd=False) as stream:
                yield stream
        finally:
            os.dup2(kept, STDOUT)
            os.close(kept)


def write_result(result: Result, stdout: TextIO, *, as_json: bool) -> None:
    """The verb's result, flushed.

    Raises:
        ReaderGone: nobody reads it.
        OSError: it cannot be written, the disk being full.
    """
    try:
        if as_json:
            write_json(result.data, stdout)
        elif isinstance(result.text, str):
            if result.text:
                stdout.write(f"{result.text}\n")
        else:
            from rich.console import Console

            Console(file=stdout).print(result.text)
        stdout.flush()
    except BrokenPipeError as error:
        raise ReaderGone from error


def write_json(data: dict[str, Any], stdout: TextIO) -> None:
    """One line, one object; what JSON has no number for is null."""
    stdout.write(json.dumps(_finite(data), default=str, ensure_ascii=False, allow_nan=False) + "\n")
    stdout.flush()


def note(line: str) -> None:
    """One line of progress, on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _is_process_stdout(stream: TextIO) -> bool:
    try:
        return stream.fileno() == STDOUT
    except (OSError, AttributeError, io.UnsupportedOperation):
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value
