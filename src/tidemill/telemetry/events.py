"""The event log: names and stamps of its lines, and spans with a duration.

A *session* is one process working on a run; a run that was resumed has several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import Record
from tidemill.telemetry.jsonl import finite_number, read_lines

SESSION_START = "session_start"
SESSION_END = "session_end"
RESUME = "resume"
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
SINK_FAILED = "sink_failed"
REPLAY = "replay"
ALREADY_FINISHED = "already_finished"
WAITING = "waiting"
GIVEN_UP = "given_up"
LEASE = "lease"
JOIN = "join"
PULL = "pull"
DECODE = "decode"
NOTICE = "notice"
HAND_BACK = "hand_back"
MIGRATION = "migration"
EVICTION = "eviction"
CRASH = "crash"
LEASE_END = "lease_end"
REBALANCE = "rebalance"
VACATED = "vacated"
QUARANTINE = "quarantine"
JOIN_FAILED = "join_failed"
READER_RESTART = "reader_restart"
PUBLISH = "publish"
REWARD_FAILED = "reward_failed"
PLAN = "plan"

NOT_PART_OF_A_STEP = (EVALUATION, CHECKPOINT)
"""What a step's time leaves out."""

EVENTS: dict[str, str] = {
    SESSION_START: "a process opened the run; `resumed`, `earlier_wall_s` (of all sessions before), `pid`, `host`",
    RESUME: "training goes on after `step`; later metrics and samples were dropped and will be written again",
    REPLAY: "the ledger has the samples of `first_step` to `last_step`; they are learned from again, not generated",
    ALREADY_FINISHED: "the run had done all its steps; nothing was trained",
    PLAN: "the data decide how many optimizer steps the run has: `steps`",
    WAITING: "a wait goes on: `awaited`, `waited_s`, `deadline_s`",
    GIVEN_UP: "the run is to end, and did not wait longer than `waited_s` for `awaited`; `lost` says what that costs",
    "rollout": "span: the samples of `step` were generated",
    "training": "span: gradients and optimizer steps of `step`",
    EVALUATION: "span: held-out prompts after `step`; `reward_mean`, `reward_stderr`, `greedy_accuracy`, `n`",
    REWARD_FAILED: "a reward function failed in this way for the first time, at a sample of `step`: `reason`, "
    "`prompt`, `response` (both shortened)",
    CHECKPOINT: "span: the trainer's state after `step` became durable",
    PUBLISH: "span: a version became available to workers; `version`, `nbytes`, `delta_nbytes` where it was written",
    LEASE: "a machine is there; `lease`, `worker`, `kind` (reserved or preemptible), `price_usd_per_hour`",
    JOIN: "span: a worker came up on its machine: started, pulled weights and was right about the probe; `lease`, "
    "`worker`; one with `error` did not",
    PULL: "span: a worker fetched a version and swapped to it; `lease`, `worker`, `version`, `nbytes`, `full` (a whole "
    "snapshot rather than a delta), `swap_s` (generation stood still), `retries` (transfers found damaged)",
    DECODE: "span: a worker had samples of this batch; `lease`, `worker`, `kind`, `step`, `purpose`, `tokens`, "
    "`samples`, and `work`: by octaves of samples drawn from at once, what its engine computed (`passes`; `rows`, "
    "samples taken one token further, with their `context_tokens`; `drawn` and `prefilled` tokens) and how long that "
    "took it (`busy_s`, of which on a processor `cpu_s`)",
    NOTICE: "a machine will be taken in `grace_s`; `lease`, `worker`, `cause`",
    HAND_BACK: "a warned worker is asked for the `samples` it is generating (it may finish some instead); `lease`, "
    "`worker`",
    EVICTION: "a machine was taken; `lease`, `worker`, `cause`, `noticed`, the `samples` it was generating, their "
    "`tokens_kept`, and `tokens_lost`, estimated from its speed and how long it had not been heard of",
    CRASH: "a worker that served raised an error, and its lease ended; fields as of an eviction",
    MIGRATION: "`samples` that `worker` had (under `lease`, which may be over) go on at `to_worker`, from their "
    "`tokens_kept`",
    LEASE_END: "a machine is no longer held; `lease`, `worker`, `kind`, `cause`, `evicted`, `held_s`, `cost_usd`, "
    "`tokens`",
    REBALANCE: "`from_worker` is asked for `samples` that `to_worker` may go on with, to even out the load",
    VACATED: "the last `samples` of a batch are gathered on few workers, and this one is left; `lease`, `worker`",
    QUARANTINE: "a worker's logprobs differ from the trainer's by `difference`, more than `limit`; it is given back; "
    "`lease`, `worker`",
    JOIN_FAILED: "a worker did not come up on its machine; `lease`, `worker`, `cause`",
    READER_RESTART: "a reward model or the reference lost its process and is started again; `who`, `cause`",
    SINK_FAILED: "an optional sink raised and was dropped; `sink`, `error`",
    SESSION_END: "the process closed the run; `outcome` is finished, interrupted or failed",
}
"""Event names and what they mean; spans also carry `duration_s` (and `error` when they were left by an exception)."""

HEADER = ("time", "session", "elapsed_s", "event")


def timestamp(unix_s: float) -> str:
    """UTC, to the millisecond, as ISO 8601."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def event_line(name: str, fields: dict[str, Any], *, unix_s: float, session: int, elapsed_s: float) -> dict[str, Any]:
    """One line of events.jsonl. A field that is called like a header key gets a trailing underscore."""
    header = dict(zip(HEADER, (timestamp(unix_s), session, round(elapsed_s, 3), name), strict=True))
    return header | {f"{key}_" if key in header else key: value for key, value in fields.items()}


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every whole line of events.jsonl that has a name."""
    return [line for _, line in read_lines(path) if isinstance(line.get("event"), str)]


class PastSessions(Record):
    """What the logs of a run say about the processes that worked on it before."""

    count: int = 0
    wall_s: float = 0.0  # of all of them together
    last: dict[str, Any] = {}  # the newest session_start line


def past_sessions(events: Path, metrics: Path) -> PastSessions:
    """Read both logs, because the last line before a kill may stand in either. Call it before metrics are rewound."""
    count, earlier_s, elapsed_s, last = 0, 0.0, 0.0, dict[str, Any]()
    for _, line in read_lines(events):
        if line.get("event") == SESSION_START:
            count, last = int(finite_number(line.get("session")) or 0), line
            earlier_s, elapsed_s = finite_number(line.get("earlier_wall_s")) or 0.0, 0.0
        elapsed_s = max(elapsed_s, finite_number(line.get("elapsed_s")) or 0.0)
    for _, line in read_lines(metrics):
        if line.get("session") == count:
            elapsed_s = max(elapsed_s, finite_number(line.get("elapsed_s")) or 0.0)
    return PastSessions(count=count, wall_s=earlier_s + elapsed_s, last=last)


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
