"""Spans: events with a duration."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tidemill.core.clock import Clock
from tidemill.core.protocols import Telemetry


class MonotonicClock:
    """For code that has no event loop; the same origin as the loop's own clock on Linux."""

    def now(self) -> float:
        return time.monotonic()


@contextmanager
def span(telemetry: Telemetry, clock: Clock, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Write one event when the block ends, with `duration_s` and whatever the block put into the yielded dict.

    Example:
        with span(telemetry, clock, "evaluation", step=5) as fields:
            fields["greedy_accuracy"] = await evaluate()

    A block left by an exception is written too, with the exception's name as `error`; the exception goes on.
    """
    started = clock.now()
    try:
        yield fields
    except BaseException as error:
        fields["error"] = type(error).__name__
        raise
    finally:
        fields["duration_s"] = round(clock.now() - started, 6)
        telemetry.event(name, **fields)
