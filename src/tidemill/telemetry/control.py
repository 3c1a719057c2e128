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
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

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

Action: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]


class ControlRequest(Record):
    """A request of a person to a run."""

    request_id: str
    action: Action
    run_id: str
    session: int  # of the run; another one ignores the request
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
        hold_s=hold_s,
        by=by,
    )


class ControlFolder:
    """RUN/control. People write requests, the run takes them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CONTROL
        self._taken: set[str] = set()  # names of files, which may be undeletable, and ids of requests

    def file(self, request_id: str) -> Path:
        return self.path / f"{request_id}.json"

    def write(self, request: ControlRequest) -> None:
        """Raises UserError: the folder cannot be written."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.path) from error
        write_atomically(self.file(request.request_id), encode(request))

    def take(self, *, run_id: str, session: int) -> list[tuple[str, ControlRequest | None, str]]:
        """(name, request, why it is refused) of each new file in the order of their times. Files are deleted, and taken
        once even if that fails. An unreadable one has no request."""
        files = list[tuple[float, Path]]()
        for path in self.path.glob("*.json"):
            with suppress(FileNotFoundError):  # withdrawn since
                state = path.lstat()
                if stat.S_ISREG(state.st_mode) and path.name not in self._taken:  # reading a pipe would block the run
                    files.append((state.st_mtime, path))
        taken = list[tuple[str, ControlRequest | None, str]]()
        for written_s, path in sorted(files):
            request, refused = None, "it is not a request of this version"
            with suppress(OSError, msgspec.DecodeError):
                request = decode_json(path.read_bytes(), ControlRequest)
                refused = self._refusal(request, written_s, run_id=run_id, session=session)
                self._taken.add(request.request_id)
            with suppress(OSError):
                path.unlink()
            self._taken.add(path.name)
            taken.append((path.stem, request, refused))
        return taken

    def _refusal(self, request: ControlRequest, written_s: float, *, run_id: str, session: int) -> str:
        """Empty if there is no reason to refuse it."""
        if request.request_id in self._taken:
            return "it was applied before"
        if request.run_id != run_id:
            return "it is for another run"
        if request.session != session:
            return f"it is for session {request.session}, and this is session {session}"
        with suppress(OSError):  # now by the clock that stamps the requests: that of a shared disk's server
            os.utime(self.path)
        if self.path.stat().st_mtime - written_s > request.expires_s:
            return f"it is older than {duration(request.expires_s)}"
        return ""


class RunControl:
    """The requests to one session of a run, and whether it is paused. One thread uses it: that of the loop.

    Args:
        log: writes the event of a request.
    """

    def __init__(self, folder: ControlFolder, *, run_id: str, session: int, log: Callable[..., object]) -> None:
        self._folder, self._run_id, self._session, self._log = folder, run_id, session, log
        self._stop: Callable[[str], object] | None = None
        self._between_steps = False
        self.waiting: dict[Action, ControlRequest] = {}  # for the end of the step
        self.paused: ControlRequest | None = None  # the pause in force

    def attach(self, stop: Callable[[str], object], *, between_steps: bool = True) -> None:
        """Take requests from now on.

        Args:
            stop: ends the run after a checkpoint; gets the reason.
            between_steps: the run calls `take_waiting` between steps. Otherwise it only stops.
        """
        self._stop, self._between_steps = stop, between_steps

    def poll(self) -> bool:
        """Take new requests, and apply those that do not wait for the end of the step. Returns whether any waits."""
        if self._stop is None:
            return False
        for name, request, refused in self._folder.take(run_id=self._run_id, session=self._session):
            if request is None:
                self._log(action="", by="", request=name, outcome="ignored", reason=refused)
            elif refused:
                self._note(request, refused)
            else:
                self._apply(request, self._stop)
        return bool(self.waiting)

    def _apply(self, request: ControlRequest, stop: Callable[[str], object]) -> None:
        if request.action == "stop":
            self._note(request)
            stop(f"a request by {request.by or 'somebody'}")
        elif not self._between_steps:
            self._note(request, "training on several ranks can only be stopped")
        elif request.action == "resume":
            if self.paused is None and not self._withdraw("pause", "it was withdrawn before the end of the step"):
                self._note(request, "the run is not paused")
                return
            self.paused = None
            self._note(request)
        else:
            self._withdraw(request.action, "a newer request replaced it")
            self.waiting[request.action] = request
            if self.paused is not None:  # the step is checkpointed; a new pause has another hold time
                self.take_waiting()

    def take_waiting(self) -> bool:
        """After a checkpoint at the end of a step: apply what waited for it. Returns whether to pause."""
        waiting, self.waiting = self.waiting, {}
        for request in waiting.values():
            self.paused = request if request.action == "pause" else self.paused
            self._note(request)
        return self.paused is not None

    def close(self) -> None:
        """The run ends: take no more requests."""
        self.poll()
        self._stop = self.paused = None
        for action in tuple(self.waiting):
            self._withdraw(action, "the run ended before")

    def _withdraw(self, action: Action, reason: str) -> bool:
        """Ignore a waiting request; returns whether there was one."""
        request = self.waiting.pop(action, None)
        if request is not None:
            self._note(request, reason)
        return request is not None

    def _note(self, request: ControlRequest, ignored: str = "") -> None:
        """Log that it was applied, or why it was ignored."""
        outcome = {"outcome": "ignored", "reason": ignored} if ignored else {"outcome": "applied"}
        hold = {"hold_s": request.hold_s} if request.action == "pause" else {}
        self._log(action=request.action, by=request.by, request=request.request_id, **outcome, **hold)
