"""Requests to a run: files in RUN/control, each applied once by the session that it names."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tidemill.core.records import Record, decode_json
from tidemill.telemetry.jsonl import disk_error, encode, write_atomically

CONTROL = "control"
EXPIRES_S = 3600.0
HOLD_S = 600.0
"""Seconds for which a paused run keeps its rented machines, unless the request says otherwise."""

Action: TypeAlias = Literal["pause", "resume", "checkpoint", "stop"]


class ControlRequest(Record):
    """A request of a person to a run."""

    request_id: str
    action: Action
    run_id: str
    session: int  # of the run; another one ignores the request
    unix_s: float  # when it was made, by the clock of whoever made it
    expires_s: float = EXPIRES_S  # after that time it is ignored
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


class ControlFolder:
    """RUN/control. People write requests, the run takes them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CONTROL

    def write(self, request: ControlRequest) -> None:
        """Raises UserError: the folder cannot be written."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.path) from error
        write_atomically(self.path / f"{request.request_id}.json", encode(request))

    def take(self, *, run_id: str, session: int, unix_s: float) -> list[ControlRequest]:
        """The requests to this session in the order they were made, each once: their files are deleted. Those that are
        unreadable, expired, or of another run or session are deleted too."""
        found = list[ControlRequest]()
        for path in sorted(self.path.glob("*.json")):
            try:
                request = decode_json(path.read_bytes(), ControlRequest)
            except (OSError, msgspec.DecodeError):
                request = None
            try:
                path.unlink()
            except OSError:
                continue  # taken by nobody else: it would be applied again and again
            if (
                request is not None
                and (request.run_id, request.session) == (run_id, session)
                and abs(unix_s - request.unix_s) <= request.expires_s
            ):
                found.append(request)
        return sorted(found, key=lambda request: (request.unix_s, request.request_id))
