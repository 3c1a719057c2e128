"""Threads that share a job: results in order, and no thread at work after a failure."""

from __future__ import annotations

import threading
import time

import pytest

from tidemill.weights.threads import Threads


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_are_in_order(count: int) -> None:
    threads = Threads(count)

    assert threads.map(lambda number: number**2, range(20)) == [number**2 for number in range(20)]
    threads.close()


def test_two_threads_work_at_the_same_time() -> None:
    threads, meeting = Threads(2), threading.Barrier(2, timeout=10)

    assert len(threads.map(lambda _: meeting.wait(), range(2))) == 2
    threads.close()


def test_a_failure_is_raised_when_nobody_works_any_more() -> None:
    threads, running = Threads(2), []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("broken")
        running.append(number)
        time.sleep(0.1)
        running.remove(number)

    with pytest.raises(ValueError, match="broken"):
        threads.map(work, range(4))
    assert running == []
    threads.close()
