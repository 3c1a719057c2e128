"""From an exception to what the user reads, what `--json` says, and the exit code."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidemill.core.errors import (
    ClusterLost,
    DeadlineError,
    GuardStop,
    TidemillError,
    TrainerLost,
    UserError,
    root_fault,
)

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
    error = root_fault(error)
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
        path, cure = str(error.filename or ""), CURES[error.errno]
        if error.errno == errno.EACCES and _unreadable(path):
            cure = "make it readable for you, or name another place"
        return UserError(str(error.strerror).lower(), where=path, cure=cure)
    # torch's own class and the words of its CPU allocator, named so that torch need not be imported.
    allocator = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or allocator:
        first = str(error).splitlines()[:1]
        cure = (
            "lower batch.microbatch_tokens (in sft, reward_model and dpo stages supervised.microbatch_tokens), "
            "engine.slots or trainer.logits_budget_mb"
        )
        return UserError(f"out of memory{': ' if first else ''}{''.join(first)}", cure=cure)
    return None


def _unreadable(path: str) -> bool:
    """Whether a file or the folder it is in is there, and may not be read."""
    return any(os.path.lexists(each) and not os.access(each, os.R_OK) for each in (Path(path), Path(path).parent))


def user_text(error: UserError) -> str:
    """`error: ` before every fault; the cure below."""
    from tidemill.config.faults import ConfigError

    if isinstance(error, ConfigError):
        return "\n".join(f"error: {fault.line}" for fault in error.faults)
    return f"error: {error}"


def user_data(error: UserError) -> dict[str, Any]:
    """The same for programs."""
    from tidemill.config.faults import ConfigError

    faults = [asdict(fault) for fault in error.faults] if isinstance(error, ConfigError) else []
    return {
        "kind": "input",
        "message": error.what,
        "where": error.where,
        "cure": error.cure,
        "faults": faults,
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
