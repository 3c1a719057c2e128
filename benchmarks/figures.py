"""The figures of README and docs that come from result files.

    python -m benchmarks.figures [--check]

A figure stands between two comments, the first of which says what it is:

    <!--= fixed(case(grpo_step, "SmolLM2-135M fp32").speedup, 1) -->6.0<!--/-->

Names are those of the files in benchmarks/results. Without --check the figures are written anew from these files; with
it the command fails if one differs. Expressions are Jinja's, without its `|`, which would end a cell of a table.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from benchmarks.measuring import RESULTS
from benchmarks.origin import ROOT

FIGURE = re.compile(r"(<!--= (?P<expression>.*?) -->)(?P<text>[^\n]*?)(<!--/-->)")


def case(result: Mapping[str, Any], name: str) -> Any:
    """A case of a comparison by its name. Raises KeyError."""
    return next((each for each in result["cases"] if each["case"] == name), None) or _missing(name)


def _missing(name: str) -> Any:
    raise KeyError(f"there is no case {name!r}")


def fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def percent(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}%}".replace("%", " %")


def span(values: Sequence[float], digits: int) -> str:
    """The smallest and the largest."""
    return f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def shown(values: Sequence[float], digits: int) -> str:
    """All of them, in their order."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


FUNCTIONS = {
    "case": case,
    "fixed": fixed,
    "percent": percent,
    "span": span,
    "shown": shown,
    "median": median,
    "min": min,
    "max": max,
}


def current(text: str, results: Mapping[str, Any]) -> str:
    """A document with the figures of the results.

    Raises:
        ValueError: an expression cannot be evaluated.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    environment.globals.update(FUNCTIONS)

    def figure(found: re.Match[str]) -> str:
        try:
            value = environment.compile_expression(found["expression"], undefined_to_none=False)(**results)
            return f"{found[1]}{value}{found[4]}"
        except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
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
