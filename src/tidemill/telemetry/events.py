"""The event log: event names, their meaning and one-line text, the lines of events.jsonl, and timed spans.

A *session* is one process that works on a run; each resume starts a new one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tidemill.core.formatting import counted, decimal, duration, left_out_text, percent
from tidemill.core.protocols import Clock, Telemetry
from tidemill.core.records import Record
from tidemill.telemetry.jsonl import finite_number, read_lines

EVENTS: dict[str, str] = {}
"""Meaning of each event. Spans also have `duration_s`, and `error` if an exception ended them."""


def _define(name: str, meaning: str) -> str:
    EVENTS[name] = meaning
    return name


SESSION_START = _define(
    "session_start",
    "a process opened the run; `resumed`, `earlier_wall_s` (of all earlier sessions), `pid`, `host`, `inode` of this "
    "file, and on Linux `pid_start`, the process's start in clock ticks since the machine's",
)
RESUME = _define(
    "resume", "training resumes after `step`; later metrics and samples were deleted and will be written again"
)
REPLAY = _define(
    "replay", "steps `first_step` to `last_step` are trained again from samples in the ledger, without generating"
)
ALREADY_FINISHED = _define("already_finished", "all steps were already done; nothing was trained")
PLAN = _define("plan", "the number of optimizer steps, where it follows from the data: `steps`")
DATA = _define(
    "data",
    "the rows of the run: `training`, `held_out`, those `left_out` by reason; of the `rows` read, those `missing` a "
    "value, by column; `warnings` about columns that rewards need; `few`: evaluated sets that are too small to tell",
)
MACHINE = _define("machine", "the devices the run computes on: `device`, `threads` and more")
WAITING = _define("waiting", "a long wait is still in progress: `awaited`, `waited_s`, `deadline_s`")
WAIT_ABANDONED = _define(
    "wait_abandoned", "the run is stopping and stopped waiting for `awaited` after `waited_s`; `lost`: the consequence"
)
ROLLOUT = _define("rollout", "span: the samples of `step` were generated")
TRAINING = _define("training", "span: gradients and optimizer steps of `step`")
EVALUATION = _define(
    "evaluation",
    "span: held-out prompts, or those of `set`, after `step`; `reward_mean`, `reward_stderr`, `reward_mean_interval` "
    "(95 %), `greedy_accuracy`, `n`, and with drawn samples `pass_at_K` and `drawn_reward_mean`",
)
ROBOT_EVALUATION = _define(
    "robot_evaluation",
    "span: episodes of a control policy without exploration and randomisation, `when`: before or after training; "
    "`episodes`, `return_mean`, `falls`, `figures`, `terms`; `success` with `success_interval` (95 %) if it is known, "
    "`invalid` worlds if any",
)
REWARD_FAILED = _define(
    "reward_failed",
    "the first failure of its kind in a reward function, on a sample of `step`: `reason`, `prompt`, `response` "
    "(both shortened)",
)
ENVIRONMENT_WARNING = _define(
    "environment_warning",
    "the self-test found a fault of the environment, or an episode the first of its kind: `reason`",
)
CHECKPOINT = _define("checkpoint", "span: the trainer's state after `step` became durable")
CONTROL = _define(
    "control",
    "a request was applied or ignored (`outcome`, with the `reason`): `action` (pause, resume, checkpoint or stop), "
    "`by`, `request` (its id), `step`; `hold_s` of a pause",
)
PAUSED = _define(
    "paused", "span: the run was paused after `step`; `machines_returned`: rented machines whose leases it ended"
)
PUBLISH = _define(
    "publish",
    "span: a version became available to workers; `version`, and where files were written `nbytes` and `delta_nbytes`",
)
LEASE = _define(
    "lease", "a machine was granted; `lease`, `worker`, `kind` (reserved or preemptible), `price_usd_per_hour`"
)
JOIN = _define(
    "join",
    "span: a worker started on its machine, pulled weights and passed the probe; `lease`, `worker`; `error` if "
    "it failed",
)
PULL = _define(
    "pull",
    "span: a worker fetched a version and swapped to it; `lease`, `worker`, `version`, `nbytes`, `full` (a whole "
    "snapshot, not a delta), `swap_s` (generation paused), `retries` (damaged transfers)",
)
DECODE = _define(
    "decode",
    "span: a worker generated samples of a batch; `lease`, `worker`, `kind`, `step`, `purpose`, `tokens`, "
    "`samples`, and `work`, the engine's work grouped by concurrent samples in powers of two (`passes`; `rows`: "
    "samples extended by one token, with their `context_tokens`; `drawn` and `prefilled` tokens) with its time "
    "(`busy_s`, CPU time `cpu_s`)",
)
NOTICE = _define("notice", "a machine will be taken in `grace_s`; `lease`, `worker`, `cause`")
DRAIN = _define(
    "drain",
    "a worker under notice is asked to return the `samples` it is generating (it may still finish some); "
    "`lease`, `worker`",
)
EVICTION = _define(
    "eviction",
    "a machine was taken; `lease`, `worker`, `cause`, `noticed`, the `samples` it was generating, their "
    "`tokens_kept`, and `tokens_lost`, estimated from its speed and the time since its last report; robots: `chunks`",
)
CRASH = _define("crash", "a serving worker raised an error and its lease ended; fields as for an eviction")
MIGRATION = _define(
    "migration",
    "`samples` of `worker` (under `lease`, which may have ended) continue on `to_worker` after their `tokens_kept`",
)
LEASE_END = _define(
    "lease_end", "a machine was released; `lease`, `worker`, `kind`, `cause`, `evicted`, `held_s`, `cost_usd`, `tokens`"
)
REBALANCE = _define("rebalance", "`from_worker` is asked to return `samples` for `to_worker`, to balance the load")
WORKER_RELEASED = _define(
    "worker_released",
    "the last `samples` of a batch were moved to a few workers and this one was released; `lease`, `worker`",
)
STALLED = _define(
    "stalled",
    "a sample of `tokens` tokens was moved three times without a new one, and the longest attempt took `stalled_s`; "
    "from now on the reserved engine generates it; `lease`, `worker`",
)
QUARANTINE = _define(
    "quarantine",
    "a worker's logprobs differ from the trainer's by `difference`, above `limit`; the worker is released; "
    "`lease`, `worker`",
)
JOIN_FAILED = _define("join_failed", "a worker failed to start on its machine; `lease`, `worker`, `cause`")
GOLD = _define(
    "gold",
    "gold scores of samples of `step`: `proxy_mean` of the batch, `gold_mean` and `pair_proxy_mean` of the `pairs`, "
    "`missing`, `why_missing`, `witnesses`",
)
GUARD = _define(
    "guard",
    "the reward rises and quality does not: `number`, `step`, `onset`, `test`, `action`, `reason`, `target`, `proxy` "
    "and `gold` (each before the onset and at the end)",
)
GUARD_PROBE = _define("guard_probe", "the reward likes a text that it should not: `probe`, `score`, `typical`, `text`")
WORKER_HEALTH = _define(
    "worker_health",
    "a worker is judged `state` (healthy, suspect, draining, quarantined, probation) for `cause`; `lease`, `worker`, "
    "`machine`, `value`, `limit`",
)
TAINTED = _define(
    "tainted",
    "tokens of a worker that computed wrongly: `lease`, `worker`, `cause`; `restarted` samples with `tokens` are "
    "generated again; `trained`: number of samples already trained on, by step, and their names in `samples`",
)
READER_RESTART = _define(
    "reader_restart", "the process of a reward model or of the reference was lost and is restarted; `who`, `cause`"
)
SINK_FAILED = _define("sink_failed", "an optional sink raised and was dropped; `sink`, `error`")
SESSION_END = _define(
    "session_end",
    "the process closed the run; `outcome` is finished, interrupted or failed; `error` (type and message) if it failed",
)

NOT_PART_OF_A_STEP = (EVALUATION, ROBOT_EVALUATION, CHECKPOINT, PAUSED)
"""Spans that are excluded from a step's wall time."""
FLEET_EVENTS = frozenset({
    LEASE, JOIN, PULL, DECODE, NOTICE, DRAIN, EVICTION, CRASH, MIGRATION, LEASE_END, REBALANCE, WORKER_RELEASED,
    STALLED, QUARANTINE, JOIN_FAILED, WORKER_HEALTH,
})  # fmt: skip
"""Events of single workers, which may be many."""
GUARD_EVENTS = frozenset({GOLD, GUARD, GUARD_PROBE})
NOUNS = {
    JOIN: "join", NOTICE: "notice", DRAIN: "drain", EVICTION: "eviction", CRASH: "crash", PULL: "damaged pull",
    STALLED: "stalled sample", JOIN_FAILED: "failed join", WORKER_HEALTH: "health change",
}  # fmt: skip
"""What the terminal counts when it summarises many fleet events."""
LISTED_EVENTS = frozenset({
    SESSION_START, SESSION_END, RESUME, REPLAY, EVALUATION, ROBOT_EVALUATION, CHECKPOINT, SINK_FAILED, WAITING,
    WAIT_ABANDONED, EVICTION, CRASH, JOIN_FAILED, QUARANTINE, GUARD, GUARD_PROBE, WORKER_HEALTH, CONTROL, PAUSED,
})  # fmt: skip
"""Events in the table of the report."""

COLUMNS_NAMED = 5
"""Columns without a value in some rows that are listed."""

HEADER = ("time", "session", "elapsed_s", "event")
INTERRUPTIONS = ("CancelledError", "KeyboardInterrupt")
"""`error` of a span that the user interrupted."""


def event_text(name: str, fields: dict[str, Any]) -> str:
    """One line about an event for the terminal and the report; empty if the event is not worth a line."""
    kinds = {
        _fleet_text: FLEET_EVENTS,
        _guard_text: GUARD_EVENTS,
        _control_text: (CONTROL, PAUSED),
        _sink_text: (SINK_FAILED,),
    }
    of_kind = next((text_of for text_of, names in kinds.items() if name in names), None)
    if of_kind:
        return of_kind(name, fields)
    step, error = fields.get("step"), fields.get("error")
    took = f", {duration(fields['duration_s'])}" if "duration_s" in fields else ""
    if error and name != SESSION_END:  # the command prints what ended the session
        ended = "was interrupted" if error in INTERRUPTIONS else f"failed: {error}"
        return f"{name} of step {step} {ended}" if step is not None else f"{name} {ended}"
    if fields.keys() & {"reward_mean", "return_mean"}:
        return _evaluation_text(fields, took)
    if name == CHECKPOINT and not fields.get("interrupted"):
        return f"checkpoint of step {step} written{took}"
    if name == WAITING:
        return f"still waiting for {fields['awaited']} after {duration(fields['waited_s'])}"
    if name == WAIT_ABANDONED:
        return f"stopped waiting for {fields['awaited']} after {duration(fields['waited_s'])}: {fields['lost']}"
    if name == REPLAY:
        first, last = fields["first_step"], fields["last_step"]
        return f"replaying {f'step {first}' if first == last else f'steps {first}-{last}'} from the journal"
    if name == ALREADY_FINISHED:
        return f"all {fields['steps']} steps are already done"
    if name == RESUME:
        return f"resumed after step {step}" if step else "resumed before the first step"
    if name == ENVIRONMENT_WARNING:
        return f"warning: {fields['reason']}"
    if name == DATA:
        rows = [f"data: {text}"] if (text := data_text(fields)) else []
        return "\n".join([*rows, *(f"warning: {text}" for key in ("warnings", "few") for text in fields.get(key, ()))])
    return ""


def data_text(fields: Mapping[str, Any]) -> str:
    """`12 training rows, 3 held out; left out: 3 repeated; without a value: rubric in 6 of 18 rows`."""
    parts = list[str]()
    if "training" in fields:  # absent if only evaluation sets have rows
        parts.append(f"{counted(fields['training'], 'training row')}, {fields.get('held_out', 0):,} held out")
    if left_out := left_out_text(fields.get("left_out", {})):
        parts.append(f"left out: {left_out}")
    missing = dict(fields.get("missing", {}))
    if missing:
        named = [f"{column} in {count:,}" for column, count in list(missing.items())[:COLUMNS_NAMED]]
        more = [f"{len(missing) - COLUMNS_NAMED} more"] if len(missing) > COLUMNS_NAMED else []
        parts.append(f"without a value: {', '.join(named + more)} of {counted(fields.get('rows', 0), 'row')}")
    return "; ".join(parts)


def _guard_text(name: str, fields: dict[str, Any]) -> str:
    if name == GUARD:
        return f"guard: {decision_text(fields)}. {fields.get('reason', '')}".rstrip()
    if name == GUARD_PROBE:
        return f"guard: {probe_text(fields)}"
    if fields.get("missing") and not fields.get("pairs"):
        return f"guard: blind in step {fields.get('step')}, no gold score arrived ({fields.get('why_missing')})"
    return ""


def decision_text(fields: Mapping[str, Any]) -> str:
    """`the reward rises and quality does not since about step 12; the run returns to step 10`."""
    onset, target, action = (fields.get(key) for key in ("onset", "target", "action"))
    follows = {
        "warn": "the run continues",
        "pause": "the run pauses",
        "rollback": f"the run returns to {f'step {target}' if target else 'the initial model'}",
        "stop": "the run stops",
    }
    return f"the reward rises and quality does not since about step {onset}; {follows.get(str(action), action)}"


def _sink_text(name: str, fields: dict[str, Any]) -> str:
    return f"warning: sink {fields['sink']} failed ({fields['error']}); the run continues without it"


def _control_text(name: str, fields: Mapping[str, Any]) -> str:
    """`pause after step 12 (command line)`."""
    action, by, step = fields.get("action"), fields.get("by") or "somebody", fields.get("step")
    if name == PAUSED:
        returned = fields.get("machines_returned") or 0
        machines = f"; {counted(returned, 'rented machine')} returned" if returned else ""
        return f"paused for {duration(fields.get('duration_s', 0.0))} after step {step}{machines}"
    if fields.get("outcome") != "applied":
        what = f"request to {action} by {by}" if action else f"file in control/ ({fields.get('request')})"
        return f"ignored a {what}: {fields.get('reason')}"
    return f"{action} after step {step} ({by})"


def probe_text(fields: Mapping[str, Any]) -> str:
    """`the reward likes a text that it should not (empty): score 1.000, typical 0.400`."""
    score, typical = (decimal(finite_number(fields.get(key))) for key in ("score", "typical"))
    return f"the reward likes a text that it should not ({fields.get('probe')}): score {score}, typical {typical}"


def health_text(fields: Mapping[str, Any]) -> str:
    """`wrong tokens (0.310, limit 0.050)`: why a worker is judged so."""
    numbers = {label: finite_number(fields.get(key)) for key, label in (("value", ""), ("limit", "limit "))}
    figures = ", ".join(f"{label}{decimal(number)}" for label, number in numbers.items() if number is not None)
    return f"{fields.get('cause') or 'no cause'}{f' ({figures})' if figures else ''}"


def rewound_to(event: Mapping[str, Any]) -> int | None:
    """The step after which a resume or a rollback replaces the history; None for other events."""
    rolled_back = event["event"] == GUARD and event.get("action") == "rollback"
    step = event.get("step") if event["event"] == RESUME else event.get("target", 0) if rolled_back else None
    return step if isinstance(step, int) else None


def _evaluation_text(fields: dict[str, Any], took: str) -> str:
    if "return_mean" in fields:  # of a robot
        shares = (f"{name} {percent(fields[name])}, " for name in ("success", "falls") if name in fields)
        return f"{fields['when']} training: {''.join(shares)}mean return {decimal(fields['return_mean'])}{took}"
    n = f" (n {fields['n']}{took})" if "n" in fields else ""
    figures = {"accuracy": "greedy_accuracy", "drawn samples": "drawn_reward_mean"}
    figures |= {f"pass@{key[8:]}": key for key in fields if key.startswith("pass_at_")}
    more = "".join(f", {label} {decimal(fields[key])}" for label, key in figures.items() if key in fields)
    reward = decimal(fields["reward_mean"])
    return f"{fields.get('set', 'held-out')} reward after step {fields.get('step')}: {reward}{more}{n}"


def _fleet_text(name: str, fields: dict[str, Any]) -> str:
    worker, cause = fields.get("worker"), f" ({fields['cause']})" if fields.get("cause") else ""
    if name == JOIN and "error" not in fields:
        return f"{worker} joined after {duration(fields.get('duration_s', 0.0))}"
    if name == NOTICE:
        return f"{worker} will be evicted in {duration(fields.get('grace_s', 0.0))}{cause}"
    if name == DRAIN:
        return f"draining {worker}: {counted(fields.get('samples', 0), 'sample')} in flight"
    if name == EVICTION:
        if fields.get("noticed"):  # the notice gave the cause
            return f"evicted {worker} after notice: {moved_text(fields)}"
        return f"evicted {worker} without notice: {moved_text(fields)}{cause}"
    if name == CRASH:
        return f"{worker} crashed: {moved_text(fields)}{cause}"
    if name == JOIN_FAILED:
        return f"{worker} failed to start{cause}"
    if name == PULL and (retries := fields.get("retries")):
        return f"{worker} pulled version {fields.get('version')} after {counted(retries, 'damaged transfer')}"
    if name == STALLED:
        tokens = counted(fields.get("tokens", 0), "token")
        return f"a sample of {tokens} stalls: machines are evicted too early; the reserved engine generates it"
    if name == QUARANTINE:
        difference, limit = decimal(fields.get("difference")), decimal(fields.get("limit"))
        return f"quarantined {worker}: its logprobs differ from the trainer's by {difference} (limit {limit})"
    if name == WORKER_HEALTH:
        machine = f" on {fields['machine']}" if fields.get("machine") else ""
        why = f": {text}" if (text := health_text(fields)) else ""
        return (
            f"{worker}{machine} is {'on probation' if fields.get('state') == 'probation' else fields.get('state')}{why}"
        )
    return ""


def moved_text(fields: dict[str, Any]) -> str:
    """`4 samples move to other workers, 52 tokens kept, 3 lost`; `2 chunks for other workers`."""
    if (chunks := fields.get("chunks")) is not None:
        return f"{counted(chunks, 'chunk')} for other workers"
    samples, kept, lost = (fields.get(key, 0) for key in ("samples", "tokens_kept", "tokens_lost"))
    if not samples:
        return "no samples in flight"
    verb = "moves" if samples == 1 else "move"
    text = f"{counted(samples, 'sample')} {verb} to other workers, {counted(kept, 'token')} kept"
    return f"{text}, {lost:,} lost" if lost else text


def timestamp(unix_s: float) -> str:
    """UTC in ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def event_line(name: str, fields: dict[str, Any], *, unix_s: float, session: int, elapsed_s: float) -> dict[str, Any]:
    """One line of events.jsonl. A field with the name of a header key gets a trailing underscore."""
    header = dict(zip(HEADER, (timestamp(unix_s), session, round(elapsed_s, 3), name), strict=True))
    return header | {f"{key}_" if key in header else key: value for key, value in fields.items()}


def events_in(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of events.jsonl that has an event name."""
    return (line for _, line in read_lines(path) if isinstance(line.get("event"), str))


def read_events(path: Path) -> list[dict[str, Any]]:
    """All of `events_in`."""
    return list(events_in(path))


class PastSessions(Record):
    """The earlier sessions of a run, from its logs."""

    count: int = 0
    wall_s: float = 0.0  # sum over the sessions
    last: dict[str, Any] = {}  # the newest session_start line


def past_sessions(events: Path, metrics: Path) -> PastSessions:
    """Read both logs: either may have the last line before a kill. Call it before metrics are rewound."""
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
    """Clock for code without an event loop; on Linux it has the same origin as the loop's clock."""

    def now(self) -> float:
        return time.monotonic()


@contextmanager
def span(telemetry: Telemetry, clock: Clock, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Write one event when the block ends, with `duration_s` and the fields the block added to the yielded dict.

    Example:
        with span(telemetry, clock, "evaluation", step=5) as fields:
            fields["greedy_accuracy"] = await evaluate()

    If the block raises, the event has the exception's class name as `error`, and the exception propagates.
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
