"""Simulated schedules side by side, as one self-contained page: figures, and who did what when."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import tidemill
from tidemill.sim.comparison import HEADINGS, REMARKS, Compared, headline, rows
from tidemill.sim.outcome import SimulatedRun
from tidemill.telemetry.numerals import compact, dollars, duration, percent
from tidemill.telemetry.report.page import script_json, trusted
from tidemill.telemetry.report.timeline import Bar, drawn, timeline

TEMPLATES = Path(__file__).with_name("templates")


def render(title: str, words: Sequence[str], compared: Sequence[Compared]) -> str:
    """
    Args:
        title: of the page.
        words: what was simulated, a line each.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("simulation.html.j2").render(
        title=title,
        headline=headline(compared),
        headings=HEADINGS,
        rows=rows(compared),
        remarks=REMARKS,
        words=words,
        schedules=[_section(one) for one in compared],
        chart_json=script_json({"fleets": [_drawn(one.run) for one in compared]}),
        nonce=secrets.token_urlsafe(12),
        version=tidemill.__version__,
        style=trusted("templates/report.css"),
        script=trusted("templates/fleet.js"),
    )


def _section(one: Compared) -> dict[str, Any]:
    run, worker_idle = one.run, one.run.worker_idle_share
    tiles = [
        ("Throughput", compact(run.throughput_tokens_per_s), "trained tokens per second"),
        ("Step", duration(run.seconds / len(run.metrics)), f"on average, of {len(run.metrics)}"),
        ("Trainer idle", percent(run.trainer_idle_share), f"learning {percent(run.learning_share)} of the time"),
        ("Computed again", compact(run.tokens_recomputed), "tokens"),
    ]
    if run.tokens_per_usd:
        tiles.append(("Tokens per dollar", compact(run.tokens_per_usd), f"{dollars(run.cost_usd)} in all"))
    if worker_idle is not None:
        tiles.append(("Workers idle", percent(worker_idle), f"{run.workers_mean:.1f} on average"))
        tiles.append(("Evictions", str(run.evictions), f"{compact(run.total('tokens_lost'))} tokens lost"))
    return {"name": one.planned.name, "words": one.planned.schedule.words, "tiles": tiles}


def _drawn(run: SimulatedRun) -> dict[str, Any]:
    """The timeline of a run's logs, with what the trainer did while its batch came in."""
    found = timeline(run.events, run.metrics, reserved_only=True)
    assert found is not None, "a timeline of reserved machines is wanted"
    learned = tuple(
        Bar(row=0, kind="learn", start_s=begin_s, end_s=end_s, words=f"learning\n{duration(end_s - begin_s)}")
        for begin_s, end_s in run.learned
    )
    bars = (*(bar for bar in found.bars if bar.kind != "train"), *learned)
    return drawn(msgspec.structs.replace(found, bars=bars))
