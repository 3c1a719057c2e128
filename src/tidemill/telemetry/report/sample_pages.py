"""The samples of a run on the live page: a table with filters, a group side by side, and one sample by token.

Each function returns HTML that samples.js puts into the page. Addresses have the parameters of a `SampleQuery`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, decimal, percent
from tidemill.core.records import Record
from tidemill.telemetry.binning import Bins
from tidemill.telemetry.report.pages import HERE, render_page
from tidemill.telemetry.report.sample_cards import LEGEND, level, sample_card
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import TRAINING_PURPOSE
from tidemill.telemetry.sample_files import Sample
from tidemill.telemetry.sample_index import SampleIndex, SampleQuery, SampleRow

TEMPLATE = HERE / "templates" / "sample_pages.html.j2"
SNIPPET = 90
"""Characters of a prompt and of a completion in the table."""
COLUMNS = (
    ("step", "Step"), ("", "Prompt"), ("", "Completion"), ("reward", "Reward"), ("advantage", "Advantage"),
    ("tokens", "Tokens"), ("newest", "Version"), ("", "Workers"), ("", ""),
)  # fmt: skip
"""(sort, title)."""
ENTROPIES = (0.05, 0.2, 0.5, 1.0, 1.5, 2.5, 4.0)
RATIOS = (0.5, 0.8, 0.95, 0.995, 1.005, 1.05, 1.25, 2.0)
ADVANTAGES = (-2.0, -1.0, -0.5, -0.01, 0.01, 0.5, 1.0, 2.0)
COLOURS = 8
"""Of workers and versions; further ones repeat them, and have a label."""


class Bar(Record):
    """A bar of the histogram of rewards."""

    label: str
    count: str
    height: float  # relative to the tallest
    chosen: float  # height of the part that the filter keeps
    query: str  # keeps only its samples


class TokenFigure(Record):
    """A figure of every token of a completion."""

    name: str
    title: str
    levels: tuple[int | None, ...]  # colour, index into `legend`; None: not known
    values: tuple[float | str | None, ...]
    scale: str  # of colours: s: from low to high, d: around a middle, c: categories
    legend: tuple[tuple[int, str], ...]  # (colour, meaning)


def samples_section(data: RunData, index: SampleIndex, query: SampleQuery | None = None) -> str:
    """The table of samples that match, with filters and a histogram of rewards."""
    query = query or SampleQuery()
    page = index.query(query)
    rows = [_table_row(index, row) for row in page.rows]
    bins = index.histogram(query)
    return render_page(
        TEMPLATE,
        view="samples",
        query=query,
        page=page,
        rows=rows,
        total=len(index),
        bars=_bars(bins, query) if any(bins.first) else [],
        columns=COLUMNS,
        purposes=index.purposes,
        workers=index.workers,
        abandoned=len(data.run.abandoned()),
    )


def group_section(
    data: RunData, index: SampleIndex, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE
) -> str:
    """The samples of one prompt side by side. Raises UserError: there are none."""
    cards = [
        (sample_card(index.read(row)), address(row, "sample")) for row in index.rows_of(step, prompt_id, epoch, purpose)
    ]
    if not cards:
        raise _no_sample(data, step)
    return render_page(TEMPLATE, view="group", cards=cards, prompt=cards[0][0].prompt, legend=LEGEND)


def sample_section(
    data: RunData,
    index: SampleIndex,
    step: int,
    prompt_id: str,
    number: int,
    epoch: int = 0,
    purpose: str = TRAINING_PURPOSE,
) -> str:
    """One sample with the figures of its tokens. Raises UserError: there is none.

    Args:
        number: `index` of the sample in its group.
    """
    group = index.rows_of(step, prompt_id, epoch, purpose)
    row = next((row for row in group if row.index == number), None)
    if row is None:
        raise _no_sample(data, step)
    sample = index.read(row)
    figures = token_figures(sample)
    return render_page(
        TEMPLATE,
        view="sample",
        card=sample_card(sample, whole=True),
        row=row,
        figures=figures,
        tokens={"tokens": sample.tokens, "figures": figures},
        group=address(row, "group"),
        siblings=[(each.index, address(each, "sample")) for each in group],
    )


def _no_sample(data: RunData, step: int) -> UserError:
    where = str(data.run.samples)
    return UserError(f"no such sample of step {step}", where=where, hint="a resumed run may have replaced it")


def address(row: SampleRow, view: str) -> str:
    """The parameters of the page of a sample, or of its group."""
    values: dict[str, Any] = {"view": view, "step": row.step, "prompt": row.prompt_id, "epoch": row.epoch}
    if row.purpose != TRAINING_PURPOSE:
        values["purpose"] = row.purpose
    return urlencode(values | ({"index": row.index} if view == "sample" else {}))


def _table_row(index: SampleIndex, row: SampleRow) -> dict[str, Any]:
    try:
        sample = index.read(row)
    except UserError:  # a rewind deleted it meanwhile
        sample = Sample()
    low, high = row.versions or (None, None)
    return {
        "row": row,
        "prompt": sample.prompt.strip()[-SNIPPET:],
        "completion": sample.completion.strip()[:SNIPPET],
        "reward": "invalid" if row.reward is None else compact(row.reward),
        "advantage": "-" if row.advantage is None else decimal(row.advantage),
        "versions": "-" if low is None else str(low) if low == high else f"{low}-{high}",
        "workers": ", ".join(worker.rpartition("/")[2] for worker in row.workers) or "-",
        "sample": address(row, "sample"),
        "group": address(row, "group"),
    }


def _bars(bins: Bins, query: SampleQuery) -> list[Bar]:
    """The first and the last bar are open, so that no reward is between two bars."""
    top, last = max(bins.first), len(bins.first) - 1
    bars = []
    for at, (low, high) in enumerate(pairwise(bins.edges)):
        ends = {
            "reward_min": low if at else None,
            "reward_max": math.nextafter(high, -math.inf) if at < last else None,
        }
        chosen = (query.reward_min, query.reward_max) == tuple(ends.values())
        bars.append(
            Bar(
                label=compact(bins.values[at]) if bins.values else f"{compact(low)} to {compact(high)}",
                count=percent(bins.first[at]),
                height=bins.first[at] / top,
                chosen=bins.last[at] / top,
                query=query.url(**(dict.fromkeys(ends) if chosen else ends), page=1),
            )
        )
    return bars


def token_figures(sample: Sample) -> list[TokenFigure]:
    """The figures that are known of the completion's tokens."""
    count, generated = len(sample.tokens), [value is not None for value in sample.logprobs]
    pairs = zip(sample.trainer_logprobs, sample.logprobs, strict=False)
    ratios = [None if now is None or then is None else math.exp(min(now - then, 50.0)) for now, then in pairs]
    advantages: Sequence[float | None] = sample.token_advantages
    if not advantages and sample.advantage is not None:
        advantages = [sample.advantage if known else None for known in generated]
    segments = [segment for segment in sample.segments if segment.end <= count]
    workers, versions = [""] * count, [""] * count
    for segment in segments:
        for at in range(segment.start, segment.end):
            workers[at] = f"{segment.worker.rpartition('/')[2]} ({segment.lease})" if segment.lease else segment.worker
            versions[at] = f"v{segment.version}"
    figures = [
        _probabilities(sample.logprobs),
        _measured("ratio", "ratio trainer / rollout", ratios, RATIOS, "d"),
        _measured("entropy", "entropy, nats", sample.entropies, ENTROPIES, "s"),
        _measured("advantage", "advantage", advantages, ADVANTAGES, "d"),
        _named("worker", workers),
        _named("version", versions),
    ]
    return [figure for figure in figures if any(one is not None for one in figure.levels)]


def _probabilities(logprobs: Sequence[float | None]) -> TokenFigure:
    return TokenFigure(
        name="logprob",
        title="logprob when sampled",
        levels=tuple(None if value is None else level(value) for value in logprobs),
        values=tuple(logprobs),
        scale="s",
        legend=tuple(enumerate(LEGEND)),
    )


def _measured(name: str, title: str, values: Sequence[float | None], cuts: Sequence[float], scale: str) -> TokenFigure:
    ends = [f"< {cuts[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(cuts)), f"≥ {cuts[-1]:g}"]
    levels = tuple(None if value is None else bisect_right(cuts, value) for value in values)
    return TokenFigure(
        name=name, title=title, levels=levels, values=tuple(values), scale=scale, legend=tuple(enumerate(ends))
    )


def _named(name: str, names: Sequence[str]) -> TokenFigure:
    numbers = {each: at % COLOURS for at, each in enumerate(dict.fromkeys(filter(None, names)))}
    return TokenFigure(
        name=name,
        title=name,
        levels=tuple(numbers.get(each) for each in names),
        values=tuple(each or None for each in names),
        scale="c",
        legend=tuple((colour, each) for each, colour in numbers.items()),
    )
