"""Samples in the report: cards with coloured tokens, prompts before and after training, tables of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from tidemill.core.formatting import compact, counted, decimal, interval, percent
from tidemill.core.records import Call, Record
from tidemill.telemetry.metrics import BUDGETS, HELD_OUT_NAME
from tidemill.telemetry.report.readable_text import MARK, PromptView, prompt_view, shared_start
from tidemill.telemetry.run_dir import TRAINING_PURPOSE, RunDirectory
from tidemill.telemetry.sample_files import Sample, SampleSegment, SampleTurn, read_samples

WINDOW_STEPS = 3


class SampleWindow(Record):
    """Samples of consecutive steps."""

    steps: tuple[int, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def title(self) -> str:
        """`steps 1-3`; empty for no steps."""
        if not self.steps:
            return ""
        low, high = self.steps[0], self.steps[-1]
        return f"steps {low}-{high}" if high > low else f"step {low}"


class ReportSamples(Record):
    """The samples on the page. The windows do not overlap; `last` and `evaluated_last` may be empty."""

    first: SampleWindow  # training samples of the first and the last steps
    last: SampleWindow
    evaluated_first: SampleWindow  # held-out samples of the first and the last evaluation
    evaluated_last: SampleWindow
    abandoned: SampleWindow  # the last steps that a rollback took back


def report_samples(run: RunDirectory) -> ReportSamples:
    def window(files: Sequence[tuple[int, str, Any]]) -> SampleWindow:
        samples = tuple(sample for _, _, path in files for sample in read_samples(path))
        return SampleWindow(steps=tuple(step for step, _, _ in files), samples=samples)

    files = run.sample_files()
    training = [file for file in files if file[1] == TRAINING_PURPOSE]
    abandoned = [file for life in run.abandoned() for file in life.sample_files() if file[1] == TRAINING_PURPOSE]
    held_out = [file for file in files if file[1] == f"eval-{HELD_OUT_NAME}"]
    size = min(WINDOW_STEPS, max(1, len(training) // 2))
    return ReportSamples(
        first=window(training[:size]),
        last=window(training[-size:] if len(training) > 1 else []),
        evaluated_first=window(held_out[:1]),
        evaluated_last=window(held_out[-1:] if len(held_out) > 1 else []),
        abandoned=window(abandoned[-size:]),
    )


CARDS = 4
PAIRS_SHOWN = 10
TOKENS_SHOWN = 800
PROBABILITY_STEPS = (0.95, 0.8, 0.5, 0.2, 0.05)
LEGEND = ("≥ 95 %", "80-95 %", "50-80 %", "20-50 %", "5-20 %", "< 5 %")


class Token(Record):
    text: str
    level: int | None  # index into LEGEND; None for tokens the model did not generate
    title: str
    mark: bool = False  # part of a marker of thinking or calls, or of a special token
    at: int | None = None  # position in the completion


class TokenPart(Record):
    """Tokens that one worker generated with one version."""

    author: str  # "spot-3 v4"; empty if it is not known
    title: str
    tokens: tuple[Token, ...]


class TurnCard(Record):
    """A turn as the page shows it."""

    parts: tuple[TokenPart, ...]
    left_out: int  # tokens not shown
    remark: str
    calls: tuple[Call, ...]
    observation: str
    reward: str  # empty if no turn of the episode has one


ENDED_BY: dict[str, str] = {
    **BUDGETS,
    "done": "its environment",
    "failure": "a failure: the agent broke its environment",
    "fault": "a fault of its environment",
}
"""What ended an episode, by `EpisodeEnd`."""


class SampleCard(Record):
    """A sample as the page shows it."""

    sample: Sample
    prompt: PromptView
    tokens: tuple[Token, ...]
    left_out: int  # tokens not shown
    reward: str
    components: str
    finish: str
    logprob: str
    turns: tuple[TurnCard, ...]  # together about `TOKENS_SHOWN` tokens are shown
    whole: bool = False  # all tokens are shown, with their positions

    @property
    def parts(self) -> tuple[TokenPart, ...]:
        """The tokens by worker and version."""
        segments = self.sample.segments
        if not segments or any(token.at is None for token in self.tokens):
            return (TokenPart(author=", ".join(each.name for each in segments), title="", tokens=self.tokens),)
        own = (
            (each, tuple(token for token in self.tokens if each.start <= (token.at or 0) < each.end))
            for each in segments
        )
        return tuple(TokenPart(author=each.name, title=each.worker, tokens=tokens) for each, tokens in own if tokens)


class Verdict(Record):
    """What a completion earned: correct or wrong where the reward tells it, otherwise its place on the scale of the
    table."""

    kind: Literal["correct", "wrong", "scored", "invalid"]
    reward: str
    share: float | None = None  # % of the scale, of "scored"; None if all rewards of the table are equal


class Pair(Record):
    """One prompt with two completions: before and after training, or of two models."""

    prompt: PromptView
    before: Sample
    before_verdict: Verdict
    after: Sample
    after_verdict: Verdict


class PairTable(Record):
    """Prompts with two completions each."""

    pairs: tuple[Pair, ...] = ()
    shared: PromptView | None = None  # what all prompts start with
    remark: str = ""
    lowest: str = ""  # ends of the scale of rewards; empty if no verdict has a place on it
    highest: str = ""

    @property
    def kinds(self) -> set[str]:
        """Of all verdicts, for the legend."""
        return {verdict.kind for pair in self.pairs for verdict in (pair.before_verdict, pair.after_verdict)}


def _pair_table(both: Sequence[tuple[Sample, Sample]], remark: str = "") -> PairTable:
    """The first pairs."""
    shown = both[:PAIRS_SHOWN]
    all_views = [prompt_view(after.prompt, after.messages) for _, after in both]
    shared, views = shared_start(all_views)
    rewards = [one.reward for two in shown for one in two if one.reward is not None and one.valid]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    pairs = tuple(
        Pair(
            prompt=view,
            before=before,
            before_verdict=verdict(before, low, high),
            after=after,
            after_verdict=verdict(after, low, high),
        )
        for view, (before, after) in zip(views, shown, strict=False)
    )
    scaled = any(one.share is not None for pair in pairs for one in (pair.before_verdict, pair.after_verdict))
    ends = (compact(low), compact(high)) if scaled else ("", "")
    return PairTable(pairs=pairs, shared=shared, remark=remark, lowest=ends[0], highest=ends[1])


def verdict(sample: Sample, low: float, high: float) -> Verdict:
    """The verdict on a sample.

    Args:
        low: the lowest reward of the table.
        high: the highest.
    """
    if sample.reward is None or not sample.valid:
        return Verdict(kind="invalid", reward="no valid reward")
    reward = compact(sample.reward)
    if sample.correct is not None:
        return Verdict(kind="correct" if sample.correct else "wrong", reward=reward)
    share = 100 * (sample.reward - low) / (high - low) if high > low else None
    return Verdict(kind="scored", reward=reward, share=share)


def level(logprob: float) -> int:
    """0 for the most probable tokens, up to len(PROBABILITY_STEPS) for the least probable."""
    probability = math.exp(min(0.0, logprob))
    return next((index for index, step in enumerate(PROBABILITY_STEPS) if probability >= step), len(PROBABILITY_STEPS))


def colour(sample: Sample) -> tuple[Token, ...]:
    """The completion as coloured tokens; as one piece if its tokens are unknown."""
    if not _tokens_known(sample, 0, len(sample.tokens), sample.completion):
        return (Token(text=sample.completion, level=None, title=""),)
    return _coloured(sample, 0, len(sample.tokens))


def _tokens_known(sample: Sample, start: int, end: int, text: str) -> bool:
    """Whether the tokens [start, end) of the completion are known, and are those of the text."""
    return len(sample.tokens) >= end > start and "".join(sample.tokens[start:end]).strip() == text.strip()


def _coloured(sample: Sample, start: int, end: int) -> tuple[Token, ...]:
    logprobs = [*sample.logprobs, *[None] * (len(sample.tokens) - len(sample.logprobs))]
    texts = sample.tokens[start:end]
    marks = [found.span() for found in MARK.finditer("".join(texts))]
    found, position = list[Token](), 0
    for at, (text, logprob) in enumerate(zip(texts, logprobs[start:end], strict=True), start):
        first, position = position, position + len(text)
        mark = bool(text) and any(low <= first and position <= high for low, high in marks)
        if text or logprob is not None:
            found.append(_token(text, logprob, at, mark=mark))
    return tuple(found)


def _token(text: str, logprob: float | None, at: int, *, mark: bool) -> Token:
    visible = text.replace("\n", "↵\n") if text else "∎"  # an end token has no text
    if logprob is None:
        return Token(text=visible, level=None, title="", mark=mark, at=at)
    title = f"{text!r}  p {percent(math.exp(min(0.0, logprob)))}, logprob {decimal(logprob)}"
    return Token(text=visible, level=level(logprob), title=title, mark=mark, at=at)


def sample_card(sample: Sample, *, whole: bool = False) -> SampleCard:
    """The card of a sample, with all its tokens if it is shown as a whole."""
    tokens, shown = colour(sample), len(sample.tokens) if whole else TOKENS_SHOWN
    most = shown if whole else shown // max(1, len(sample.turns))
    rewarded = any(turn.reward for turn in sample.turns)
    return SampleCard(
        sample=sample,
        prompt=prompt_view(sample.prompt, sample.messages),
        tokens=tokens[: shown or 1],
        left_out=max(0, len(tokens) - (shown or 1)),
        reward="-" if sample.reward is None else compact(sample.reward),
        components=", ".join(f"{name} {compact(value)}" for name, value in sample.components.items()),
        finish=ENDED_BY.get(sample.episode_end, sample.finish),
        logprob=decimal(_mean_logprob(sample)),
        turns=tuple(_turn_card(sample, turn, most, rewarded=rewarded) for turn in sample.turns),
        whole=whole,
    )


def _turn_card(sample: Sample, turn: SampleTurn, most: int, *, rewarded: bool) -> TurnCard:
    end, parts = min(turn.end, turn.start + most), list[TokenPart]()
    if _tokens_known(sample, turn.start, turn.end, turn.text):
        for segment in turn.segments or (SampleSegment(start=turn.start, end=turn.end),):
            tokens = _coloured(sample, segment.start, min(segment.end, end))
            parts.append(TokenPart(author=segment.name, title=segment.worker, tokens=tokens))
    else:
        end, token = turn.end, Token(text=turn.text, level=None, title="")
        parts.append(TokenPart(author=turn.workers, title="", tokens=(token,)))
    remarks = ["cut at its token limit"] if turn.finish == "length" else []
    remarks += [counted(turn.timeouts, "timeout")] if turn.timeouts else []
    return TurnCard(
        parts=tuple(part for part in parts if part.tokens),
        left_out=turn.end - end,
        remark=", ".join(remarks),
        calls=turn.calls,
        observation="" if turn.calls else turn.observation,
        reward=compact(turn.reward) if rewarded else "",
    )


def _mean_logprob(sample: Sample) -> float:
    """Of the generated tokens; -inf if there is none."""
    generated = [value for value in sample.logprobs if value is not None]
    return fmean(generated) if generated else -math.inf


def best_and_worst(window: SampleWindow) -> tuple[list[SampleCard], list[SampleCard]]:
    """Cards of the highest and of the lowest rewards, one per prompt.

    Among equal rewards the most confident samples come first. The worst start with an invalid sample, if there is one,
    and exclude samples with the highest reward.
    """
    scored = [(sample.reward, sample) for sample in window.samples if sample.valid and sample.reward is not None]
    highest = max((reward for reward, _ in scored), default=0.0)
    best = [sample for _, sample in sorted(scored, key=lambda pair: (-pair[0], -_mean_logprob(pair[1])))]
    worst = [
        sample
        for reward, sample in sorted(scored, key=lambda pair: (pair[0], -_mean_logprob(pair[1])))
        if reward < highest
    ]
    invalid = [sample for sample in window.samples if not sample.valid][:1]
    return (
        [sample_card(sample) for sample in _one_per_prompt(best)[:CARDS]],
        [sample_card(sample) for sample in [*invalid, *_one_per_prompt(worst)][:CARDS]],
    )


def _one_per_prompt(samples: Iterable[Sample]) -> list[Sample]:
    seen: dict[str, Sample] = {}
    for sample in samples:
        seen.setdefault(sample.prompt_id or sample.prompt, sample)
    return list(seen.values())


def before_and_after(first: SampleWindow, last: SampleWindow) -> PairTable:
    """Held-out prompts of the first and the last evaluation, those with a changed reward first. The remark says how
    many gained reward and how many lost it."""
    earlier = {sample.prompt_id: sample for sample in first.samples}
    both = [(earlier[now.prompt_id], now) for now in last.samples if now.prompt_id in earlier]
    changes = [(now.reward or 0.0) - (before.reward or 0.0) for before, now in both]
    gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    ordered = sorted(both, key=lambda two: two[0].reward == two[1].reward)
    return _pair_table(ordered, f"{gained} of {len(both)} gained reward, {lost} lost")


# Tables of `tidemill eval`. `found` is its summary.json, as jobs/model_evaluation.py writes it.

DISTINCT = "distinct_"
GREEDY = "greedy"
MEAN_REWARD = "mean reward"


class EvaluationRow(Record):
    """A row of the table of figures."""

    of: str  # which completions
    name: str
    value: str
    interval: str = ""  # 95 %


def headline_figures(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(figure, which completions, value with its interval): accuracy, else the mean reward; then pass@k by k."""
    for name, key in (("accuracy", "greedy_accuracy"), (MEAN_REWARD, "reward_mean")):
        if found.get(key) is not None:
            yield name, GREEDY, _interval(found, key)
            break
    for k, share in found.get("drawn", {}).get("pass_at", {}).items():
        yield f"pass@{k}", _drawn_title(found), share


def evaluation_rows(found: dict[str, Any]) -> list[EvaluationRow]:
    """All figures of the evaluated model, those of greedy completions first."""
    rows = [_with_interval(of, name, figure) for name, of, figure in headline_figures(found)]
    if found.get("greedy_accuracy") is not None and found.get("reward_mean") is not None:
        rows.insert(1, _with_interval(GREEDY, MEAN_REWARD, _interval(found, "reward_mean")))
    for name, score in found.get("scores", {}).items():
        rows.append(_with_interval(GREEDY, f"score of {name}", score))
    rows += _completion_rows(GREEDY, found)
    if "drawn" in found:
        if reward := found["drawn"].get("reward_mean"):
            rows.append(_with_interval(_drawn_title(found), MEAN_REWARD, reward))
        rows += _completion_rows(_drawn_title(found), found["drawn"])
    rows.sort(key=lambda row: row.of != GREEDY)
    for name, of_set in found.get("sets", {}).items():
        rows += [replace(row, of=f"{name}, {row.of}") for row in evaluation_rows(of_set)]
    return rows


def answer_pairs(found: dict[str, Any]) -> PairTable:
    """Some prompts with the completions of this model and of the other, if there is one.

    Prompts whose rewards differ come first, then those with low rewards.
    """
    samples = _evaluated(found)
    others = _evaluated(found.get("compared_with", {})) or samples
    both = sorted(
        zip(others, samples, strict=True), key=lambda two: (two[0].reward == two[1].reward, two[1].reward or 0.0)
    )
    return _pair_table(both)


def _evaluated(found: dict[str, Any]) -> list[Sample]:
    lines = found.get("samples", [])
    return msgspec.convert([{"valid": line["reward"] is not None, **line} for line in lines], list[Sample])


def _interval(found: dict[str, Any], name: str) -> dict[str, Any]:
    low, high = found.get(f"{name}_interval") or (None, None)
    return {"value": found[name], "low": low, "high": high}


def _drawn_title(found: dict[str, Any]) -> str:
    return f"{found['drawn']['samples_per_prompt']} per prompt"


def _with_interval(of: str, name: str, share: dict[str, Any]) -> EvaluationRow:
    ends = (share["low"], share["high"])
    return EvaluationRow(of=of, name=name, value=decimal(share["value"]), interval=interval(ends))


def _completion_rows(of: str, found: dict[str, Any]) -> Iterator[EvaluationRow]:
    """Lengths, truncated and invalid completions, and diversity."""
    lengths = ", ".join(f"{name} {decimal(value)}" for name, value in found["completion_tokens"].items())
    yield EvaluationRow(of=of, name="completion tokens", value=lengths)
    yield EvaluationRow(of=of, name="truncated", value=decimal(found["truncated_fraction"]))
    yield EvaluationRow(of=of, name="without a valid reward", value=str(found["invalid"]))
    for name, value in found.items():
        if name.startswith(DISTINCT):
            yield EvaluationRow(of=of, name=name.replace("_", "-", 1).replace("_", " "), value=decimal(value))
