"""The samples of a run on the live page: a table with filters, a group side by side, and one sample by token.

Each function returns HTML that samples.js puts into the page. Addresses have the parameters of a `SampleQuery`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlencode

import msgspec

from tidemill.core.errors import UserError
from tidemill.core.formatting import compact, percent
from tidemill.core.records import Record
from tidemill.telemetry.binning import Bins
from tidemill.telemetry.report.pages import HERE, render_page
from tidemill.telemetry.report.sample_cards import LEGEND, level, sample_card
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import TRAINING_PURPOSE
from tidemill.telemetry.sample_files import Sample
from tidemill.telemetry.sample_index import SampleIndex, SampleQuery, SampleRow

TEMPLATE = HERE / "templates" / "sample_pages.html.j2"
ENTROPIES = (0.05, 0.2, 0.5, 1.0, 1.5, 2.5, 4.0)
RATIOS = (0.5, 0.8, 0.95, 0.995, 1.005, 1.05, 1.25, 2.0)
ADVANTAGES = (-2.0, -1.0, -0.5, -0.01, 0.01, 0.5, 1.0, 2.0)
COLOURS = 8
"""Of workers and versions; further ones repeat them, and have a label."""


class TokenFigure(Record):
    """A figure of every token of a completion."""

    title: str
    levels: tuple[int | None, ...]  # colours; None: not known
    values: tuple[float | str | None, ...]
    scale: str  # of colours: s: from low to high, d: around a middle, c: categories
    legend: tuple[tuple[int, str], ...]  # (colour, meaning)


class SampleAddress(Record):
    """Parameters of the page of a sample, or of its group."""

    step: int
    prompt: str
    epoch: int = 0
    index: int = 0
    purpose: str = TRAINING_PURPOSE


def samples_view(data: RunData, index: SampleIndex, view: str, parameters: Mapping[str, str]) -> str:
    """What an address shows: `view` is "samples", "group" or "sample". Raises UserError: there is no such sample."""
    if view == "samples":
        return samples_section(data, index, SampleQuery.of_url(parameters))
    try:
        one = msgspec.convert(parameters, SampleAddress, strict=False)
    except msgspec.ValidationError as error:
        raise UserError(f"not the address of a sample: {error}", hint="open it from the table of samples") from error
    if view == "group":
        return group_section(data, index, one.step, one.prompt, one.epoch, one.purpose)
    return sample_section(data, index, one.step, one.prompt, one.index, one.epoch, one.purpose)


def samples_section(data: RunData, index: SampleIndex, query: SampleQuery | None = None) -> str:
    """The table of samples that match, with filters and a histogram of rewards."""
    query = query or SampleQuery()
    page = index.query(query)
    rows = [(row, _text(index, row), address(row, "sample"), address(row, "group")) for row in page.rows]
    bars = _bars(index.histogram(query), query)
    abandoned = bool(data.run.abandoned())
    return render_page(
        TEMPLATE, view="samples", query=query, page=page, rows=rows, index=index, bars=bars, abandoned=abandoned
    )


def group_section(
    data: RunData, index: SampleIndex, step: int, prompt_id: str, epoch: int = 0, purpose: str = TRAINING_PURPOSE
) -> str:
    """The samples of one prompt side by side. Raises UserError: there are none."""
    rows = index.rows_of(step, prompt_id, epoch, purpose)
    if not rows:
        raise _no_sample(data, step)
    cards = [(sample_card(index.read(row)), address(row, "sample")) for row in rows]
    return render_page(TEMPLATE, view="group", cards=cards, legend=LEGEND)


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
    group = {row.index: row for row in index.rows_of(step, prompt_id, epoch, purpose)}
    if number not in group:
        raise _no_sample(data, step)
    row = group[number]
    sample = index.read(row)
    siblings = [(at, address(each, "sample")) for at, each in group.items()]
    values = {"card": sample_card(sample, whole=True), "row": row, "group": address(row, "group")}
    return render_page(TEMPLATE, view="sample", figures=token_figures(sample), siblings=siblings, **values)


def _no_sample(data: RunData, step: int) -> UserError:
    hint = "a resumed run may have replaced it"
    return UserError(f"no such sample of step {step}", where=str(data.run.samples), hint=hint)


def address(row: SampleRow, view: str) -> str:
    """The parameters of the page of a sample, or of its group."""
    one = SampleAddress(step=row.step, prompt=row.prompt_id, epoch=row.epoch, index=row.index, purpose=row.purpose)
    return urlencode({"view": view, **msgspec.to_builtins(one)})


def _text(index: SampleIndex, row: SampleRow) -> Sample:
    try:
        return index.read(row)
    except UserError:  # a rewind deleted it meanwhile
        return Sample()


def _bars(bins: Bins, query: SampleQuery) -> list[dict[str, Any]]:
    """Label, share, heights relative to the tallest bar, and the query that keeps only its samples. The first and the
    last bar are open, so that no reward is between two bars."""
    bars, top, last = list[dict[str, Any]](), max(bins.first) or 1.0, len(bins.first) - 1
    for at, (low, high) in enumerate(pairwise(bins.edges)):
        least, most = low if at else None, math.nextafter(high, -math.inf) if at < last else None
        if bins.values:
            least = most = bins.values[at]
        if (query.reward_min, query.reward_max) == (least, most):
            least = most = None
        label = compact(bins.values[at]) if bins.values else f"{compact(low)} to {compact(high)}"
        heights = {"height": bins.first[at] / top, "chosen": bins.last[at] / top}
        address = query.url(reward_min=least, reward_max=most, page=1)
        bars.append({"label": label, "share": percent(bins.first[at]), "query": address, **heights})
    return bars


def token_figures(sample: Sample) -> dict[str, TokenFigure]:
    """The figures that are known of the completion's tokens, by name."""
    pairs = list(zip(sample.trainer_logprobs, sample.logprobs, strict=False))
    ratios = [None if now is None or then is None else math.exp(min(now - then, 50.0)) for now, then in pairs]
    advantages: Sequence[float | None] = sample.token_advantages
    if not advantages and sample.advantage is not None:
        advantages = [None if logprob is None else sample.advantage for logprob in sample.logprobs]
    workers = [""] * len(sample.tokens)
    versions = list(workers)
    for part in sample.segments:
        for at in range(part.start, min(part.end, len(workers))):
            workers[at] = f"{part.worker.rpartition('/')[2]} ({part.lease or part.worker})"
            versions[at] = f"v{part.version}"
    figures = {
        "logprob": TokenFigure(
            title="logprob when sampled",
            levels=tuple(None if value is None else level(value) for value in sample.logprobs),
            values=sample.logprobs,
            scale="s",
            legend=tuple(enumerate(LEGEND)),
        ),
        "ratio": _measured("ratio trainer / rollout", ratios, RATIOS, "d"),
        "entropy": _measured("entropy, nats", sample.entropies, ENTROPIES, "s"),
        "advantage": _measured("advantage", advantages, ADVANTAGES, "d"),
        "worker": _named("worker", workers),
        "version": _named("version", versions),
    }
    return {name: one for name, one in figures.items() if any(known is not None for known in one.levels)}


def _measured(title: str, values: Sequence[float | None], cuts: Sequence[float], scale: str) -> TokenFigure:
    ends = [f"< {cuts[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(cuts)), f"≥ {cuts[-1]:g}"]
    levels = tuple(None if value is None else bisect_right(cuts, value) for value in values)
    return TokenFigure(title=title, levels=levels, values=tuple(values), scale=scale, legend=tuple(enumerate(ends)))


def _named(title: str, names: Sequence[str]) -> TokenFigure:
    numbers = {each: at % COLOURS for at, each in enumerate(dict.fromkeys(filter(None, names)))}
    levels, values = tuple(numbers.get(each) for each in names), tuple(each or None for each in names)
    legend = tuple((colour, each) for each, colour in numbers.items())
    return TokenFigure(title=title, levels=levels, values=values, scale="c", legend=legend)
