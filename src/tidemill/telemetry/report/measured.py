"""What the page of an evaluation shows in place of a run's curves: one model's figures, and two side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.core.records import Record
from tidemill.telemetry.numerals import between, decimal
from tidemill.telemetry.report.showcase import PAIRS_SHOWN, Pair, common_lines, shorten

DISTINCT = "distinct_"
GREEDY = "greedy"
REWARD = "mean reward"


class Figure(Record):
    """A row of the table of figures."""

    of: str  # which completions
    name: str
    value: str
    interval: str = ""  # of 95 %


class Compared(Record):
    """A row of the table of two models on the same prompts."""

    name: str
    n: int
    other: str
    this: str
    difference: str
    interval: str
    higher: int
    lower: int
    p_value: str


def headline_figures(found: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(figure, of which completions, value with its interval): accuracy or, where there is none, the mean reward; then
    pass@k by k."""
    for name, key in (("accuracy", "greedy_accuracy"), (REWARD, "reward_mean")):
        if found.get(key) is not None:
            yield name, GREEDY, _interval(found, key)
            break
    for k, share in found.get("drawn", {}).get("pass_at", {}).items():
        yield f"pass@{k}", _drawn_words(found), share


def figures(found: dict[str, Any]) -> list[Figure]:
    """Everything measured of the one model."""
    rows = [_with_interval(of, name, figure) for name, of, figure in headline_figures(found)]
    if found.get("greedy_accuracy") is not None and found.get("reward_mean") is not None:
        rows.insert(1, _with_interval(GREEDY, REWARD, _interval(found, "reward_mean")))
    for name, score in found.get("scores", {}).items():
        rows.append(_with_interval(GREEDY, f"score of {name}", score))
    rows += _plain(GREEDY, found)
    if "drawn" in found:
        if reward := found["drawn"].get("reward_mean"):
            rows.append(_with_interval(_drawn_words(found), REWARD, reward))
        rows += _plain(_drawn_words(found), found["drawn"])
    return sorted(rows, key=lambda row: row.of != GREEDY)


def compared(found: dict[str, Any]) -> list[Compared]:
    """This model against the other; empty where there is none."""
    return [
        Compared(
            name=name.replace("_", " "),
            n=pair["n"],
            other=decimal(pair["other"]),
            this=decimal(pair["this"]),
            difference=decimal(pair["difference"]["value"]),
            interval=between(pair["difference"]["low"], pair["difference"]["high"]),
            higher=pair["higher"],
            lower=pair["lower"],
            p_value=decimal(pair["p_value"]),
        )
        for name, pair in found.get("compared_with", {}).get("figures", {}).items()
    ]


def answers(found: dict[str, Any]) -> list[Pair]:
    """Some prompts with what this model and, where there is one, the other answered: those whose rewards differ first,
    then low rewards."""
    samples = found.get("samples", [])
    others = found.get("compared_with", {}).get("samples") or samples
    both = sorted(
        zip(others, samples, strict=True),
        key=lambda two: (two[0]["reward"] == two[1]["reward"], two[1]["reward"] or 0.0),
    )
    lead = common_lines([sample["prompt"] for sample in samples])
    return [
        Pair(
            prompt=shorten(this["prompt"][lead:]),
            answer=this["answer"],
            before=other["completion"],
            before_reward=other["reward"],
            after=this["completion"],
            after_reward=this["reward"],
        )
        for other, this in both[:PAIRS_SHOWN]
    ]


def _interval(found: dict[str, Any], name: str) -> dict[str, float]:
    low, high = found[f"{name}_interval"]
    return {"value": found[name], "low": low, "high": high}


def _drawn_words(found: dict[str, Any]) -> str:
    return f"{found['drawn']['samples_per_prompt']} a prompt"


def _with_interval(of: str, name: str, share: dict[str, float]) -> Figure:
    return Figure(of=of, name=name, value=decimal(share["value"]), interval=between(share["low"], share["high"]))


def _plain(of: str, found: dict[str, Any]) -> Iterator[Figure]:
    """Lengths, cut and invalid completions, and diversity."""
    lengths = ", ".join(f"{name} {decimal(value)}" for name, value in found["completion_tokens"].items())
    yield Figure(of=of, name="tokens of a completion", value=lengths)
    yield Figure(of=of, name="cut by the limit", value=decimal(found["truncated_fraction"]))
    yield Figure(of=of, name="without a valid reward", value=str(found["invalid"]))
    for name, value in found.items():
        if name.startswith(DISTINCT):
            yield Figure(of=of, name=name.replace("_", "-", 1).replace("_", " "), value=decimal(value))
