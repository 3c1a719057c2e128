"""Results and failures of verbs, and how they are written: text, tables, or one JSON object under `--json`."""

from __future__ import annotations

import errno
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
    root_error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`text` may be anything rich can draw; plain strings are written as they stand."""

    data: dict[str, Any] = field(default_factory=dict)
    text: RenderableType = ""
    exit_code: int = 0


Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object on standard output.")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", negative=(), help="Show the configuration and what it amounts to; run nothing.")
]


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


BUG_CODE = 1
INTERRUPTED_CODE = 130
FREE_SPACE = "free some space and run the same command again"
WRITE_ELSEWHERE = "choose a place you may write to"
CURES = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EACCES: WRITE_ELSEWHERE,
    errno.EPERM: WRITE_ELSEWHERE,
    errno.EROFS: WRITE_ELSEWHERE,
    errno.EISDIR: "a file belongs there: move the directory away, or name another place",
    errno.ENOTDIR: "a part of that path is a file: name another place",
}
"""Of what the system refuses, where it is not a bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`data["kind"]` is "input", "guard", "interrupted", "deadline", "lost", "exit" or "bug"."""

    text: str
    data: dict[str, Any]
    exit_code: int


def explain(error: BaseException, *, debug: bool = False) -> Failure:
    """The failure an exception amounts to; with `debug` the traceback is in its text, else a bug's goes to a file."""
    error = root_error(error)
    told = "".join(traceback.format_exception(error)) if debug else ""
    if isinstance(error, KeyboardInterrupt):
        return Failure(
            text=told + "interrupted",
            data={"kind": "interrupted", "message": "interrupted"},
            exit_code=INTERRUPTED_CODE,
        )
    if isinstance(error, SystemExit):  # a library's: rich ends the process when the reader of a table has gone
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        words = error.code if isinstance(error.code, str) else ""
        return Failure(text=told + words, data={"kind": "exit", "message": words}, exit_code=code)
    if (known := as_user_error(error)) is not None:
        return Failure(text=told + user_text(known), data=user_data(known), exit_code=known.exit_code)
    if isinstance(error, GuardStop):
        return Failure(
            text=f"{told}stopped by a guard: {error}",
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
    return Failure(text=told + text, data=data, exit_code=BUG_CODE)


def as_user_error(error: BaseException) -> UserError | None:
    """The error as a fault of input or machine that its user can mend; None if it is something else."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in CURES:
        path, hint = str(error.filename or ""), CURES[error.errno]
        if error.errno == errno.EACCES and _unreadable(path):
            hint = "make it readable for you, or name another place"
        return UserError(str(error.strerror).lower(), where=path, hint=hint)
    # torch's own class and the words of its CPU allocator, named so that torch need not be imported.
    allocator = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or allocator:
        first = str(error).splitlines()[:1]
        hint = (
            "lower batch.microbatch_tokens (in sft, reward_model and dpo stages supervised.microbatch_tokens), "
            "engine.slots or trainer.logits_budget_mb"
        )
        return UserError(f"out of memory{': ' if first else ''}{''.join(first)}", hint=hint)
    return None


def _unreadable(path: str) -> bool:
    """Whether a file or the folder it is in is there, and may not be read."""
    return any(os.path.lexists(each) and not os.access(each, os.R_OK) for each in (Path(path), Path(path).parent))


def user_text(error: UserError) -> str:
    """`error: ` before every fault; the hint below."""
    from tidemill.config.issues import ConfigError

    if isinstance(error, ConfigError):
        return "\n".join(f"error: {issue.line}" for issue in error.issues)
    return f"error: {error}"


def user_data(error: UserError) -> dict[str, Any]:
    """The same for programs."""
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
    """The path of a file with the traceback, or why there is none."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tidemill-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError as problem:
        return f"no file ({problem})"
    return file.name
