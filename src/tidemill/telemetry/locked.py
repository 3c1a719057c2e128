"""A directory that one process works on at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from tidemill.core.errors import UserError
from tidemill.telemetry.jsonl import disk_error

LOCK = ".lock"


class LockedDirectory:
    """Holds the lock of `path` from `acquire` to `close`; a context manager that closes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None

    def acquire(self, held: Callable[[], str]) -> None:
        """Take the lock, or refuse at once.

        Args:
            held: says what another process is doing here; asked only where one is.

        Raises:
            UserError: another process holds it, or it cannot be written.
        """
        lock = FileLock(self.path / LOCK, blocking=False, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            cure = "wait until it ends or stop it, or choose another --run.dir"
            raise UserError(held(), where=str(self.path), cure=cure) from error
        except OSError as error:
            raise disk_error(error, self.path / LOCK) from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
