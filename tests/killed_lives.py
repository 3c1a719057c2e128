"""Runs work in forks that are killed (-9) at random times and restarted until it is done.

Forking imports the model library only once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable


def killed_until_done(
    life: Callable[[], object],
    *,
    newest: Callable[[], int],
    pause_s: float,
    until_s: float,
    after_kill: Callable[[], None] = lambda: None,
) -> int:
    """Returns the number of kills.

    Args:
        life: continues from the state the previous fork left, to the end.
        newest: the last step that survives a kill.
        pause_s: maximum delay of a kill after the 1st to 6th further step.
        until_s: `time.monotonic()` after which no fork is started.
    """
    moments, kills = random.Random(1), 0
    while time.monotonic() < until_s:
        child = os.fork()
        if child == 0:
            life()
            os._exit(0)
        goal, within_s = newest() + moments.randint(1, 6), moments.uniform(0, pause_s)
        ended, status = 0, 0
        while newest() < goal and not ended:
            time.sleep(0.002)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            time.sleep(within_s)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        after_kill()
    return kills
