"""Requests to a run: files in RUN/control, each applied once by the session that it names.

```
 person ──write──▶ RUN/control/ID.json ──poll──▶ stop: at once       pause, checkpoint: wait for the end of the step
                                                 resume: at once, ends a pause or withdraws one that waits
```
Every request becomes a `control` event with its outcome.
"""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from tidemill.core.formatting import duration
from tidemill.core.records import Record, decode_json
from tidemill.telemetry.jsonl import disk_error, encode, write_atomically

CONTROL = "control"
EXPIRES_S = 3600.0
HOLD_S = 600.0
"""Seconds for which a paused run keeps its rented machines, unless the request says otherwise."""
POLL_S = 0.5
"""Interval at which a paused run looks for requests."""
MOST_BYTES = 1 << 16
MOST_NAME = 40
"""Characters of a name in a request that are logged."""

Action: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]


class ControlRequest(Record):
    """A request of a person to a run."""

    request_id: str
    action: Action
    run_id: str
    session: int  # of the run; another one ignores the request
    unix_s: float  # when it was made, by the clock of whoever made it; nothing depends on it
    expires_s: float = EXPIRES_S  # a file that is older, by the clock of its file system, is ignored
    hold_s: float = HOLD_S  # of a pause: how long rented machines are kept
    by: str = ""  # "command line" or "watch"


def new_request(action: Action, *, run_id: str, session: int, by: str, hold_s: float = HOLD_S) -> ControlRequest:
    """A request with an id of its own, made now."""
    return ControlRequest(
        request_id=uuid.uuid4().hex[:12],
        action=action,
        run_id=run_id,
        session=session,
        unix_s=time.time(),
        hold_s=hold_s,
        by=by,
    )


class TakenRequest(Record):
    """A request file that the run has read."""

    name: str  # of the file, without suffix
    request: ControlRequest | None  # None: unreadable
    refused: str = ""  # why it is not applied


class ControlFolder:
    """RUN/control. People write requests, the run takes them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CONTROL
        self._known: set[str] = set()  # file names and request ids that were taken: a file may be undeletable

    def file(self, request_id: str) -> Path:
        return self.path / f"{request_id}.json"

    def write(self, request: ControlRequest) -> None:
        """Raises UserError: the folder cannot be written."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.path) from error
        write_atomically(self.file(request.request_id), encode(request))

    def take(self, *, run_id: str, session: int) -> list[TakenRequest]:
        """New requests in the order of their files' times, each once; their files are deleted."""
        found = list[tuple[int, TakenRequest]]()
        for path in self.path.glob("*.json"):
            if path.name in self._known:
                continue
            try:
                state = path.lstat()
                taken = self._read(path, state, run_id=run_id, session=session)
            except OSError:
                continue  # it was withdrawn
            self._known.add(path.name)
            try:
                path.unlink()
            except OSError:
                pass
            else:
                self._known.discard(path.name)
            found.append((state.st_mtime_ns, taken))
        found.sort(key=lambda pair: (pair[0], pair[1].name))
        return [taken for _, taken in found]

    def _read(self, path: Path, state: os.stat_result, *, run_id: str, session: int) -> TakenRequest:
        unreadable = TakenRequest(name=path.stem, request=None, refused="it is not a request of this version")
        if not stat.S_ISREG(state.st_mode) or state.st_size > MOST_BYTES:
            return unreadable
        try:
            request = decode_json(path.read_bytes(), ControlRequest)
        except msgspec.DecodeError:
            return unreadable
        refused = ""
        if request.request_id in self._known:
            refused = "it was applied before"
        elif request.run_id != run_id:
            refused = "it is for another run"
        elif request.session != session:
            refused = f"it is for session {request.session}, and this is session {session}"
        elif self._now_s() - state.st_mtime > request.expires_s:
            refused = f"it is older than {duration(request.expires_s)}"
        self._known.add(request.request_id)
        return TakenRequest(name=path.stem, request=request, refused=refused)

    def _now_s(self) -> float:
        """Now by the clock that stamps the requests: on a shared file system that of its server."""
        try:
            os.utime(self.path)
        except OSError:
            return time.time()
        return self.path.stat().st_mtime


class LogRequest(Protocol):
    def __call__(self, *, action: str, by: str, request: str, outcome: str, **more: object) -> None: ...


class RunControl:
    """The requests to one session of a run, and whether it is paused. One thread uses it: that of the loop.

    Args:
        log: writes the event of a request.
    """

    def __init__(self, folder: ControlFolder, *, run_id: str, session: int, log: LogRequest) -> None:
        self._folder, self._run_id, self._session, self._log = folder, run_id, session, log
        self._stop: Callable[[str], object] | None = None
        self._between_steps = False
        self.waiting: list[ControlRequest] = []  # for the end of the step: at most one of each action
        self.paused: ControlRequest | None = None  # the pause in force

    def attach(self, stop: Callable[[str], object], *, between_steps: bool = True) -> None:
        """Take requests from now on.

        Args:
            stop: ends the run after a checkpoint; gets the reason.
            between_steps: the run calls `take_waiting` between steps. Otherwise it only stops.
        """
        self._stop, self._between_steps = stop, between_steps

    def poll(self) -> None:
        """Take new requests, and apply those that do not wait for the end of the step."""
        if self._stop is None:
            return
        for taken in self._folder.take(run_id=self._run_id, session=self._session):
            request = taken.request
            if request is None:
                self._log(action="", by="", request=taken.name[:MOST_NAME], outcome="ignored", reason=taken.refused)
            elif taken.refused:
                self._ignore(request, taken.refused)
            else:
                self._apply(request, self._stop)

    def _apply(self, request: ControlRequest, stop: Callable[[str], object]) -> None:
        waits = {other.action for other in self.waiting}
        if request.action == "stop":
            self._log_applied(request)
            stop(f"{request.by[:MOST_NAME] or 'a request'} asked for it")
        elif not self._between_steps:
            self._ignore(request, "training on several ranks can only be stopped")
        elif request.action == "resume":
            if self.paused is None and "pause" not in waits:
                self._ignore(request, "the run is not paused")
                return
            self.paused = None
            self._withdraw("pause", "it was withdrawn before the end of the step")
            self._log_applied(request)
        elif self.paused is not None:  # the step is checkpointed; a new pause has another hold time
            self.paused = request if request.action == "pause" else self.paused
            self._log_applied(request)
        else:
            self._withdraw(request.action, "a newer request replaced it")
            self.waiting.append(request)

    def take_waiting(self) -> bool:
        """After a checkpoint at the end of a step: apply what waited for it. Returns whether to pause."""
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            self.paused = request if request.action == "pause" else self.paused
            self._log_applied(request)
        return self.paused is not None

    def hold_is_over(self, paused_s: float) -> bool:
        """Whether rented machines are to be returned, so long after the pause began."""
        return self.paused is not None and paused_s >= self.paused.hold_s

    @property
    def pause_text(self) -> str:
        return f"rented machines are kept for {duration(self.paused.hold_s)}" if self.paused is not None else ""

    def close(self) -> None:
        """The run ends: take no more requests."""
        self.poll()
        self._stop = self.paused = None
        while self.waiting:
            self._ignore(self.waiting.pop(0), "the run ended before")

    def _withdraw(self, action: Action, reason: str) -> None:
        for request in [other for other in self.waiting if other.action == action]:
            self.waiting.remove(request)
            self._ignore(request, reason)

    def _ignore(self, request: ControlRequest, reason: str) -> None:
        self._log_request(request, outcome="ignored", reason=reason)

    def _log_applied(self, request: ControlRequest) -> None:
        hold = {"hold_s": request.hold_s} if request.action == "pause" else {}
        self._log_request(request, outcome="applied", **hold)

    def _log_request(self, request: ControlRequest, *, outcome: str, **more: object) -> None:
        by, name = request.by[:MOST_NAME], request.request_id[:MOST_NAME]
        self._log(action=request.action, by=by, request=name, outcome=outcome, **more)
