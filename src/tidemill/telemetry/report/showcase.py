"""Samples and histograms of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean

from tidemill.core.formatting import compact, decimal, percent
from tidemill.core.records import Record
from tidemill.telemetry.report.run_data import RunData, SampleWindow
from tidemill.telemetry.sample_files import Sample

SHOWN = 4
PAIRS_SHOWN = 10
PROMPT_CHARACTERS = 600
TOKENS_SHOWN = 800
PROBABILITY_STEPS = (0.95, 0.8, 0.5, 0.2, 0.05)
LEGEND = ("≥ 95 %", "80-95 %", "50-80 %", "20-50 %", "5-20 %", "< 5 %")


class Token(Record):
    text: str
    level: int | None  # index into LEGEND; None where the model did not make the token
    title: str


class Shown(Record):
    """A sample as the page has it."""

    step: int
    prompt: str
    answer: str
    tokens: tuple[Token, ...]
    left_out: int  # tokens not shown
    reward: str
    components: str
    valid: bool
    reason: str
    finish: str
    length: int
    logprob: str


class Pair(Record):
    """One held-out prompt, before and after."""

    prompt: str
    answer: str
    before: str
    before_reward: float | None
    after: str
    after_reward: float | None


def level(logprob: float) -> int:
    """0 for the surest tokens, up to len(PROBABILITY_STEPS) for the least expected."""
    probability = math.exp(min(0.0, logprob))
    return next((index for index, step in enumerate(PROBABILITY_STEPS) if probability >= step), len(PROBABILITY_STEPS))


def colour(sample: Sample) -> tuple[Token, ...]:
    """The completion cut into coloured tokens; in one piece when its tokens are not known."""
    if not sample.tokens or "".join(sample.tokens).strip() != sample.completion.strip():
        return (Token(text=sample.completion, level=None, title=""),)
    logprobs = [*sample.logprobs, *[None] * (len(sample.tokens) - len(sample.logprobs))]
    return tuple(
        Token(text=_visible(text), level=None if logprob is None else level(logprob), title=_title(text, logprob))
        for text, logprob in zip(sample.tokens, logprobs, strict=False)
        if text or logprob is not None
    )


def _visible(text: str) -> str:
    """Line breaks are shown as well as made; a token without a text of its own (an end mark) gets a sign."""
    return text.replace("\n", "↵\n") if text else "∎"


def _title(text: str, logprob: float | None) -> str:
    if logprob is None:
        return ""
    return f"{text!r}  p {percent(math.exp(min(0.0, logprob)))}, logprob {decimal(logprob)}"


def shown(sample: Sample) -> Shown:
    tokens = colour(sample)
    made = [value for value in sample.logprobs if value is not None]
    return Shown(
        step=sample.step,
        prompt=shorten(sample.prompt),
        answer=sample.answer,
        tokens=tokens[:TOKENS_SHOWN],
        left_out=max(0, len(tokens) - TOKENS_SHOWN),
        reward="-" if sample.reward is None else compact(sample.reward),
        components=", ".join(f"{name} {compact(value)}" for name, value in sample.components.items()),
        valid=sample.valid,
        reason=sample.reason,
        finish=sample.finish,
        length=sample.length,
        logprob=decimal(fmean(made)) if made else "-",
    )


def shorten(text: str) -> str:
    """The end of a long prompt: the question usually stands there."""
    return text if len(text) <= PROMPT_CHARACTERS else "… " + text[-PROMPT_CHARACTERS:]


def best_and_worst(window: SampleWindow) -> tuple[list[Shown], list[Shown]]:
    """The highest and the lowest rewards, each prompt once.

    Among equal rewards the worst are those the model was surest of: confident mistakes tell most. A sample is never
    both; invalid ones come first among the worst.
    """
    scored = [(sample.reward, sample) for sample in window.samples if sample.valid and sample.reward is not None]
    highest = max((reward for reward, _ in scored), default=0.0)
    ranked = sorted(scored, key=lambda pair: (pair[0], -_surety(pair[1])))
    best = _one_per_prompt(sample for _, sample in sorted(scored, key=lambda pair: (-pair[0], -_surety(pair[1]))))
    invalid = [sample for sample in window.samples if not sample.valid]
    lowest = [sample for reward, sample in ranked if reward < highest]
    worst = [*_one_per_prompt(invalid)[:1], *_one_per_prompt(lowest)]
    return [shown(sample) for sample in best[:SHOWN]], [shown(sample) for sample in worst[:SHOWN]]


def _surety(sample: Sample) -> float:
    made = [value for value in sample.logprobs if value is not None]
    return fmean(made) if made else -math.inf


def _one_per_prompt(samples: Iterable[Sample]) -> list[Sample]:
    seen: dict[str, Sample] = {}
    for sample in samples:
        seen.setdefault(sample.prompt_id or sample.prompt, sample)
    return list(seen.values())


def pairs(story: RunData) -> tuple[list[Pair], str]:
    """Held-out prompts of the first and the last evaluation side by side, those whose reward changed first.

    Returns:
        Some of the pairs, and how many of all gained and lost reward in words.
    """
    earlier = {sample.prompt_id: sample for sample in story.evaluated_first.samples}
    both = [(earlier[now.prompt_id], now) for now in story.evaluated_last.samples if now.prompt_id in earlier]
    changes = [(now.reward or 0.0) - (before.reward or 0.0) for before, now in both]
    gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    ordered = sorted(both, key=lambda two: two[0].reward == two[1].reward)
    lead = common_lines([now.prompt for _, now in ordered])
    chosen = [
        Pair(
            prompt=shorten(now.prompt[lead:]),
            answer=now.answer,
            before=before.completion,
            before_reward=before.reward,
            after=now.completion,
            after_reward=now.reward,
        )
        for before, now in ordered[:PAIRS_SHOWN]
    ]
    return chosen, f"{gained} of {len(both)} gained reward, {lost} lost"


def common_lines(prompts: Sequence[str]) -> int:
    """Characters of whole lines that all prompts begin with (worked examples), so that a table can leave them out."""
    if len(set(prompts)) < 2:
        return 0
    low, high = min(prompts), max(prompts)
    same = next((index for index, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))
    return low[:same].rfind("\n") + 1


BINS = 24
CATEGORIES = 12
LOGPROB_FLOOR = -8.0
WIDTH, HEIGHT, MARGIN = 360.0, 132.0, 20.0


class Bins(Record):
    """Shares of values between neighbouring edges; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    values: tuple[float, ...] = ()  # the value each bin is for, where each value has its own


class Bar(Record):
    x: float
    width: float
    first_y: float
    first_height: float
    last_y: float
    last_height: float
    title: str


class Tick(Record):
    x: float
    label: str


class Histogram(Record):
    title: str
    note: str
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]


def histograms(first: SampleWindow, last: SampleWindow) -> list[Histogram]:
    """Completion length, reward and logprob; those without any value are left out."""
    found = []
    if first.samples or last.samples:
        found.append(_layout("Completion length", "tokens", make_bins(_lengths(first), _lengths(last))))
    early, late = _rewards(first), _rewards(last)
    if early or late:
        found.append(_layout("Reward", "valid samples", make_bins(early, late)))
    early, late = _logprobs(first), _logprobs(last)
    if early or late:
        note = f"nats, {LOGPROB_FLOOR:g} and below together"
        found.append(_layout("Token logprob", note, make_bins(early, late, span=(LOGPROB_FLOOR, 0.0))))
    return found


def _lengths(window: SampleWindow) -> list[float]:
    return [float(sample.length) for sample in window.samples]


def _rewards(window: SampleWindow) -> list[float]:
    return [sample.reward for sample in window.samples if sample.valid and sample.reward is not None]


def _logprobs(window: SampleWindow) -> list[float]:
    return [max(LOGPROB_FLOOR, value) for sample in window.samples for value in sample.logprobs if value is not None]


def make_bins(first: Sequence[float], last: Sequence[float], span: tuple[float, float] | None = None) -> Bins:
    """Common bins for both: one per value when there are few values, equal widths (over `span` if given) otherwise."""
    values = [value for value in (*first, *last) if math.isfinite(value)]
    distinct = sorted(set(values))
    low, high = (distinct[0], distinct[-1]) if distinct else (0.0, 0.0)
    whole = all(value == int(value) for value in distinct)
    discrete = span is None and (high - low < BINS if whole else len(distinct) <= CATEGORIES)
    low, high, whole = (*span, False) if span else (low, high, whole)
    if discrete and whole:
        distinct = [low + index for index in range(int(high - low) + 1)]
    if discrete:
        middles = [(one + other) / 2 for one, other in pairwise(distinct)]
        edges = [low - 0.5, *middles, high + 0.5]
    else:
        width = math.ceil((high - low + 1) / BINS) if whole else (high - low) / BINS
        edges = [low + index * width for index in range(BINS + 1)]
    return Bins(
        edges=tuple(edges),
        first=_shares(first, edges),
        last=_shares(last, edges),
        values=tuple(distinct) if discrete else (),
    )


def _shares(values: Sequence[float], edges: Sequence[float]) -> tuple[float, ...]:
    counts = [0] * (len(edges) - 1)
    finite = [value for value in values if math.isfinite(value)]
    for value in finite:
        position = next((index for index in range(1, len(edges)) if value < edges[index]), len(counts))
        counts[position - 1] += 1
    return tuple(count / len(finite) if finite else 0.0 for count in counts)


def _layout(title: str, note: str, bins: Bins) -> Histogram:
    count = len(bins.first)
    slot = WIDTH / count
    floor = HEIGHT - MARGIN
    top = max((*bins.first, *bins.last), default=0.0) or 1.0

    def height(share: float) -> float:
        return round(share / top * (floor - 4), 2)

    bars = []
    for index, (one, other) in enumerate(zip(bins.first, bins.last, strict=True)):
        label = _bin_label(bins, index)
        bars.append(
            Bar(
                x=round(index * slot, 2),
                width=round(slot, 2),
                first_y=round(floor - height(one), 2),
                first_height=height(one),
                last_y=round(floor - height(other), 2),
                last_height=height(other),
                title=f"{label}: first {100 * one:.1f} %, last {100 * other:.1f} %",
            )
        )
    return Histogram(title=title, note=note, bars=tuple(bars), ticks=tuple(_ticks(bins, slot)))


def _bin_label(bins: Bins, index: int) -> str:
    low, high = bins.edges[index], bins.edges[index + 1]
    return compact(bins.values[index]) if bins.values else f"{compact(low)} to {compact(high)}"


def _ticks(bins: Bins, slot: float) -> list[Tick]:
    count = len(bins.first)
    every = max(1, math.ceil(count / 8))
    if bins.values:
        return [
            Tick(x=round((index + 0.5) * slot, 2), label=_bin_label(bins, index)) for index in range(0, count, every)
        ]
    return [Tick(x=round(index * slot, 2), label=compact(bins.edges[index])) for index in range(0, count + 1, every)]
