"""Results and failures of verbs, written as text, tables or one JSON object (`--json`)."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter

from tidemill.core.errors import (
    ClusterLost,
    DeadlineError,
    GuardStop,
    TidemillError,
    TrainerLost,
    as_user_error,
    root_error,
)

if TYPE_CHECKING:
    from rich.console import RenderableType  # rich is loaded where a table is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`text` is a rich renderable; strings are written verbatim."""

    data: dict[str, Any] = field(default_factory=dict)
    text: RenderableType = ""
    exit_code: int = 0


Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object on standard output.")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", negative=(), help="Show the configuration and derived numbers; run nothing.")
]


STDOUT = 1


class OutputClosed(Exception):
    """The reader of standard output has closed it (`| head`)."""


def prepare_streams() -> None:
    """Make writes to standard output and error safe: closed streams discard, unencodable characters become `?`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # set by some containers
        del os.environ["COLUMNS"]


def close_stdout() -> None:
    """Flush, and drop what cannot be written, so that the interpreter does not fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)


def output_is_closed(error: BaseException) -> bool:
    """Whether an exception only means that; rich raises SystemExit on a broken pipe."""
    return isinstance(error, OutputClosed) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    )


@contextmanager
def reserved_stdout(reserved: bool) -> Iterator[TextIO]:
    """Yield standard output. If reserved, writes by libraries and child processes are redirected to stderr.

    Redirects the file descriptor, because child processes of reward functions do not use `sys.stdout`.
    """
    if not reserved:
        yield sys.stdout
        return
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            is_process_stdout = stdout.fileno() == STDOUT
        except (OSError, AttributeError):  # replaced by a stream without a descriptor
            is_process_stdout = False
        if not is_process_stdout:
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
    """Write and flush a verb's result.

    Raises:
        OutputClosed: the reader closed the pipe.
        OSError: the write failed, e.g. on a full disk.
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
        raise OutputClosed from error


def write_json(data: dict[str, Any], stdout: TextIO) -> None:
    """Write one JSON object on one line; non-finite numbers become null."""
    stdout.write(json.dumps(_finite(data), default=str, ensure_ascii=False, allow_nan=False) + "\n")
    stdout.flush()


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters but line feed and tab."""


def printable(text: str) -> str:
    """A text for a terminal: control characters are escaped."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def note(line: str) -> None:
    """Write one line of progress to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


BUG_CODE = 1
INTERRUPTED_CODE = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """`data["kind"]` is "input", "guard", "interrupted", "deadline", "lost", "exit" or "bug"."""

    text: str
    data: dict[str, Any]
    exit_code: int


def explain(error: BaseException, *, debug: bool = False) -> Failure:
    """Describe an exception; with `debug` the text includes the traceback, else a bug's traceback goes to a file."""
    error = root_error(error)
    trace = "".join(traceback.format_exception(error)) if debug else ""
    if isinstance(error, KeyboardInterrupt):
        return Failure(trace + "interrupted", {"kind": "interrupted", "message": "interrupted"}, INTERRUPTED_CODE)
    if isinstance(error, SystemExit):  # raised by rich on a broken pipe
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = error.code if isinstance(error.code, str) else ""
        return Failure(trace + message, {"kind": "exit", "message": message}, code)
    if (known := as_user_error(error)) is not None:
        from tidemill.config.issues import ConfigError

        issues = known.issues if isinstance(known, ConfigError) else []
        text = "\n".join(f"error: {issue.line}" for issue in issues) if issues else f"error: {known}"
        data = {"kind": "input", "message": known.what, "where": known.where, "hint": known.hint}
        return Failure(trace + text, data | {"issues": [asdict(issue) for issue in issues]}, known.exit_code)
    if isinstance(error, GuardStop):
        data = {"kind": "guard", "message": str(error)}
        return Failure(f"{trace}stopped by a guard: {error}", data, error.exit_code)
    message = str(error) if isinstance(error, TidemillError) else f"{type(error).__name__}: {error}"
    kinds = {DeadlineError: "deadline", TrainerLost: "lost", ClusterLost: "lost"}
    kind = next((name for known_kind, name in kinds.items() if isinstance(error, known_kind)), "bug")
    data = {"kind": kind, "message": message}
    text = f"error: {message}" if isinstance(error, TidemillError) else f"internal error: {message}"
    if not debug:
        data["traceback"] = write_traceback(error)
        text += f"\n  the traceback is in {data['traceback']} (or run again with --debug)"
    if kind == "bug":
        text += "\n  this is a bug in Tidemill: please report it, with the traceback and the command"
    return Failure(trace + text, data, BUG_CODE)


def write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; return its path, or why it could not be written."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="tidemill-error-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"no file ({problem})"
    return path
