"""What clients did beside their requests, on disk: sessions they opened and ended, rewards they gave."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidemill.core.records import Record


class SessionEvent(Record, omit_defaults=True):
    """A line of the log."""

    session: str
    event: Literal["attached", "reward", "ended", "failed"]
    value: float = 0.0
    turn: int | None = None  # of the reward; None: of the whole session
    group: str = ""  # the client's name for it
    metadata: dict[str, Any] = {}  # of the client that opened it
    opened_by: str = ""  # digest of its retry key


class SessionLog:
    """Appends a line for each event; when `write` returns it is durable. A torn last line is ignored.

    Attributes:
        opened_by: names of sessions of before a restart by `SessionEvent.opened_by`.
    """

    def __init__(self, path: Path) -> None:
        self._earlier = defaultdict[str, list[SessionEvent]](list)
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                noted = msgspec.json.decode(line, type=SessionEvent)
            except msgspec.DecodeError:
                continue
            self._earlier[noted.session].append(noted)
        self.opened_by = {
            each.opened_by: name for name, noted in self._earlier.items() for each in noted if each.opened_by
        }
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size:
            self._file.write(b"\n")  # after a torn line

    def earlier(self, session: str) -> Sequence[SessionEvent]:
        """The events of a session before a restart, in their order."""
        return self._earlier.get(session, ())

    @property
    def names(self) -> Collection[str]:
        """Sessions of before a restart."""
        return self._earlier.keys()

    def write(self, noted: SessionEvent) -> None:
        self._file.write(msgspec.json.encode(noted) + b"\n")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
