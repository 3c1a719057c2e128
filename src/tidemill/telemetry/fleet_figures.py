"""What a fleet did and what it cost, from a run's logs. Every session counts: what a resume rewound did happen.

Times are on the run's own axis: seconds of work, the time between sessions left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.telemetry.events import (
    CRASH,
    DECODE,
    EVICTION,
    JOIN,
    LEASE,
    LEASE_END,
    MIGRATION,
    NOTICE,
    QUARANTINE,
    SESSION_END,
    SESSION_START,
)
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.metrics import TOKENS_RECOMPUTED, MetricLine

HOUR_S = 3600.0

MigrationCause: TypeAlias = Literal["taken", "warned", "other"]
"""What had come over the machine that a sample left; the last is to even out the load, or a fault of its worker."""


class Session(Record):
    """One process's work on the run."""

    number: int
    start_s: float
    end_s: float  # its last known moment
    killed: bool  # it left no word about its end: it was killed, or is still running


class HeldLease(Record):
    """A machine, from its grant to its end or to the end of the session that held it."""

    session: int
    lease_id: str
    worker: str
    kind: str
    start_s: float
    end_s: float
    cost_usd: float
    cause: str = ""  # of its end; empty when the session ended first
    evicted: bool = False
    tokens: int | None = None  # None when the session ended first


def amount(event: dict[str, Any], key: str) -> float:
    """A number of a line; 0 where there is none."""
    return finite_number(event.get(key)) or 0.0


def sessions_of(events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine]) -> dict[int, Session]:
    """By number, in order."""
    starts, last_s, ended = dict[int, float](), dict[int, float](), set[int]()
    for event in events:
        number = int(amount(event, "session"))
        last_s[number] = max(last_s.get(number, 0.0), amount(event, "elapsed_s"))
        if event["event"] == SESSION_START:
            starts[number] = amount(event, "earlier_wall_s")
        elif event["event"] == SESSION_END:
            ended.add(number)
    for line in metrics:
        if line.session in last_s:
            last_s[line.session] = max(last_s[line.session], line.elapsed_s)
    found: dict[int, Session] = {}
    numbers, end_s = sorted(last_s), 0.0
    for at, number in enumerate(numbers):
        start_s = starts.get(number, end_s)
        # The next session knew how long the earlier ones lasted; metrics that told it may have been rewound since.
        known = [starts[one] for one in numbers[at + 1 : at + 2] if one in starts]
        end_s = known[0] if known else start_s + last_s[number]
        found[number] = Session(number=number, start_s=start_s, end_s=end_s, killed=number not in ended)
    return found


def moment(event: dict[str, Any], sessions: dict[int, Session]) -> float:
    """When a line was written, on the run's axis."""
    return sessions[int(amount(event, "session"))].start_s + amount(event, "elapsed_s")


def held_leases(events: Iterable[dict[str, Any]], sessions: dict[int, Session]) -> dict[tuple[int, str], HeldLease]:
    """By session and id, in order of their beginning. A lease without an end is charged until its session's.

    The reserved side is there from the beginning of a session, whether or not a line says so.
    """
    granted, ended = dict[tuple[int, str], dict[str, Any]](), dict[tuple[int, str], dict[str, Any]]()
    for event in events:
        key = (int(amount(event, "session")), str(event.get("lease", "")))
        if event["event"] == LEASE_END:
            ended[key] = event
        elif event["event"] == LEASE:
            granted[key] = event
        elif event["event"] == DECODE and event.get("kind") == "reserved":
            granted.setdefault(key, event | {"elapsed_s": 0.0})
    leases = [_held(key, granted.get(key, {}), ended.get(key), sessions) for key in granted | ended]
    return {(one.session, one.lease_id): one for one in sorted(leases, key=lambda one: one.start_s)}


def _held(
    key: tuple[int, str], granted: dict[str, Any], ended: dict[str, Any] | None, sessions: dict[int, Session]
) -> HeldLease:
    end = ended or {}
    end_s = moment(end, sessions) if end else sessions[key[0]].end_s
    start_s = moment(granted, sessions) if granted else end_s - amount(end, "held_s")
    either = end | granted
    return HeldLease(
        session=key[0],
        lease_id=key[1],
        worker=str(either.get("worker", key[1])),
        kind=str(either.get("kind", "preemptible")),
        start_s=start_s,
        end_s=max(start_s, end_s),
        cost_usd=amount(end, "cost_usd") if end else amount(granted, "price_usd_per_hour") * (end_s - start_s) / HOUR_S,
        cause=str(end.get("cause", "")),
        evicted=bool(end.get("evicted")),
        tokens=int(amount(end, "tokens")) if end else None,
    )


def covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the (start, end) stretches."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def reserved_only_s(events: Iterable[dict[str, Any]], sessions: dict[int, Session], wall_s: float) -> float | None:
    """How long the run would have taken with the reserved side generating everything, at the rate it showed.

    The time in which anybody generated is replaced by all tokens at the reserved side's own rate; whatever the trainer
    did meanwhile is given to the reserved-only run for nothing, so the estimate is rather too low. None when the
    reserved side generated nothing.
    """
    anybody, reserved = list[tuple[float, float]](), list[tuple[float, float]]()
    tokens, reserved_tokens = 0.0, 0.0
    for event in events:
        if event["event"] != DECODE:
            continue
        end_s = moment(event, sessions)
        stretch = (end_s - amount(event, "duration_s"), end_s)
        anybody.append(stretch)
        tokens += amount(event, "tokens")
        if event.get("kind") == "reserved":
            reserved.append(stretch)
            reserved_tokens += amount(event, "tokens")
    reserved_s = covered_s(reserved)
    if not reserved_tokens or not reserved_s:
        return None
    return wall_s - covered_s(anybody) + tokens * reserved_s / reserved_tokens


def fleet_figures(
    events: Sequence[dict[str, Any]],
    metrics: Sequence[MetricLine],
    *,
    wall_s: float,
    tokens_trained: float,
    reserved_usd_per_hour: float,
) -> dict[str, Any]:
    """The fleet's part of summary.json; the keys are explained in docs/metrics.md.

    Args:
        events: of all sessions.
        metrics: of the surviving history.
        wall_s: of all sessions together.
        tokens_trained: of the surviving history.
        reserved_usd_per_hour: what the reserved side costs as long as a session runs.
    """
    sessions = sessions_of(events, metrics)
    leases = [one for one in held_leases(events, sessions).values() if one.kind == "preemptible"]
    preemptible_usd = sum((one.cost_usd for one in leases), 0.0)
    alone_s = reserved_only_s(events, sessions, wall_s)
    reserved_usd, alone_usd = (reserved_usd_per_hour * seconds / HOUR_S for seconds in (wall_s, alone_s or 0.0))
    return {
        **_happenings(events, leases),
        # A resume says what of it stood in the lines it dropped.
        "tokens_recomputed": recomputed(metrics) + int(sum(amount(event, TOKENS_RECOMPUTED) for event in events)),
        "goodput_tokens_per_s": round(tokens_trained / wall_s, 3) if wall_s > 0 else None,
        "cost_usd": round(reserved_usd + preemptible_usd, 6),
        "cost_by_kind_usd": {"reserved": round(reserved_usd, 6), "preemptible": round(preemptible_usd, 6)},
        "reserved_only_usd": round(alone_usd, 6) or None,
    }


def migrations(events: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], MigrationCause]]:
    """Each event of samples that went on elsewhere, and why their worker did not go on with them."""
    causes: dict[tuple[int, str], MigrationCause] = {}
    for event in events:
        key = (int(amount(event, "session")), str(event.get("lease", "")))
        if event["event"] == NOTICE:
            causes[key] = "warned"
        elif event["event"] == EVICTION:
            causes[key] = "taken"
        elif event["event"] == MIGRATION:
            yield event, causes.get(key, "other")


def _happenings(events: Sequence[dict[str, Any]], leases: Sequence[HeldLease]) -> dict[str, int]:
    """How often what happened to preemptible workers, and what became of their samples."""
    theirs = {(one.session, one.lease_id) for one in leases}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_name.setdefault(event["event"], []).append(event)

    def total(key: str, lines: Iterable[dict[str, Any]]) -> int:
        return int(sum(amount(event, key) for event in lines))

    kept = [event for event, cause in migrations(events) if cause != "other"]
    joins = [event for event in by_name.get(JOIN, ()) if not event.get("error")]
    evictions, crashes = by_name.get(EVICTION, []), by_name.get(CRASH, [])
    return {
        "leases": len(leases),
        "joins": sum((int(amount(event, "session")), event.get("lease")) in theirs for event in joins),
        "notices": len(by_name.get(NOTICE, ())),
        "evictions": len(evictions),
        "evictions_noticed": sum(bool(event.get("noticed")) for event in evictions),
        "crashes": len(crashes),
        "quarantined": len(by_name.get(QUARANTINE, ())),
        "migrations": total("samples", by_name.get(MIGRATION, ())),
        "samples_kept": total("samples", kept),
        "tokens_kept": total("tokens_kept", kept),
        "tokens_lost": total("tokens_lost", [*evictions, *crashes]),
    }


def recomputed(metrics: Iterable[MetricLine]) -> int:
    """Tokens of resubmitted samples that were computed again in these steps."""
    return int(sum(line.values.get(TOKENS_RECOMPUTED, 0.0) for line in metrics))


def evictions_sentence(figures: dict[str, Any]) -> str:
    """What the evictions cost, of the figures above; empty when there were none."""
    if not figures["evictions"]:
        return ""
    return (
        f"{counted(figures['evictions'], 'eviction')} ({figures['evictions_noticed']} with notice): "
        f"{counted(figures['samples_kept'], 'sample')} went on elsewhere, "
        f"{counted(figures['tokens_kept'], 'token')} kept, {figures['tokens_lost']:,} lost"
    )
