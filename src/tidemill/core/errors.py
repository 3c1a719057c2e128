"""The error tree. An error a user can act on says what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST_MESSAGE = 300
"""Characters kept of the text of an exception that is not ours."""


class TidemillError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class UserError(TidemillError):
    """The user's input is wrong; the command ends with exit code 2 and nothing is lost.

    Args:
        what: one sentence naming the fault.
        where: the key, file and line, or flag at fault (empty when `what` names it).
        hint: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what, where, hint)

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        return f"{first}\n  {self.hint}" if self.hint else first


class GuardStop(TidemillError):
    """A guard (not a bug, not the user's input) ended the run; exit code 3."""

    exit_code = 3


class WorkerLost(TidemillError):
    """A worker is gone. For the fleet an event like any other; `cause` and `hint` are for whoever reads the log."""

    def __init__(self, cause: str, *, hint: str = "") -> None:
        self.cause, self.hint = cause, hint
        super().__init__(f"{cause}; {hint}" if hint else cause)


class TrainerLost(TidemillError):
    """The trainer's process, or one that computes for it, is gone, and the run with it; nothing finished is lost."""


class ReaderLost(TidemillError):
    """A reward model or the reference, in a process of its own, is gone and could not be had again."""


class ClusterLost(TidemillError):
    """The cluster that everything ran on does not answer any more; nothing finished is lost."""


class WeightsError(TidemillError):
    """A published version could not be had whole. The message names the version and what of it was missing or wrong."""


class DeadlineError(TidemillError):
    """A wait passed its deadline. The message names what was awaited, for how long, and what to look at."""

    def __init__(self, awaited: str, *, waited_s: float, look_at: str) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {awaited}; look at {look_at}")


def root_error(error: BaseException) -> BaseException:
    """What a group of concurrent failures comes down to: an interrupt, the user's fault, a guard, or the first."""
    leaves = list(_leaves(error))
    for kind in (KeyboardInterrupt, UserError, GuardStop, OSError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0] if leaves else error


def describe_error(error: BaseException) -> str:
    """What a failure came down to, for whoever reads of it later: an error's own words, a bug's with its kind."""
    root = root_error(error)
    return str(root) if isinstance(root, TidemillError) else exception_text(root)


def exception_text(error: BaseException) -> str:
    """`Type: message` of any exception, on one line that UTF-8 can encode; also where its `__str__` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception as fault:  # noqa: BLE001 -- `__str__` of a class that is not ours
        message = f"its __str__ raised {type(fault).__name__}"
    message = message[:LONGEST_MESSAGE].encode("utf-8", "backslashreplace").decode("utf-8")
    return f"{type(error).__name__}: {message}".removesuffix(": ")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
