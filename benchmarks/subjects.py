"""Checks that what a benchmark measures happened; each raises RuntimeError otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from benchmarks.turns import SideResult
from tidemill.telemetry.metrics import MetricLine


def check_counts(what: str, **counts: float) -> None:
    """Every count must be above 0.

    Raises:
        RuntimeError: names those that are not.
    """
    if missing := [name.replace("_", " ") for name, count in counts.items() if not count > 0]:
        raise RuntimeError(f"{what}: no {', no '.join(missing)}, so there is nothing to measure")


def check_equal(what: str, values: Mapping[str, object]) -> None:
    """All sides must have the same value.

    Raises:
        RuntimeError: with the values by side.
    """
    first = next(iter(values.values()))
    if any(value != first for value in values.values()):
        raise RuntimeError(f"the sides have different {what}: {dict(values)}")


def check_different(what: str, values: Mapping[str, object]) -> None:
    """No two cases may have the same value.

    Raises:
        RuntimeError: names two that have.
    """
    for (first, one), (second, other) in combinations(values.items(), 2):
        if one == other:
            raise RuntimeError(f"{first} and {second} have the same {what}")


def check_signal(side: str, result: SideResult, *, most: int = 0) -> None:
    """In every turn at most `most` groups may be without signal: they cost less, as nothing is learned from them.

    Raises:
        RuntimeError: a turn has more of them.
    """
    without = max(turn.notes["groups_without_signal"] for turn in result.turns)
    if without > most:
        raise RuntimeError(f"{side}: {without:g} groups of a step have no signal, allowed are {most}")


def check_models(run: str, lines: Sequence[MetricLine], *, reference: bool, critic: bool = False) -> None:
    """A run must have trained on tokens, and computed with a reference model or a critic if it is to have one.

    Raises:
        RuntimeError: otherwise.
    """
    check_counts(run, trained_tokens=sum(line.values.get("tokens_trained", 0.0) for line in lines))
    metrics = {name for line in lines for name in line.values}
    for model, metric, wanted in (("reference", "kl_ref", reference), ("critic", "value_loss", critic)):
        if (metric in metrics) != wanted:
            raise RuntimeError(f"{run}: trained {'without' if wanted else 'with'} a {model}")
