"""Exceptions. An error that a user can act on names the problem, its place and a fix."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
LONGEST_MESSAGE = 300
"""Characters kept of the message of an exception of another library."""


class TidemillError(Exception):
    """Base of all errors that Tidemill raises."""

    exit_code = 1


class UserError(TidemillError):
    """The user's input is wrong; the command exits with code 2.

    Args:
        what: one sentence that names the error.
        where: the key, file and line, or flag (empty if `what` names it).
        hint: how to fix it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        return f"{first}\n  {self.hint}" if self.hint else first


class GuardStop(TidemillError):
    """A guard ended a run that learns nothing; exit code 3."""

    exit_code = 3


class RollBack(TidemillError):
    """The run returns to the checkpoint of `step`, in the same process."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"return to step {step}")


class WorkerLost(TidemillError):
    """A worker is gone. The fleet handles it as an event and logs `cause` and `hint`."""

    def __init__(self, cause: str, hint: str = "") -> None:
        self.cause, self.hint = cause, hint
        super().__init__(f"{cause}; {hint}" if hint else cause)


class TrainerLost(TidemillError):
    """The trainer's process or its critic's is gone, which ends the run; it can be resumed."""


class ScorerLost(TidemillError):
    """The process of a reward model or the reference is gone and could not be restarted."""


class ClusterLost(TidemillError):
    """The Ray cluster does not respond, which ends the run; it can be resumed."""


class WeightsError(TidemillError):
    """A published version could not be read. The message names the version and the missing or damaged part."""


class DeadlineError(TidemillError):
    """A wait passed its deadline. The message names the awaited result, the time waited and where to look."""

    def __init__(self, awaited: str, *, waited_s: float, look_at: str) -> None:
        self.awaited, self.waited_s, self.look_at = awaited, waited_s, look_at
        super().__init__(f"waited {waited_s:.1f} s for {awaited}; look at {look_at}")


def root_error(error: BaseException) -> BaseException:
    """The exception to report of a group: an interrupt, else a `UserError`, a guard, an `OSError`, or the first."""
    leaves = list(_leaves(error))
    for kind in (KeyboardInterrupt, UserError, GuardStop, RollBack, OSError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0] if leaves else error


def describe_error(error: BaseException) -> str:
    """Message of the root error; for exceptions other than Tidemill's, with the type."""
    root = root_error(error)
    return str(root) if isinstance(root, TidemillError) else exception_text(root)


def error_line(error: BaseException) -> str:
    """Type and message of the root error on one line, for logs and reports."""
    root = root_error(error)
    if not isinstance(root, TidemillError):
        return exception_text(root)
    return f"{type(root).__name__}: {'; '.join(line.strip() for line in str(root).splitlines())}"


def exception_text(error: BaseException) -> str:
    """`Type: message` of any exception on one line, encodable as UTF-8, even if its `__str__` raises.

    Control characters are escaped: a message may quote what a model wrote, and a terminal would obey it.
    """
    try:
        message = " ".join(str(error)[: 10 * LONGEST_MESSAGE].split())
    except BaseException as raised:  # noqa: BLE001 -- `__str__` of another's class, which may call sys.exit
        message = f"its __str__ raised {type(raised).__name__}"
    text = f"{type(error).__name__}: {message[:LONGEST_MESSAGE]}".removesuffix(": ")
    text = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


FREE_SPACE = "free some space and run the same command again"
WRITE_ELSEWHERE = "choose a writable place"
OS_HINTS = {
    errno.ENOSPC: FREE_SPACE,
    errno.EDQUOT: FREE_SPACE,
    errno.EACCES: WRITE_ELSEWHERE,
    errno.EPERM: WRITE_ELSEWHERE,
    errno.EROFS: WRITE_ELSEWHERE,
    errno.EISDIR: "expected a file: move the directory away, or choose another place",
    errno.ENOTDIR: "a parent of that path is a file: choose another place",
}
"""Hints for OS errors that are not bugs."""


def as_user_error(error: BaseException) -> UserError | None:
    """Convert an error that the user can fix (input, permissions, disk, memory); None for others."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in OS_HINTS:
        path, hint = str(error.filename or ""), OS_HINTS[error.errno]
        places = (Path(path), Path(path).parent)
        unreadable = [place for place in places if os.path.lexists(place) and not os.access(place, os.R_OK)]
        if error.errno == errno.EACCES and unreadable:
            hint = "make it readable, or choose another place"
        return UserError(str(error.strerror).lower(), where=path, hint=hint)
    # torch's exception class and its CPU allocator's message, matched by name to avoid importing torch.
    allocator = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or allocator:
        first = str(error).splitlines()[:1]
        hint = (
            "lower batch.microbatch_tokens (in sft, reward_model and dpo stages supervised.microbatch_tokens), "
            "engine.slots or trainer.logits_budget_mb"
        )
        return UserError(f"out of memory{': ' if first else ''}{''.join(first)}", hint=hint)
    return None
