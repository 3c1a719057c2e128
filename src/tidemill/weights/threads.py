"""Threads that share one job, such as encoding a delta: numpy and zlib release the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """A pool of threads; with one thread everything runs in the caller."""

    def __init__(self, count: int = 1) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="weights") if count > 1 else None

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results, in order. The first exception is raised when no thread works on the job any more."""
        if self._pool is None:
            return [function(item) for item in items]
        futures = [self._pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


INLINE = Threads()
