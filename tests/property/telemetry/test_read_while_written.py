"""Whatever happens to a run between two looks at it, a reader has the history that a fresh reading finds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidemill.telemetry import followed_file
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.run_logs import RunLogs

WRITE, TORN, RESUME, CLEAR = "write", "torn", "resume", "clear"
ACTIONS = st.tuples(
    st.sampled_from([WRITE, WRITE, WRITE, WRITE, TORN, RESUME, RESUME, CLEAR]),
    st.integers(0, 5),  # steps written, or the step to return to
    st.sets(st.integers(0, 5)),  # moments of the action at which the reader looks
)


class WatchedRun:
    """A run whose every write a reader may look at before and after it. A step that is written again has the same line,
    unless it is a multiple of `session_every`: then the line has its session. (A place in a file that has the same last
    line as before does not mean the same history.)"""

    def __init__(self, path: Path, *, session_every: int) -> None:
        self.run = RunDirectory(path)
        self.run.samples.mkdir()
        self.run.checkpoints.mkdir()
        self.run.write_manifest({"format": 3})
        self.logs, self.session_every = RunLogs(self.run), session_every
        self.session, self.step = 1, 0

    def look(self) -> None:
        self.logs.refresh()
        assert list(self.logs.metrics) == read_metrics(self.run.metrics)

    def act(self, action: str, number: int, moments: set[int]) -> None:
        with self._looking_at(moments):
            if action == WRITE:
                writer = JsonlWriter(self.run.metrics)
                for moment in range(number):
                    self.step += 1
                    writer.write(self._line())
                    if moment in moments:
                        self.look()
                writer.close()
            elif action == TORN:
                with self.run.metrics.open("ab") as file:
                    file.write(b'{"step": 1, "x')
            elif action == RESUME:
                self.session += 1
                self.step = min(self.step, number)
                self.run.rewind(self.step)
            else:
                self.session, self.step = self.session + 1, 0
                self.run.clear()

    def _line(self) -> dict[str, float]:
        session = {"session": self.session} if self.step % self.session_every == 0 else {}
        return {"step": self.step, "loss": 1 / self.step, **session}

    @contextmanager
    def _looking_at(self, moments: set[int]) -> Iterator[None]:
        """Look before and after each truncation, deletion and new manifest, at those moments of the action."""
        passed = 0

        def watched(function: Callable[..., None]) -> Callable[..., None]:
            def wrapper(*arguments: Any, **named: Any) -> None:
                nonlocal passed
                for call in (None, function):
                    if call is not None:
                        call(*arguments, **named)
                    passed += 1
                    if passed in moments:
                        self.look()

            return wrapper

        with (
            mock.patch("tidemill.telemetry.run_dir.os.truncate", watched(os.truncate)),
            mock.patch(
                "tidemill.telemetry.run_dir.write_json", watched(RunDirectory.write_manifest.__globals__["write_json"])
            ),
            mock.patch("pathlib.Path.unlink", watched(Path.unlink)),
            mock.patch("os.fsync"),
        ):
            yield


SAME_LAST_LINE = [(WRITE, 4, {3}), (RESUME, 2, set[int]()), (WRITE, 4, set[int]())]
BETWEEN = [(WRITE, 4, {3}), (RESUME, 2, {2}), (WRITE, 4, set[int]())]
"""The reader looks after the generation rose and before the file is cut."""


@example(actions=SAME_LAST_LINE, block=64, session_every=3)
@example(actions=BETWEEN, block=64, session_every=3)
@given(
    actions=st.lists(ACTIONS, max_size=10), block=st.sampled_from([16, 64, 1 << 20]), session_every=st.integers(1, 3)
)
@settings(max_examples=60, deadline=None)
def test_the_history_is_that_of_a_fresh_reading(
    actions: list[tuple[str, int, set[int]]], block: int, session_every: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(followed_file, "BLOCK_BYTES", block):
        watched = WatchedRun(Path(folder), session_every=session_every)
        for action in actions:
            watched.act(*action)
        watched.look()
