"""Which samples the page shows, and how their tokens are coloured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from tidemill.core.records import Record
from tidemill.telemetry.numerals import compact, decimal, percent
from tidemill.telemetry.report.story import SampleWindow, Story
from tidemill.telemetry.samples import Sample

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


def pairs(story: Story) -> tuple[list[Pair], str]:
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
