"""The newest figures of runs in the OpenMetrics text format, for Prometheus and compatible collectors.

https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.live_state import LiveState
from tidemill.telemetry.metrics import HELD_OUT, HELD_OUT_NAME, METRICS
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_state import StateName

MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "tidemill_"
STATES: tuple[str, ...] = get_args(StateName)
FLEET_TOTALS = ("evictions", "crashes", "notices", "migrations", "quarantined", "tokens_lost", "tokens_recomputed")
UNITS = {"s": "seconds", "bytes": "bytes"}
"""Base units of the specification: the name of a metric ends with its unit."""
SUFFIXES = {"counter": "_total", "info": "_info"}
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
RESERVED = re.compile(r"_(total|created|info|count|sum|bucket|gcount|gsum)$")
"""Ends of names with a meaning of their own."""
ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Figure(NamedTuple):
    """A value. Those of one name are a family, which has the kind, meaning and unit of its first figure."""

    name: str  # without prefix and the suffix of its kind, with its unit
    value: float
    labels: Mapping[str, str] = {}
    kind: Literal["gauge", "counter", "info", "stateset"] = "gauge"
    meaning: str = ""
    unit: str = ""
    prefix: str = PREFIX


def exposition(figures: Iterable[Figure]) -> str:
    """The answer to a collector. Of figures with equal names and labels the first counts."""
    families = dict[str, list[Figure]]()
    for figure in figures:
        families.setdefault(figure.prefix + NOT_IN_NAMES.sub("_", figure.name), []).append(figure)
    lines = [line for name, family in families.items() for line in _family(name, family)]
    text = "\n".join([*lines, "# EOF", ""])
    return text.encode(errors="replace").decode()  # names of folders need not be text


def _family(name: str, figures: Iterable[Figure]) -> Iterator[str]:
    first, *_ = figures
    yield f"# TYPE {name} {first.kind}"
    if first.unit:
        yield f"# UNIT {name} {first.unit}"
    if first.meaning:
        yield f"# HELP {name} {first.meaning.translate(ESCAPES)}"
    samples = dict[str, float]()
    for figure in figures:
        if figure.kind == first.kind:  # a metric of the user may have the name of another kind
            labels = ",".join(f'{label}="{text.translate(ESCAPES)}"' for label, text in figure.labels.items())
            samples.setdefault(f"{{{labels}}}" if labels else "", figure.value)
    for labels, value in samples.items():
        yield f"{name}{SUFFIXES.get(first.kind, '')}{labels} {value:.12g}"


def run_figures(name: str, data: RunData, *, state: str, live: LiveState | None) -> list[Figure]:
    """What a run is, does, has cost, and the newest value of each of its metrics.

    Args:
        name: by which the runs of a folder differ.
    """
    summary, manifest = data.summary, data.manifest
    run = {"run": name, "run_id": str(manifest.get("run_id", ""))}
    about = {"model": str(manifest.get("model", "")), "kind": str(manifest.get("kind", "rl"))}
    figures = [
        Figure("run", 1, run | about, "info", "the run"),
        *(
            Figure("run_state", one == state, {**run, f"{PREFIX}run_state": one}, "stateset", "what the run is doing")
            for one in STATES
        ),
        Figure("step", summary["steps"], run, meaning="completed steps"),
        Figure("steps_planned", data.total_steps, run, meaning="steps of the whole run"),
        Figure("sessions", summary["sessions"], run, "counter", "starts and resumes"),
        Figure("work_seconds", summary["wall_s"], run, "counter", "duration of all sessions", "seconds"),
    ]
    for kind, usd in summary["cost_by_kind_usd"].items():
        figures.append(Figure("cost_usd", usd, {**run, "kind": kind}, meaning="cost of the machines, in dollars"))
    for key in FLEET_TOTALS:
        meaning = f"{key.replace('_', ' ')} in all sessions"
        figures.append(Figure(f"fleet_{key}", amount(summary, key), run, "counter", meaning))
    if live is not None:
        figures += _live_figures(run, live)
    newest = {metric: data.values(metric)[-1] for metric in data.metrics.names}
    return figures + [_metric_figure(run, metric, value) for metric, value in newest.items()]


def _live_figures(run: Mapping[str, str], live: LiveState) -> Iterator[Figure]:
    for (kind, state), number in sorted(Counter((row.kind, row.state) for row in live.fleet).items()):
        yield Figure("workers", number, {**run, "kind": kind, "state": state}, meaning="workers now")
    price = sum(row.price_usd_per_hour for row in live.fleet)
    yield Figure("price_usd_per_hour", price, run, meaning="price of the workers now, in dollars per hour")
    yield Figure("samples_under_way", live.samples_total, run, meaning="samples that are being generated")
    if live.left_s is not None:
        yield Figure("left_seconds", live.left_s, run, meaning="estimated time to the last step", unit="seconds")


def _metric_figure(run: Mapping[str, str], metric: str, value: float) -> Figure:
    """Parts of a metric, such as the mean of each reward, and sets of held-out prompts are labels."""
    name, labels = metric, dict(run)
    if metric.startswith(HELD_OUT):
        held_out, _, figure = metric.rpartition("/")
        labels["set"] = held_out[len(HELD_OUT) :] or HELD_OUT_NAME
        name = HELD_OUT + figure
    elif "/" in metric:
        prefix, _, labels["part"] = metric.partition("/")
        name = f"{prefix}_part"
    known = METRICS.get(name)
    unit = UNITS.get(known.unit, "") if known else ""
    if unit:
        name = f"{name.removesuffix('_s').removesuffix(f'_{unit}')}_{unit}"
    elif RESERVED.search(name):
        name += "_value"
    return Figure(name, value, labels, meaning=known.meaning if known else "", unit=unit)
