"""The fleet section of the page: the timeline of workers as rows, bars and marks for fleet.js, figures, and costs.

One row per worker; if there are many workers, machines that follow each other share a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np

from tidemill.core.formatting import compact, counted, decimal, dollars, duration, natural_sort_key, percent
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
    TRAINING,
    event_text,
)
from tidemill.telemetry.fleet_figures import (
    BY_PREEMPTIBLE,
    HeldLease,
    LeaseKey,
    RunSession,
    amount,
    evictions_sentence,
    held_leases,
    lease_key,
    migrations,
    moment,
    sessions_of,
    stretch,
)
from tidemill.telemetry.manifest import Forecast
from tidemill.telemetry.metrics import MISMATCH_OF, MISMATCH_TOKENS_OF, MetricLine
from tidemill.telemetry.report.payoff import payoff_of
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import TRAINING_PURPOSE

NAMED_ROWS = 40
"""With more worker names, rows are shared."""
MOST_BARS = 20_000
FINEST = 4000
"""With more than MOST_BARS bars, those closer than this fraction of the whole time are merged."""
TRAINER = "trainer"
MISMATCH_ROWS = 20

BarKind = Literal["held", "boot", "pull", "decode", "evaluate", "notice", "learn", "train", "checkpoint"]
MarkKind = Literal["eviction", "drained", "quarantine", "failed"]
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
    text: str


class TimelineMark(Record):
    row: int
    kind: MarkKind
    at_s: float
    text: str


class Timeline(Record):
    """Times are seconds of work since the run started."""

    rows: tuple[str, ...]
    named: bool  # rows are workers; otherwise they are shared
    first_preemptible: int  # row
    bars: tuple[Bar, ...]
    marks: tuple[TimelineMark, ...]
    publishes: tuple[tuple[float, str], ...]
    sessions: tuple[tuple[float, str], ...]  # starts of the second and later ones
    serving: tuple[tuple[float, int], ...]  # number of preemptible workers from each time on
    end_s: float
    work_from_s: float = 0.0  # what workers did in each step before is left out


def timeline(
    events: Iterable[dict[str, Any]],
    metrics: Sequence[MetricLine],
    *,
    reserved_only: bool = False,
    work: Iterable[dict[str, Any]] | None = None,
) -> Timeline | None:
    """None for a run without preemptible workers, unless `reserved_only` asks for a timeline anyway.

    Args:
        work: the events with what workers and the trainer did in each step; by default those of `events`.
    """
    events = [*events]
    work = events if work is None else work
    sessions = sessions_of(events, metrics)
    leases = held_leases(events, sessions)
    preemptible = [one for one in leases.values() if one.kind == "preemptible"]
    if not preemptible and not reserved_only:
        return None
    reserved = [one for one in leases.values() if one.kind == "reserved"]
    named = len({one.worker for one in preemptible}) <= NAMED_ROWS
    groups = [*_by_worker(reserved), *(_by_worker(preemptible) if named else [("", preemptible)])]
    rows, row_of = [TRAINER], dict[LeaseKey, int]()
    for label, group in groups:
        for lane in lanes(group):
            row_of |= {(one.session, one.lease_id): len(rows) for one in lane}
            rows.append(label)
    joins = (event for event in events if event["event"] == JOIN and not event.get("error"))
    starts = {lease_key(event): stretch(event, sessions) for event in joins}
    bars = [*_lease_bars(leases, row_of, starts, events, sessions), *_work_bars(work, row_of, sessions)]
    end_s = max(one.end_s for one in sessions.values())
    return Timeline(
        rows=tuple(rows),
        named=named,
        first_preemptible=min((row_of[one.session, one.lease_id] for one in preemptible), default=len(rows)),
        bars=tuple(bars if len(bars) <= MOST_BARS else merged(bars, end_s / FINEST)),
        marks=(*_marks(events, row_of, sessions), *_drained(events, row_of, sessions)),
        publishes=tuple(_publishes(work, sessions)),
        sessions=tuple(
            (one.start_s, f"session {one.number}" + (", after a kill" if earlier.killed else ""))
            for earlier, one in pairwise(sessions.values())
        ),
        serving=tuple(serving(preemptible, starts)),
        end_s=end_s,
    )


def lanes(leases: Iterable[HeldLease]) -> list[list[HeldLease]]:
    """Leases grouped into lanes without overlap; each lease goes to the first free lane."""
    found: list[list[HeldLease]] = []
    for one in sorted(leases, key=lambda one: (one.start_s, natural_sort_key(one.worker))):
        free = next((lane for lane in found if lane[-1].end_s <= one.start_s), None)
        if free is None:
            found.append([one])
        else:
            free.append(one)
    return found


def merged(bars: Iterable[Bar], step_s: float) -> list[Bar]:
    """Bars with neighbours of one kind in one row merged if the gap between them is at most `step_s`."""
    found: list[tuple[Bar, float, int]] = []  # (first bar, end of the last, number of bars)
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
            text=bar.text if count == 1 else f"{bar.text}\nand {count - 1} more until here")
        for bar, end_s, count in found
    ]  # fmt: skip


def serving(preemptible: Sequence[HeldLease], starts: dict[LeaseKey, tuple[float, float]]) -> list[tuple[float, int]]:
    """(time, number of workers that are up from then on), one entry per change."""
    changes = dict[float, int]()
    for one in preemptible:
        if start := starts.get((one.session, one.lease_id)):
            changes[start[1]] = changes.get(start[1], 0) + 1
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
    return sorted(groups.items(), key=lambda item: natural_sort_key(item[0]))


def _lease_bars(
    leases: dict[LeaseKey, HeldLease],
    row_of: dict[LeaseKey, int],
    starts: dict[LeaseKey, tuple[float, float]],
    events: Iterable[dict[str, Any]],
    sessions: dict[int, RunSession],
) -> Iterable[Bar]:
    """Each lease, the start of its worker, and the time from a notice to its end."""
    for key, lease in leases.items():
        row = row_of[key]
        cost = f", {dollars(lease.cost_usd)}" if lease.cost_usd else ""
        tokens = f"\n{counted(lease.tokens, 'token')}" if lease.tokens is not None else ""
        held = f"held {duration(lease.end_s - lease.start_s)}{cost}{tokens}\nend: {lease.cause or 'none recorded'}"
        text = f"{lease.worker}, {lease.kind}\n{held}"
        yield Bar(row=row, kind="held", start_s=lease.start_s, end_s=lease.end_s, text=text)
        if key in starts:
            start_s, end_s = starts[key]
            text = f"{lease.worker} started\n{duration(end_s - start_s)}"
            yield Bar(row=row, kind="boot", start_s=max(lease.start_s, start_s), end_s=end_s, text=text)
    for event in events:
        if event["event"] == NOTICE and (one := leases.get(lease_key(event))):
            at_s, text = moment(event, sessions), event_text(NOTICE, event)
            yield Bar(row=row_of[lease_key(event)], kind="notice", start_s=at_s, end_s=one.end_s, text=text)


def _work_bars(
    events: Iterable[dict[str, Any]], row_of: dict[LeaseKey, int], sessions: dict[int, RunSession]
) -> Iterable[Bar]:
    """Pulls and generation by lease, and the trainer's work in row 0."""
    for event in events:
        name = event["event"]
        start_s, end_s = stretch(event, sessions)
        took = duration(end_s - start_s)
        if name in (DECODE, PULL) and (row := row_of.get(lease_key(event))) is not None:
            training = event.get("purpose") == TRAINING_PURPOSE
            kind: BarKind = "pull" if name == PULL else "decode" if training else "evaluate"
            text = (_pull_text if name == PULL else _decode_text)(event, took)
            yield Bar(row=row, kind=kind, start_s=start_s, end_s=end_s, text=text)
        elif name in (TRAINING, CHECKPOINT):
            kind, what = ("train", "optimizer") if name == TRAINING else ("checkpoint", "checkpoint of")
            yield Bar(row=0, kind=kind, start_s=start_s, end_s=end_s, text=f"{what} step {event.get('step')}\n{took}")


def _decode_text(event: dict[str, Any], took: str) -> str:
    tokens, samples, seconds = (amount(event, key) for key in ("tokens", "samples", "duration_s"))
    speed = f", {compact(tokens / seconds)} tok/s" if seconds else ""
    purpose = "" if event.get("purpose") == TRAINING_PURPOSE else f" ({event.get('purpose')})"
    amounts = f"{counted(int(tokens), 'token')} of {counted(int(samples), 'sample')}"
    return f"{event.get('worker')} generated, step {event.get('step')}{purpose}\n{took}{speed}\n{amounts}"


def _pull_text(event: dict[str, Any], took: str) -> str:
    kind = "a snapshot" if event.get("full") else "a delta"
    retries = f"\n{counted(int(amount(event, 'retries')), 'damaged transfer')}" if event.get("retries") else ""
    swap = f"generation paused {1000 * amount(event, 'swap_s'):.0f} ms"
    size = f"{amount(event, 'nbytes') / 1e6:.1f} MB in {took}"
    return f"{event.get('worker')} pulled version {event.get('version')} as {kind}\n{size}, {swap}{retries}"


def _marks(
    events: Iterable[dict[str, Any]], row_of: dict[LeaseKey, int], sessions: dict[int, RunSession]
) -> Iterable[TimelineMark]:
    for event in events:
        kind, row = MARKS.get(event["event"]), row_of.get(lease_key(event))
        if kind and row is not None:
            text = event_text(event["event"], event)
            yield TimelineMark(row=row, kind=kind, at_s=moment(event, sessions), text=text)


def _drained(
    events: Iterable[dict[str, Any]], row_of: dict[LeaseKey, int], sessions: dict[int, RunSession]
) -> Iterable[TimelineMark]:
    """One mark per machine under notice whose samples migrated, at the first migration."""
    first = dict[LeaseKey, dict[str, Any]]()
    samples, tokens = Counter[LeaseKey](), Counter[LeaseKey]()
    for event, cause in migrations(events):
        if cause == "noticed" and (key := lease_key(event)) in row_of:
            first.setdefault(key, event)
            samples[key] += int(amount(event, "samples"))
            tokens[key] += int(amount(event, "tokens_kept"))
    for key, event in first.items():
        kept = f"{counted(tokens[key], 'token')} kept"
        text = f"{event.get('worker')} returned {counted(samples[key], 'sample')}\n{kept}"
        yield TimelineMark(row=row_of[key], kind="drained", at_s=moment(event, sessions), text=text)


def _publishes(events: Iterable[dict[str, Any]], sessions: dict[int, RunSession]) -> Iterable[tuple[float, str]]:
    """Publishes that wrote files; loading the trainer's own parameters is not of interest."""
    for event in events:
        if event["event"] == PUBLISH and event.get("nbytes"):
            delta = f", delta {amount(event, 'delta_nbytes') / 1e6:.1f} MB" if event.get("delta_nbytes") else ""
            size = f"{amount(event, 'nbytes') / 1e6:.1f} MB{delta}"
            yield moment(event, sessions), f"version {event.get('version')} published\n{size}"


def timeline_json(found: Timeline) -> dict[str, Any]:
    """JSON for fleet.js: arrays instead of records, times rounded to milliseconds."""
    kinds = list(get_args(BarKind))
    return {
        "rows": found.rows,
        "named": found.named,
        "first": found.first_preemptible,
        "kinds": kinds,
        "bars": [
            [bar.row, kinds.index(bar.kind), round(bar.start_s, 3), round(bar.end_s, 3), bar.text]
            for bar in sorted(found.bars, key=lambda bar: kinds.index(bar.kind))
        ],
        "marks": [[mark.row, mark.kind, round(mark.at_s, 3), mark.text] for mark in found.marks],
        "publishes": [[round(at_s, 3), text] for at_s, text in found.publishes],
        "sessions": [[round(at_s, 3), text] for at_s, text in found.sessions],
        "serving": [[round(at_s, 3), count] for at_s, count in found.serving],
        "end": round(found.end_s, 3),
        "workFrom": duration(found.work_from_s) if found.work_from_s else "",
    }


class CostBar(NamedTuple):
    """A bar of two parts, in per cent of the longest bar."""

    label: str
    remark: str
    reserved: float
    preemptible: float
    figure: str


def run_timeline(data: RunData, *, work: Collection[dict[str, Any]] = ()) -> Timeline | None:
    """None before the first session.

    Args:
        work: the events with what each worker did in each step; the newest ones are enough.
    """
    if not data.sessions:
        return None
    found = timeline(data.events.outline, data.metrics, reserved_only=True, work=work)
    if found is None or len(work) == len(data.events):
        return found
    first_s = min((moment(event, data.sessions) for event in work), default=0.0)
    return msgspec.structs.replace(found, work_from_s=first_s)


def fleet_section(data: RunData, found: Timeline | None) -> dict[str, Any]:
    """Template values."""
    preemptible = found is not None and found.first_preemptible < len(found.rows)
    sentence = evictions_sentence(data.summary, is_robot=data.is_robot)
    return {
        "sentence": sentence or ("No evictions" if preemptible else "Reserved machines only"),
        "drawn": found is not None,
        "tiles": fleet_tiles(data, found) if found and preemptible else [],
        "costs": cost_bars(data.summary, data.forecast),
        "payoff": payoff_of(data),
        "made": worker_rows(data),
        "chunks": [(*row[:5], row[-1]) for row in worker_rows(data)],
    }


def worker_rows(data: RunData) -> list[tuple[str, ...]]:
    """(worker, kind, leases, evicted, samples, tokens, share of tokens, cost), most tokens first."""
    samples, tokens = data.events.samples_by_worker, data.events.tokens_by_worker
    leases = [*held_leases(data.events.outline, data.sessions).values()]
    names = dict.fromkeys([*(name for name, _ in tokens.most_common()), *(one.worker for one in leases)])
    rows = list[tuple[str, ...]]()
    for name in names:
        held = [one for one in leases if one.worker == name]
        kinds, cost = dict.fromkeys(one.kind for one in held), sum(one.cost_usd for one in held)
        if [*kinds] == ["reserved"] and sum(one.kind == "reserved" for one in leases) == 1:
            cost = data.summary["cost_by_kind_usd"]["reserved"]  # also while it is held
        share = percent(tokens[name] / tokens.total()) if tokens.total() else "-"
        counts = (len(held), sum(one.evicted for one in held), compact(samples[name]), compact(tokens[name]))
        rows.append((name, ", ".join(kinds), *map(str, counts), share, dollars(cost) if cost else "-"))
    return rows


def mismatch_rows(data: RunData) -> list[tuple[str, str, str, str]]:
    """(engine, worker, KL, tokens) of engines, and of the `MISMATCH_ROWS` workers with the largest mismatch."""
    found = dict[str, tuple[float, float]]()
    for metric in data.metrics.names:
        name = metric.removeprefix(MISMATCH_OF)
        if name != metric:
            tokens, kl = data.metrics.column(MISMATCH_TOKENS_OF + name), data.metrics.column(metric)
            total = float(np.nansum(np.where(np.isnan(kl), 0.0, tokens)))
            found |= {name: (float(np.nansum(kl * tokens)) / total, total)} if total else {}
    by_kl = sorted(found, key=lambda name: -found[name][0])
    shown = [name for name in by_kl if "/" not in name]
    shown += [name for name in by_kl if "/" in name][:MISMATCH_ROWS]
    rows = [(*name.partition("/")[::2], *found[name]) for name in shown]
    return [(engine, worker or "all", decimal(kl), compact(tokens)) for engine, worker, kl, tokens in rows]


def fleet_tiles(data: RunData, found: Timeline) -> list[tuple[str, str, str]]:
    """(label, figure, remark)"""
    summary = data.summary
    *_, tokens_decoded, by = data.events.decoded.T
    tokens = float(tokens_decoded.sum())
    remote = float(tokens_decoded[by == BY_PREEMPTIBLE].sum())
    starts = [amount(event, "duration_s") for event in data.events_named(JOIN) if not event.get("error")]
    goodput = summary["goodput_tokens_per_s"]
    kept, lost = compact(summary["tokens_kept"]), compact(summary["tokens_lost"])
    rows = [
        ("Workers", f"{mean_serving(found):.1f}", f"mean, at most {max(count for _, count in found.serving)}"),
        ("Leases", str(summary["leases"]), f"started in {duration(median(starts))} (median)" if starts else "none up"),
        ("Evictions", str(summary["evictions"]), f"{summary['evictions_noticed']} with notice"),
        ("Samples migrated", str(summary["samples_kept"]), f"{kept} tokens kept, {lost} lost"),
        ("Preemptible share", percent(remote / tokens) if tokens else "-", f"of {compact(tokens)} generated tokens"),
        ("Goodput", decimal(goodput), "trained tokens per second of wall time"),
    ]
    if data.is_robot:
        del rows[3:]  # figures of samples and tokens
    if summary["crashes"]:
        rows.append(("Crashed", counted(summary["crashes"], "worker"), "raised errors; see the events"))
    if summary["quarantined"]:
        rows.append(("Quarantined", counted(summary["quarantined"], "worker"), "their logprobs differed"))
    return rows


def mean_serving(found: Timeline) -> float:
    """Number of preemptible workers that were up, mean over the time of work."""
    ends = [at_s for at_s, _ in found.serving[1:]] + [found.end_s]
    busy = sum(count * (end_s - at_s) for (at_s, count), end_s in zip(found.serving, ends, strict=True))
    return busy / found.end_s if found.end_s else 0.0


def cost_bars(summary: dict[str, Any], forecast: Forecast | None = None) -> list[CostBar]:
    """Cost of this run, the estimate for reserved machines only, and the forecast; empty without prices."""
    by_kind, alone = summary["cost_by_kind_usd"], summary["reserved_only_usd"]
    if not summary["cost_usd"]:
        return []
    expected = forecast.cost_usd if forecast else 0.0
    longest = max(summary["cost_usd"], alone or 0.0, expected)
    parts = f"reserved {dollars(by_kind['reserved'])}, preemptible {dollars(by_kind['preemptible'])}"
    shares = {kind: 100 * usd / longest for kind, usd in by_kind.items()}
    bars = [CostBar("this run", parts, **shares, figure=dollars(summary["cost_usd"]))]
    if alone:
        remark = "estimate: the same tokens at the reserved side's fastest rate"
        bars.append(CostBar("reserved only", remark, 100 * alone / longest, 0.0, dollars(alone)))
    if forecast and expected:
        so_far = dollars(expected * min(1.0, summary["steps"] / max(1, forecast.steps)))
        remark = f"{so_far} of it for the steps so far"
        bars.append(CostBar("forecast", remark, 100 * expected / longest, 0.0, dollars(expected)))
    return bars
