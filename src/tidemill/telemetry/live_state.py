"""live.json of a run: what it is doing at this moment, replaced atomically at most once a second."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tidemill.core.records import FleetRow, Record, decode_json

LIVE = "live.json"
MIN_INTERVAL_S = 1.0
MOST_SAMPLES = 256

Activity: TypeAlias = Literal["working", "paused", "ended"]


class Phase(Record):
    """Progress of a phase of the current step."""

    name: str
    done: int
    total: int


class SampleUnderWay(Record):
    """A sample that is being generated."""

    step: int  # that will train on it, as far as is known
    prompt_id: str
    index: int  # in its group
    worker: str  # empty: it waits for one
    lease: str
    tokens: int  # generated so far
    versions: tuple[int, ...] = ()  # of those tokens


class UnderWay(Record):
    """What the rollout side of a run is doing."""

    fleet: tuple[FleetRow, ...] = ()
    samples: tuple[SampleUnderWay, ...] = ()  # at most MOST_SAMPLES
    samples_total: int = 0


class LiveState(UnderWay, kw_only=True):
    """What a run is doing. Times are of the run's own clock: compare them with each other only."""

    run_id: str
    session: int
    beat: int  # rises with each write
    unix_s: float
    elapsed_s: float  # since the session started
    step: int  # completed
    total_steps: int
    activity: Activity = "working"
    activity_text: str = ""  # such as when a pause ends
    left_s: float | None = None  # until the last step; None if unknown
    phases: tuple[Phase, ...] = ()
    requests: tuple[str, ...] = ()  # ids of control requests that wait for the end of the step


def read_live(directory: Path) -> LiveState | None:
    """None if the file is missing or of another format."""
    try:
        return decode_json((directory / LIVE).read_bytes(), LiveState)
    except (OSError, msgspec.DecodeError):
        return None
