"""The timeline of workers: which rows there are, and the bars and marks on them, as numbers the page's script draws.

One row per worker where there are few; where there are many, machines that follow each other share a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from tidemill.core.formatting import compact, counted, dollars, duration, natural
from tidemill.core.records import Record
from tidemill.telemetry.events import (
    CHECKPOINT,
    CRASH,
    DECODE,
    EVICTION,
    JOIN,
    JOIN_FAILED,
    NOTICE,
    PUBLISH,
    PULL,
    QUARANTINE,
)
from tidemill.telemetry.fleet_figures import HeldLease, Session, amount, held_leases, migrations, moment, sessions_of
from tidemill.telemetry.fleet_view import fleet_words
from tidemill.telemetry.metrics import MetricLine

NAMED_ROWS = 40
"""With more names than this, rows are shared by whoever follows."""
MOST_BARS = 20_000
FINEST = 4000  # of the whole time: bars nearer to each other are drawn as one where there are too many
TRAINER = "trainer"

BarKind = Literal["held", "boot", "pull", "decode", "evaluate", "notice", "learn", "train", "checkpoint"]
MarkKind = Literal["eviction", "handed", "quarantine", "failed"]
MARKS: dict[str, MarkKind] = {
    EVICTION: "eviction",
    CRASH: "failed",
    QUARANTINE: "quarantine",
    JOIN_FAILED: "failed",
}


class Bar(Record):
    row: int
    kind: BarKind
    start_s: float
    end_s: float
    words: str


class Mark(Record):
    row: int
    kind: MarkKind
    at_s: float
    words: str


class Timeline(Record):
    """All times on the run's own axis."""

    rows: tuple[str, ...]
    named: bool  # rows are workers; otherwise they are shared
    first_preemptible: int  # row
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    publishes: tuple[tuple[float, str], ...]
    sessions: tuple[tuple[float, str], ...]  # where the second and later ones begin
    serving: tuple[tuple[float, int], ...]  # preemptible workers there from then on
    end_s: float


def timeline(
    events: Sequence[dict[str, Any]], metrics: Sequence[MetricLine], *, reserved_only: bool = False
) -> Timeline | None:
    """None for a run that had no preemptible worker, unless `reserved_only` ones are wanted, too."""
    sessions = sessions_of(events, metrics)
    leases = held_leases(events, sessions)
    preemptible = [one for one in leases.values() if one.kind == "preemptible"]
    if not preemptible and not reserved_only:
        return None
    reserved = [one for one in leases.values() if one.kind == "reserved"]
    named = len({one.worker for one in preemptible}) <= NAMED_ROWS
    groups = [*_by_worker(reserved), *(_by_worker(preemptible) if named else [("", preemptible)])]
    rows, row_of = [TRAINER], dict[tuple[int, str], int]()
    for label, group in groups:
        for lane in lanes(group):
            row_of |= {(one.session, one.lease_id): len(rows) for one in lane}
            rows.append(label)
    ups = _ups(events, sessions)
    bars = [*_lease_bars(leases, row_of, ups, events, sessions), *_work_bars(events, row_of, sessions)]
    end_s = max(one.end_s for one in sessions.values())
    return Timeline(
        rows=tuple(rows),
        named=named,
        first_preemptible=min((row_of[one.session, one.lease_id] for one in preemptible), default=len(rows)),
        bars=tuple(bars if len(bars) <= MOST_BARS else merged(bars, end_s / FINEST)),
        marks=(*_marks(events, row_of, sessions), *_handed(events, row_of, sessions)),
        publishes=tuple(_publishes(events, sessions)),
        sessions=tuple(_sessions(list(sessions.values()))),
        serving=tuple(serving(preemptible, ups)),
        end_s=end_s,
    )


def lanes(leases: Iterable[HeldLease]) -> list[list[HeldLease]]:
    """Leases that do not overlap share a lane; each goes to the first one that is free."""
    found: list[list[HeldLease]] = []
    for one in sorted(leases, key=lambda one: (one.start_s, natural(one.worker))):
        free = next((lane for lane in found if lane[-1].end_s <= one.start_s), None)
        if free is None:
            found.append([one])
        else:
            free.append(one)
    return found


def merged(bars: Iterable[Bar], step_s: float) -> list[Bar]:
    """Neighbours of one kind in one row become one bar where the gap between them is too small to be seen."""
    found: list[tuple[Bar, float, int]] = []  # (the first of them, end of the last, how many)
    open_at = dict[tuple[int, BarKind], int]()
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        at = open_at.get((bar.row, bar.kind))
        if at is None or bar.start_s - found[at][1] > step_s or bar.kind == "held":
            open_at[bar.row, bar.kind] = len(found)
            found.append((bar, bar.end_s, 1))
        else:
            first, end_s, count = found[at]
            found[at] = (first, max(end_s, bar.end_s), count + 1)
    return [
        Bar(row=bar.row, kind=bar.kind, start_s=bar.start_s, end_s=end_s,
            words=bar.words if count == 1 else f"{bar.words}\nand {count - 1} more until here")
        for bar, end_s, count in found
    ]  # fmt: skip


def serving(
    preemptible: Sequence[HeldLease], ups: dict[tuple[int, str], tuple[float, float]]
) -> list[tuple[float, int]]:
    """(time, workers that are up from then on), one entry per change."""
    changes = dict[float, int]()
    for one in preemptible:
        if up := ups.get((one.session, one.lease_id)):
            changes[up[1]] = changes.get(up[1], 0) + 1
            changes[one.end_s] = changes.get(one.end_s, 0) - 1
    count, found = 0, [(0.0, 0)]
    for at_s in sorted(changes):
        count += changes[at_s]
        found.append((at_s, count))
    return found


def _by_worker(leases: Iterable[HeldLease]) -> list[tuple[str, list[HeldLease]]]:
    groups: dict[str, list[HeldLease]] = {}
    for one in leases:
        groups.setdefault(one.worker, []).append(one)
    return sorted(groups.items(), key=lambda item: natural(item[0]))


def _key(event: dict[str, Any]) -> tuple[int, str]:
    return int(amount(event, "session")), str(event.get("lease", ""))


def _stretch(event: dict[str, Any], sessions: dict[int, Session]) -> tuple[float, float]:
    end_s = moment(event, sessions)
    return end_s - amount(event, "duration_s"), end_s


def _ups(events: Iterable[dict[str, Any]], sessions: dict[int, Session]) -> dict[tuple[int, str], tuple[float, float]]:
    """When each worker's start began and ended, by lease."""
    joins = (event for event in events if event["event"] == JOIN and not event.get("error"))
    return {_key(event): _stretch(event, sessions) for event in joins}


def _lease_bars(
    leases: dict[tuple[int, str], HeldLease],
    row_of: dict[tuple[int, str], int],
    ups: dict[tuple[int, str], tuple[float, float]],
    events: Iterable[dict[str, Any]],
    sessions: dict[int, Session],
) -> Iterable[Bar]:
    """The lease itself, its worker's start, and what was left of it after a notice."""
    for key, lease in leases.items():
        row = row_of[key]
        yield Bar(row=row, kind="held", start_s=lease.start_s, end_s=lease.end_s, words=_lease_words(lease))
        if up := ups.get(key):
            words = f"{lease.worker} started\n{duration(up[1] - up[0])}"
            yield Bar(row=row, kind="boot", start_s=max(lease.start_s, up[0]), end_s=up[1], words=words)
    for event in events:
        if event["event"] == NOTICE and (one := leases.get(_key(event))):
            at_s, words = moment(event, sessions), fleet_words(NOTICE, event)
            yield Bar(row=row_of[_key(event)], kind="notice", start_s=at_s, end_s=one.end_s, words=words)


def _lease_words(lease: HeldLease) -> str:
    cost = f", {dollars(lease.cost_usd)}" if lease.cost_usd else ""
    made = f"\n{counted(lease.tokens, 'token')}" if lease.tokens is not None else ""
    cause = lease.cause or "none recorded"
    return f"{lease.worker}, {lease.kind}\nheld {duration(lease.end_s - lease.start_s)}{cost}{made}\nend: {cause}"


def _work_bars(
    events: Iterable[dict[str, Any]], row_of: dict[tuple[int, str], int], sessions: dict[int, Session]
) -> Iterable[Bar]:
    """Pulls and decoding by lease, and the trainer's own work in row 0."""
    for event in events:
        name = event["event"]
        start_s, end_s = _stretch(event, sessions)
        took = duration(end_s - start_s)
        if name in (DECODE, PULL) and _key(event) in row_of:
            kind: BarKind = "pull" if name == PULL else "decode" if event.get("purpose") == "train" else "evaluate"
            words = (_pull_words if name == PULL else _decode_words)(event, took)
            yield Bar(row=row_of[_key(event)], kind=kind, start_s=start_s, end_s=end_s, words=words)
        elif name in ("training", CHECKPOINT):
            kind, what = ("train", "optimizer") if name == "training" else ("checkpoint", "checkpoint of")
            yield Bar(row=0, kind=kind, start_s=start_s, end_s=end_s, words=f"{what} step {event.get('step')}\n{took}")


def _decode_words(event: dict[str, Any], took: str) -> str:
    tokens, samples, seconds = (amount(event, key) for key in ("tokens", "samples", "duration_s"))
    speed = f", {compact(tokens / seconds)} tok/s" if seconds else ""
    purpose = "" if event.get("purpose") == "train" else f" ({event.get('purpose')})"
    made = f"{counted(int(tokens), 'token')} of {counted(int(samples), 'sample')}"
    return f"{event.get('worker')} generated, step {event.get('step')}{purpose}\n{took}{speed}\n{made}"


def _pull_words(event: dict[str, Any], took: str) -> str:
    what = "whole" if event.get("full") else "as a delta"
    retries = f"\npulled again {counted(int(amount(event, 'retries')), 'time')}" if event.get("retries") else ""
    swap = f"stood still {1000 * amount(event, 'swap_s'):.0f} ms"
    size = f"{amount(event, 'nbytes') / 1e6:.1f} MB in {took}"
    return f"{event.get('worker')} pulled version {event.get('version')} {what}\n{size}, {swap}{retries}"


def _marks(
    events: Iterable[dict[str, Any]], row_of: dict[tuple[int, str], int], sessions: dict[int, Session]
) -> Iterable[Mark]:
    for event in events:
        kind, row = MARKS.get(event["event"]), row_of.get(_key(event))
        if kind and row is not None:
            words = fleet_words(event["event"], event)
            yield Mark(row=row, kind=kind, at_s=moment(event, sessions), words=words)


def _handed(
    events: Iterable[dict[str, Any]], row_of: dict[tuple[int, str], int], sessions: dict[int, Session]
) -> Iterable[Mark]:
    """One for each warned machine whose samples went on elsewhere, when the first of them did."""
    first = dict[tuple[int, str], dict[str, Any]]()
    samples, tokens = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for event, cause in migrations(events):
        if cause == "warned" and (key := _key(event)) in row_of:
            first.setdefault(key, event)
            samples[key] += int(amount(event, "samples"))
            tokens[key] += int(amount(event, "tokens_kept"))
    for key, event in first.items():
        words = f"{event.get('worker')} handed back {counted(samples[key], 'sample')}\n"
        kept = f"{counted(tokens[key], 'token')} went along"
        yield Mark(row=row_of[key], kind="handed", at_s=moment(event, sessions), words=words + kept)


def _publishes(events: Iterable[dict[str, Any]], sessions: dict[int, Session]) -> Iterable[tuple[float, str]]:
    """Only those that wrote something: loading the trainer's own parameters is no news to a worker."""
    for event in events:
        if event["event"] == PUBLISH and event.get("nbytes"):
            delta = f", as a delta {amount(event, 'delta_nbytes') / 1e6:.1f} MB" if event.get("delta_nbytes") else ""
            size = f"{amount(event, 'nbytes') / 1e6:.1f} MB{delta}"
            yield moment(event, sessions), f"version {event.get('version')} published\n{size}"


def _sessions(sessions: Sequence[Session]) -> Iterable[tuple[float, str]]:
    for earlier, one in pairwise(sessions):
        yield one.start_s, f"session {one.number}" + (", after a kill" if earlier.killed else "")


def drawn(found: Timeline) -> dict[str, Any]:
    """What the page's script is given: lists instead of records, times to the millisecond."""
    kinds = list(get_args(BarKind))
    return {
        "rows": found.rows,
        "named": found.named,
        "first": found.first_preemptible,
        "kinds": kinds,
        "bars": [
            [bar.row, kinds.index(bar.kind), round(bar.start_s, 3), round(bar.end_s, 3), bar.words]
            for bar in sorted(found.bars, key=lambda bar: kinds.index(bar.kind))
        ],
        "marks": [[mark.row, mark.kind, round(mark.at_s, 3), mark.words] for mark in found.marks],
        "publishes": [[round(at_s, 3), words] for at_s, words in found.publishes],
        "sessions": [[round(at_s, 3), words] for at_s, words in found.sessions],
        "serving": [[round(at_s, 3), count] for at_s, count in found.serving],
        "end": round(found.end_s, 3),
    }
