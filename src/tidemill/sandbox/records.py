"""What a sandbox is given and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from tidemill.core.records import Record

MEGABYTE = 1 << 20
MOST_ARGUMENT, MOST_ARGUMENTS = 128 * 1024 - 1, MEGABYTE
"""Bytes of one argument or variable (Linux's MAX_ARG_STRLEN), and of all of a command."""

Ending: TypeAlias = Literal["", "wall", "cpu", "memory", "processes"]
"""The limit that ended a command; empty: none did."""


class SandboxError(Exception):
    """A method of a sandbox cannot do what it was asked: a file that is missing, too large or a link."""


class SandboxLostError(SandboxError):
    """The sandbox itself failed, whatever was done in it."""


def check_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Check that the kernel could start a command.

    Raises:
        SandboxError: it is empty or too long, has NUL, or a variable's name has "=".
        TypeError: it is one text instead of a sequence of texts.
    """
    if isinstance(argv, str) or not all(isinstance(each, str) for each in (*argv, *env, *env.values())):
        raise TypeError(f"a command is a list of texts, such as ['ls', '-l'], not {argv!r}")
    if not argv:
        raise SandboxError("the command is empty")
    try:
        texts = [each.encode() for each in (*argv, *env, *env.values())]
    except UnicodeEncodeError as error:
        raise SandboxError(f"the command cannot be encoded: {error.reason}") from None
    if any(b"\0" in text for text in texts):
        raise SandboxError("the command contains NUL")
    if any(not name or "=" in name for name in env):
        raise SandboxError('a variable has no name, or one with "="')
    if max(map(len, texts)) > MOST_ARGUMENT or sum(map(len, texts)) > MOST_ARGUMENTS:
        raise SandboxError("the command is too long; give long texts as standard input, or in a file")


class Limits(Record):
    """Of a sandbox as a whole: of all its processes together."""

    memory_bytes: int = 512 * MEGABYTE
    processes: int = 64  # threads count, too
    cpu_s: float = 10.0  # of one command
    wall_s: float = 30.0  # of one command
    scratch_bytes: int = 64 * MEGABYTE
    scratch_files: int = 4096
    output_bytes: int = MEGABYTE  # of standard output, and of standard error


class Finished(Record):
    """How a command ended."""

    stdout: bytes
    stderr: bytes
    code: int  # exit code; -N: ended by signal N
    ended: Ending = ""
    discarded_bytes: int = 0  # output beyond the limit
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Snapshot(Record):
    """The regular files and folders of a sandbox."""

    data: bytes  # tar
    left_out: int = 0  # links, FIFOs, sockets and devices, which are not kept; and set-uid bits, which are removed


class Sandbox(Protocol):
    """A folder of files, and commands that see nothing else. A sandbox runs one command at a time.

    Paths are relative to the folder, in which commands start. All methods raise SandboxLostError if the sandbox fails.
    """

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] = {},
        timeout_s: float | None = None,
    ) -> Finished:
        """Run a command to its end; processes that it leaves behind are killed.

        Args:
            argv: program and arguments. "python3" is the interpreter that runs Tidemill, without the packages of
                its virtual environment.
            env: variables besides PATH, HOME and LANG.
            timeout_s: deadline; at most the limit.

        Raises:
            SandboxError: the command cannot be started: it has NUL, or is too long.
        """

    def read(self, path: str) -> bytes:
        """The content of a regular file; links are not followed.

        Raises:
            SandboxError: there is none.
        """

    def write(self, path: str, data: bytes) -> None:
        """Write a file and the folders above it; links are not followed.

        Raises:
            SandboxError: it cannot be written: a link, or no space.
        """

    def snapshot(self) -> Snapshot:
        """All files."""

    def restore(self, snapshot: Snapshot) -> None:
        """Replace all files.

        Raises:
            SandboxError: it is larger than the sandbox or damaged.
        """

    def close(self) -> None:
        """End all processes and delete the files. May be called again."""
