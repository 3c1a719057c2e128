"""Signals that stop a run."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tidemill.jobs.stopping import StopRequest


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])  # SIG_IGN: a script's `command &`
def test_the_first_interrupt_stops_the_run_and_the_second_ends_the_process(handler: Any) -> None:
    stop, notified = StopRequest(), list[bool]()
    before = signal.signal(signal.SIGINT, handler)
    try:
        with stop.on_signals(lambda: notified.append(True)):
            os.kill(os.getpid(), signal.SIGINT)
            assert notified == [True]
            assert stop.signal == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert notified == [True]
