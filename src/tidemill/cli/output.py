"""Results and failures of verbs, written as text, tables or one JSON object (`--json`)."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

from cyclopts import Parameter
from rich.console import RenderableType

from tidemill.core.errors import (
    ClusterLost,
    DeadlineError,
    GuardStop,
    TidemillError,
    TrainerLost,
    UserError,
    as_user_error,
    root_error,
)


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
    """Write and flush a verb's result.

    Raises:
        ReaderGone: the reader closed the pipe.
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


def note(line: str) -> None:
    """Write one line of progress to standard error."""
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


BUG_CODE = 1
INTERRUPTED_CODE = 130


@dataclass(frozen=True, slots=True, kw_only=True)
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
        return Failure(
            text=trace + "interrupted",
            data={"kind": "interrupted", "message": "interrupted"},
            exit_code=INTERRUPTED_CODE,
        )
    if isinstance(error, SystemExit):  # raised by rich on a broken pipe
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        message = error.code if isinstance(error.code, str) else ""
        return Failure(text=trace + message, data={"kind": "exit", "message": message}, exit_code=code)
    if (known := as_user_error(error)) is not None:
        return Failure(text=trace + user_text(known), data=user_data(known), exit_code=known.exit_code)
    if isinstance(error, GuardStop):
        return Failure(
            text=f"{trace}stopped by a guard: {error}",
            data={"kind": "guard", "message": str(error)},
            exit_code=error.exit_code,
        )
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
    return Failure(text=trace + text, data=data, exit_code=BUG_CODE)


def user_text(error: UserError) -> str:
    """One `error: ` line per issue, with its hint."""
    from tidemill.config.issues import ConfigError

    if isinstance(error, ConfigError):
        return "\n".join(f"error: {issue.line}" for issue in error.issues)
    return f"error: {error}"


def user_data(error: UserError) -> dict[str, Any]:
    """The error for `--json`."""
    from tidemill.config.issues import ConfigError

    issues = [asdict(issue) for issue in error.issues] if isinstance(error, ConfigError) else []
    return {
        "kind": "input",
        "message": error.what,
        "where": error.where,
        "hint": error.hint,
        "issues": issues,
    }


def write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; return its path, or why it could not be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tidemill-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"no file ({problem})"
    return file.name
