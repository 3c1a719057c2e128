"""Runs one job at a time in this process, from a script or a notebook, and leaves the process as it was."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from tidemill.core.errors import UserError
from tidemill.jobs.stopping import StopRequest

T = TypeVar("T")

_busy = threading.Lock()


def run_here(job: Callable[[StopRequest], T]) -> T:
    """Run a job and wait for it: in this thread, or in another one if an event loop runs in this thread (a notebook).

    The first Ctrl-C asks the job to stop after a checkpoint; a second one stops waiting.

    Raises:
        TidemillError: the job failed, or another one is in progress.
    """
    stop = StopRequest()
    if not _loop_runs_here():
        with _session():
            return job(stop)
    worker = _Worker(job, stop)
    with stop.on_signals(lambda: stop.request("interrupt again to stop waiting")):
        worker.done.wait()
    return worker.result()


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel or another session of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def run_async(job: Callable[[StopRequest], T]) -> T:
    """Run a job in another thread; cancelling the task asks it to stop after a checkpoint and waits for that.

    Raises:
        TidemillError: as `run_here`.
    """
    stop, loop, finished = StopRequest(), asyncio.get_running_loop(), asyncio.Event()
    worker = _Worker(job, stop, notify=lambda: loop.call_soon_threadsafe(finished.set))
    try:
        await finished.wait()
    except asyncio.CancelledError:
        stop.request("cancelled")
        await finished.wait()
        worker.result()
        raise
    return worker.result()


class _Worker(Generic[T]):
    """A job that starts at once in a daemon thread."""

    def __init__(
        self, job: Callable[[StopRequest], T], stop: StopRequest, notify: Callable[[], Any] | None = None
    ) -> None:
        self.done = threading.Event()
        self._job, self._stop, self._notify = job, stop, notify
        self._result: T
        self._error: BaseException | None = None
        context = contextvars.copy_context()  # notebooks find the cell of an output by it
        threading.Thread(target=lambda: context.run(self._run), name="tidemill-run", daemon=True).start()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            with _session():
                self._result = self._job(self._stop)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error
        finally:
            self.done.set()
            if self._notify is not None:
                self._notify()


@contextmanager
def _session() -> Iterator[None]:
    """One job at a time; restores torch's threads."""
    if not _busy.acquire(blocking=False):
        raise UserError("a run is in progress in this process", hint="wait until it ends, or interrupt it")
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    try:
        yield
    finally:
        if torch is not None:
            torch.set_num_threads(threads)
        _busy.release()
