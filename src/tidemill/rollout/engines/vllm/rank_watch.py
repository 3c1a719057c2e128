"""Ends all ranks of an engine when one of them ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from tidemill.core.errors import WorkerLost

REAP_S = 1.0
ANNOUNCED_S = 0.1


class RankWatch:
    """Kills the other ranks as soon as one ends. They would wait for it in a collective, and vLLM for them for 9 s.

    Args:
        ranks: their processes, in order; none if the only rank is in this process.
    """

    def __init__(self, ranks: Sequence[BaseProcess]) -> None:
        self._ranks, self._cause, self._known = ranks, "", threading.Event()
        if ranks:
            threading.Thread(target=self._kill_when_one_ends, name="vLLM ranks", daemon=True).start()

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Around calls of the ranks. After an error none can be called again: vLLM would take the answers that the
        other ranks have given for those to the next call.

        Raises:
            WorkerLost: a rank has ended, which vLLM reports as "cancelled".
            RuntimeError: a rank raised an error, possibly because of a sample.
        """
        try:
            yield
        except Exception as error:
            if not self._ranks:
                raise
            if self._known.wait(2 * REAP_S):
                raise WorkerLost(self._cause) from error
            self._cause = f"a rank of vLLM failed: {error}"
            self._kill()
            raise RuntimeError(self._cause) from error

    def end(self, shut_down: Callable[[], None]) -> None:
        """Kill all ranks after `shut_down` of vLLM's executor has started; it reports ranks that end earlier."""
        threading.Timer(ANNOUNCED_S, self._kill).start()
        shut_down()

    def _kill(self) -> None:
        for each in self._ranks:
            each.kill()

    def _kill_when_one_ends(self) -> None:
        ended = wait([each.sentinel for each in self._ranks])
        self._kill()
        rank, process = next((at, each) for at, each in enumerate(self._ranks) if each.sentinel in ended)
        process.join(REAP_S)
        self._cause = self._cause or f"rank {rank} of {len(self._ranks)} of vLLM ended (exit code {process.exitcode})"
        self._known.set()
