"""The figures of README and docs that come from result files.

    python -m benchmarks.figures [--check]

A figure stands between two comments, the first of which says what it is:

    <!--= fixed(case(grpo_step, "SmolLM2-135M fp32").speedup, 1) -->6.0<!--/-->

Names are those of the files in benchmarks/results. Without --check the figures are written anew from these files; with
it the command fails if one differs. Expressions are Jinja's, without its `|`, which would end a cell of a table. A
figure at the start of a line would end the paragraph.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import partial, reduce
from math import ceil, sqrt
from operator import getitem
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import jinja2

from benchmarks.measuring import RESULTS
from benchmarks.origin import ROOT

FIGURE = re.compile(r"(<!--= (?P<expression>.*?) -->)(?P<text>[^\n]*?)(<!--/-->)")


def row(rows: Iterable[Any], **equal: Any) -> Any:
    """The first of some records with the given values. Raises KeyError."""
    return _matching(rows, equal)[0]


def case(result: Mapping[str, Any], name: str) -> Any:
    """A case of a comparison by its name. Raises KeyError."""
    return row(result["cases"], case=name)


def values(rows: Iterable[Any], path: str, **equal: Any) -> list[Any]:
    """A value of each record that has the given values; lists are joined. `path` leads to it: "pairs.accuracy".

    Raises:
        KeyError: no record has these values, or one lacks the path.
    """
    found = [reduce(getitem, path.split("."), each) for each in _matching(rows, equal)]
    return [value for each in found for value in (each if isinstance(each, list) else [each])]


def _matching(rows: Iterable[Any], equal: Mapping[str, Any]) -> list[Any]:
    if found := [each for each in rows if all(each[name] == value for name, value in equal.items())]:
        return found
    raise KeyError(f"there is no record with {equal}")


def fixed(value: float | Decimal, digits: int) -> str:
    """Rounds the decimal number as written, halves up: 0.205 is 0.21. Negative digits round to tens and hundreds; what
    rounds to 0 has no sign."""
    rounded = Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{rounded + 0:,f}".replace("-", "−")


def percent(share: float, digits: int = 0) -> str:
    return f"{fixed(Decimal(str(share)).scaleb(2), digits)} %"


def percents(shares: Iterable[float], digits: int = 0) -> str:
    return ", ".join(percent(share, digits) for share in shares)


def signed_percents(shares: Iterable[float], digits: int = 0) -> str:
    """Positive ones with a plus; what rounds to 0 has none."""
    texts = [percent(share, digits) for share in shares]
    return ", ".join(f"+{text}" if text[0] != "−" and text.strip("0. %") else text for text in texts)


def power(value: float) -> str:
    """With two digits and a power of ten."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def span(values: Iterable[float], digits: int) -> str:
    """The smallest and the largest."""
    ordered = sorted(values)
    return f"{fixed(ordered[0], digits)}-{fixed(ordered[-1], digits)}"


def shown(values: Iterable[float | None], digits: int) -> str:
    """All of them, in their order; None is "not reached"."""
    return ", ".join("not reached" if value is None else fixed(value, digits) for value in values)


def outcome(reached: bool) -> str:
    """Whether an aim was reached, in a word."""
    return "reached" if reached else "**missed**"


def means(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Of the list that each record has under a name."""
    return [fmean(each[name]) for each in rows]


def standard_error(values: Sequence[float]) -> float:
    return float(stdev(values) / sqrt(len(values)))


def forecast_errors(case: Mapping[str, Any], name: str) -> list[float]:
    """Relative errors of the rounds' forecasts of "step_s" or "total_s", against the mean of the runs."""
    mean = fmean(case["actual"][name])
    return [float(each / mean - 1) for each in case["forecast"][name]]


def forecast_error(case: Mapping[str, Any]) -> float:
    """The largest of any round, of steps or totals."""
    return max(abs(error) for name in case["forecast"] for error in forecast_errors(case, name))


def deviation(case: Mapping[str, Any]) -> float:
    """The relative standard deviation of the runs that were forecast, of steps or totals: the larger."""
    return max(float(stdev(seconds) / fmean(seconds)) for seconds in case["actual"].values())


FUNCTIONS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(row, case, values),
        *(fixed, percent, percents, signed_percents, power, span, shown, outcome),
        *(means, standard_error, forecast_errors, forecast_error, deviation),
        *(len, min, max, sum, ceil, median, fmean, stdev),
    )
}


def current(text: str, results: Mapping[str, Any]) -> str:
    """A document with the figures of the results.

    Raises:
        ValueError: an expression cannot be evaluated, or a comment is not part of a figure.
    """
    if len(FIGURE.findall(text)) != text.count("<!--=") or text.count("<!--=") != text.count("<!--/-->"):
        whole = FIGURE.sub("", text)
        at = min(at for comment in ("<!--=", "<!--/-->") if (at := whole.find(comment)) >= 0)
        raise ValueError(f"no figure, as a comment is malformed or missing: {whole[at:].splitlines()[0][:80]}")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    environment.globals.update(FUNCTIONS)

    def figure(found: re.Match[str]) -> str:
        try:
            value = environment.compile_expression(found["expression"], undefined_to_none=False)(**results)
            return f"{found[1]}{value}{found[4]}"
        except (jinja2.TemplateError, ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{found['expression']}: {error}") from error

    return FIGURE.sub(figure, text)


def results_in(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of README and docs from result files.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a figure differs")
    check, results, wrong = parser.parse_args().check, results_in(RESULTS), 0
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        try:
            new = current(text, results)
        except ValueError as error:
            print(f"{path.relative_to(ROOT)}: {error}", file=sys.stderr)
            wrong += 1
            continue
        if new != text:
            wrong += check
            report = partial(print, file=sys.stderr)
            for old, right in zip(FIGURE.finditer(text), FIGURE.finditer(new), strict=True):
                if old["text"] != right["text"]:
                    report(f"{path.relative_to(ROOT)}: {old['text']} is {right['text']} in benchmarks/results")
            if not check:
                path.write_text(new, encoding="utf-8")
    if wrong:
        print("run `python -m benchmarks.figures`, and look at what it changed", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
