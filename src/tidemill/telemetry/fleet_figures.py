"""What the fleet did and cost, from a run's logs. All sessions count, including steps that a resume rewound.

Times are seconds of work since the run started; the time between sessions is excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    TRAINING,
)
from tidemill.telemetry.jsonl import finite_number
from tidemill.telemetry.metrics import TOKENS_RECOMPUTED, MetricLine

HOUR_S = 3600.0

LeaseKey: TypeAlias = tuple[int, str]
"""(session, lease)"""
MigrationCause: TypeAlias = Literal["evicted", "noticed", "other"]
"""State of the machine a sample left; "other" is rebalancing or a faulty worker."""


class RunSession(Record):
    """One process's work on the run."""

    number: int
    start_s: float
    end_s: float  # of its last log line
    killed: bool  # no session_end: it was killed or is still running


class HeldLease(Record):
    """A machine, from its grant to its end or to the end of the session that held it."""

    session: int
    lease_id: str
    worker: str
    kind: str
    start_s: float
    end_s: float
    cost_usd: float
    cause: str = ""  # of its end; empty if the session ended first
    evicted: bool = False
    tokens: int | None = None  # None if the session ended first


def amount(event: dict[str, Any], key: str) -> float:
    """A number of a line; 0 if it is missing."""
    return finite_number(event.get(key)) or 0.0


def lease_key(event: dict[str, Any]) -> LeaseKey:
    return int(amount(event, "session")), str(event.get("lease", ""))


def sessions_of(events: Iterable[dict[str, Any]], metrics: Sequence[MetricLine]) -> dict[int, RunSession]:
    """Sessions by number, in order."""
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
    found: dict[int, RunSession] = {}
    numbers, end_s = sorted(last_s), 0.0
    for at, number in enumerate(numbers):
        start_s = starts.get(number, end_s)
        # The next session logged how long the earlier ones lasted; the metrics of their last steps may be rewound.
        known = [starts[one] for one in numbers[at + 1 : at + 2] if one in starts]
        end_s = known[0] if known else start_s + last_s[number]
        found[number] = RunSession(number=number, start_s=start_s, end_s=end_s, killed=number not in ended)
    return found


def moment(event: dict[str, Any], sessions: dict[int, RunSession]) -> float:
    """Time of a line, in seconds since the run started."""
    return sessions[int(amount(event, "session"))].start_s + amount(event, "elapsed_s")


def stretch(event: dict[str, Any], sessions: dict[int, RunSession]) -> tuple[float, float]:
    """(start, end) of a span."""
    end_s = moment(event, sessions)
    return end_s - amount(event, "duration_s"), end_s


def held_leases(events: Iterable[dict[str, Any]], sessions: dict[int, RunSession]) -> dict[LeaseKey, HeldLease]:
    """Leases by session and id, in order of their start. A lease without an end is charged until its session's end.

    The reserved side is held from the start of a session, even without a `lease` line.
    """
    granted, ended = dict[LeaseKey, dict[str, Any]](), dict[LeaseKey, dict[str, Any]]()
    for event in events:
        key = lease_key(event)
        if event["event"] == LEASE_END:
            ended[key] = event
        elif event["event"] == LEASE:
            granted[key] = event
        elif event["event"] == DECODE and event.get("kind") == "reserved":
            granted.setdefault(key, event | {"elapsed_s": 0.0})
    leases = [_held(key, granted.get(key, {}), ended.get(key), sessions) for key in granted | ended]
    return {(one.session, one.lease_id): one for one in sorted(leases, key=lambda one: one.start_s)}


def _held(
    key: LeaseKey, granted: dict[str, Any], ended: dict[str, Any] | None, sessions: dict[int, RunSession]
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


def covered_s(stretches: Iterable[tuple[float, float]] | NDArray[np.float64]) -> float:
    """Seconds in at least one of the (start, end) stretches."""
    spans = np.array(stretches if isinstance(stretches, np.ndarray) else list(stretches)).reshape(-1, 2)
    start_s, end_s = spans[np.lexsort((spans[:, 1], spans[:, 0]))].T
    reached_s = np.maximum.accumulate(np.concatenate([[-np.inf], end_s]))[:-1]
    new_s = np.maximum(0.0, end_s - np.maximum(start_s, reached_s))
    return float(np.cumsum(new_s)[-1]) if len(new_s) else 0.0  # added up in order: a sum may round differently


DECODED = ("session", "elapsed_s", "duration_s", "tokens", "by")
BY_PREEMPTIBLE, BY_RESERVED, BY_TRAINER = 0.0, 1.0, 2.0
FAST_SHARE = 0.1


def decode_figures(event: dict[str, Any]) -> tuple[float, ...]:
    """What `DECODED` names of a `decode` or `training` event."""
    if event["event"] == TRAINING:
        by = BY_TRAINER
    else:
        by = BY_RESERVED if event.get("kind") == "reserved" else BY_PREEMPTIBLE
    tokens = 0.0 if by == BY_TRAINER else amount(event, "tokens")
    return amount(event, "session"), amount(event, "elapsed_s"), amount(event, "duration_s"), tokens, by


class ReservedOnly(Record):
    """Estimated duration of the run if the reserved side had generated every token."""

    generating_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return self.generating_s + self.other_s


def reserved_only(
    decoded: NDArray[np.float64], sessions: dict[int, RunSession], wall_s: float, idle_s: float | None = None
) -> ReservedOnly | None:
    """All tokens at the reserved side's fast rate, and its time without generating and waiting.

    Beside other workers the reserved side has small batches, which are slow; alone it would have all samples at once,
    and is assumed to reach the rate that it exceeded for `FAST_SHARE` of its tokens. The estimate was 8 to 21 % too
    short where it was measured (`benchmarks.demo_compare`). None if the reserved side generated nothing.

    Args:
        idle_s: time in which the trainer waited for samples of other machines; None if workers are in its process,
            where other work is training, and the time in which neither training nor generation took place.
    """
    starts_s = {float(number): session.start_s for number, session in sessions.items()}
    session, elapsed_s, duration_s, tokens, by = decoded.T
    ends_s = np.array([starts_s[number] for number in session.tolist()]) + elapsed_s
    spans, own = np.column_stack([ends_s - duration_s, ends_s]), (by == BY_RESERVED) & (tokens > 0) & (duration_s > 0)
    if not own.any():
        return None
    if not (by == BY_PREEMPTIBLE).any():
        own_s = covered_s(spans[own])
        return ReservedOnly(generating_s=own_s, other_s=wall_s - own_s)
    generating_s = float(tokens.sum()) / _fast_rate(tokens[own], duration_s[own])
    if idle_s is not None:
        return ReservedOnly(generating_s=generating_s, other_s=max(0.0, wall_s - covered_s(spans[own]) - idle_s))
    training_s = float(duration_s[by == BY_TRAINER].sum())
    return ReservedOnly(generating_s=generating_s, other_s=wall_s - covered_s(spans) + training_s)


def _fast_rate(tokens: NDArray[np.float64], duration_s: NDArray[np.float64]) -> float:
    """Tokens per second that the fastest decodes reached, until they have `FAST_SHARE` of all tokens."""
    rates = tokens / duration_s
    order = np.argsort(-rates, kind="stable")
    reached = np.cumsum(tokens[order]) >= FAST_SHARE * tokens.sum()
    return float(rates[order][np.argmax(reached)])


def fleet_figures(
    events: Sequence[dict[str, Any]],
    metrics: Sequence[MetricLine],
    *,
    wall_s: float,
    tokens_trained: float,
    reserved_usd_per_hour: float,
    sessions: dict[int, RunSession] | None = None,
    decoded: NDArray[np.float64] | None = None,
    idle_s: float | None = None,
) -> dict[str, Any]:
    """The fleet's part of summary.json; docs/reference/metrics.md explains the keys.

    Args:
        events: of all sessions.
        metrics: of the surviving history.
        wall_s: of all sessions together.
        tokens_trained: of the surviving history.
        reserved_usd_per_hour: price of the reserved side while a session runs.
        sessions: read from both by default.
        decoded: read from `events` by default.
        idle_s: see `reserved_only`.
    """
    sessions = sessions_of(events, metrics) if sessions is None else sessions
    leases = [one for one in held_leases(events, sessions).values() if one.kind == "preemptible"]
    preemptible_usd = sum((one.cost_usd for one in leases), 0.0)
    if decoded is None:
        found = [decode_figures(event) for event in events if event["event"] in (DECODE, TRAINING)]
        decoded = np.array(found).reshape(-1, len(DECODED))
    alone = reserved_only(decoded, sessions, wall_s, idle_s)
    alone_s = alone.seconds if alone else 0.0
    reserved_usd, alone_usd = (reserved_usd_per_hour * seconds / HOUR_S for seconds in (wall_s, alone_s))
    return {
        **_counts(events, leases),
        # A resume logs the recomputed tokens of the metrics it deleted.
        "tokens_recomputed": recomputed(metrics) + int(sum(amount(event, TOKENS_RECOMPUTED) for event in events)),
        "goodput_tokens_per_s": round(tokens_trained / wall_s, 3) if wall_s > 0 else None,
        "cost_usd": round(reserved_usd + preemptible_usd, 6),
        "cost_by_kind_usd": {"reserved": round(reserved_usd, 6), "preemptible": round(preemptible_usd, 6)},
        "reserved_only_usd": round(alone_usd, 6) or None,
    }


def migrations(events: Iterable[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], MigrationCause]]:
    """Each migration event, and what had happened to the machine the samples left."""
    causes: dict[LeaseKey, MigrationCause] = {}
    for event in events:
        if event["event"] == NOTICE:
            causes[lease_key(event)] = "noticed"
        elif event["event"] == EVICTION:
            causes[lease_key(event)] = "evicted"
        elif event["event"] == MIGRATION:
            yield event, causes.get(lease_key(event), "other")


def _counts(events: Sequence[dict[str, Any]], leases: Sequence[HeldLease]) -> dict[str, int]:
    """Counts of what happened to preemptible workers and to their samples."""
    keys = {(one.session, one.lease_id) for one in leases}
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
        "joins": sum(lease_key(event) in keys for event in joins),
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
    """Tokens of migrated samples that were computed again in these steps."""
    return int(sum(line.values.get(TOKENS_RECOMPUTED, 0.0) for line in metrics))


def evictions_sentence(figures: dict[str, Any], *, is_robot: bool = False) -> str:
    """`2 evictions (1 with notice): 6 samples migrated, 42 tokens kept, 11 lost`; empty without evictions. A robot has
    neither samples nor tokens."""
    if not figures["evictions"]:
        return ""
    evictions = f"{counted(figures['evictions'], 'eviction')} ({figures['evictions_noticed']} with notice)"
    if is_robot:
        return evictions
    return (
        f"{evictions}: {counted(figures['samples_kept'], 'sample')} migrated, "
        f"{counted(figures['tokens_kept'], 'token')} kept, {figures['tokens_lost']:,} lost"
    )
