"""Ways to stop a run: signals, and a request from another thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Asks a run to stop, from any thread and at any time.

    Attributes:
        time_is_up: it was the deadline of `after_hours`.
        signal: the signal that asked for it, if one did.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self.time_is_up = False
        self.signal: signal.Signals | None = None
        self._notify: Callable[[str], object] | None = None

    @property
    def requested(self) -> bool:
        return self._reason is not None

    def request(self, reason: str) -> None:
        """End the run after a checkpoint; if it has not started, once it starts."""
        with self._lock:
            self._reason = reason
            notify = self._notify
        if notify is not None:
            notify(reason)

    @contextmanager
    def after_hours(self, hours: float) -> Iterator[None]:
        """Request a stop when the block has run for some hours; 0: never."""

        def end() -> None:
            self.time_is_up = True
            self.request(f"{hours:g} h of trainer.hours are over")

        timer = threading.Timer(hours * 3600, end)
        timer.daemon = True
        if hours:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def bound(self, notify: Callable[[str], object]) -> Iterator[None]:
        """Call `notify` at a request, or at once if there was one."""
        with self._lock:
            self._notify, reason = notify, self._reason
        if reason is not None:
            notify(reason)
        try:
            yield
        finally:
            with self._lock:
                self._notify = None

    @contextmanager
    def on_signals(self, notify: Callable[[], object]) -> Iterator[None]:
        """Call `notify` at the first Ctrl-C or SIGTERM, and remember which; a second one ends the process.

        This holds also where the process ignored them: a script's `command &` ignores SIGINT, but a run that gets one
        is to end after a checkpoint.

        Args:
            notify: runs inside a signal handler, possibly in the middle of a line of output: it may only set a flag.
        """
        defaults: dict[signal.Signals, Any] = {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            defaults = {}
        before = {number: signal.getsignal(number) for number in defaults}

        def on_first_signal(number: int, frame: object) -> None:
            self.signal = signal.Signals(number)
            for each, default in defaults.items():
                signal.signal(each, default)
            notify()

        for number in defaults:
            signal.signal(number, on_first_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
