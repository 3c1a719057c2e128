"""The figures of README and docs: pages with figures are rendered from templates.

    python -m benchmarks.figures [--check]

`benchmarks/pages/FOLDER/NAME.md` is the template of `docs/FOLDER/NAME.md`, and `benchmarks/pages/README.md` that of the
README. A figure in it is an expression of Jinja:

    {{ fixed(case(grpo_step, "SmolLM2-135M fp32").speedup, 1) }}

Names are those of the files in benchmarks/results, and `gpu` has those of benchmarks/results/gpu. `table("memory")` is
the table of the interactive explanation docs/explore/memory.md, computed by the product when a template names it, and
`default("engine.tick_s")` the default of a key. Without --check the pages are written; with it the command fails if a
page differs from its template.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from difflib import SequenceMatcher
from functools import reduce
from math import ceil
from operator import getitem
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import jinja2

from benchmarks.measuring import RESULTS
from benchmarks.origin import ROOT
from tidemill.config.keys import keys_by_path

PAGES = ROOT / "benchmarks" / "pages"
MAX_LINES = 10  # printed of each page


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


def table(name: str) -> Any:
    """The table of an interactive explanation. Raises KeyError."""
    from scripts.site.explorations import TABLES  # with torch, which most pages do not need

    return TABLES[name]()


def default(key: str) -> Any:
    """The default of a configuration key: "engine.tick_s". Raises KeyError."""
    return keys_by_path()[tuple(key.split("."))][0].default


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


def largest_error(rows: Iterable[Mapping[str, float]], name: str, true: str) -> float:
    """The largest relative error of a value, against another one of the same record."""
    return max(abs(each[name] / each[true] - 1) for each in rows)


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
        *(row, case, values, table, default),
        *(fixed, percent, percents, signed_percents, power, span, shown, outcome),
        *(largest_error, forecast_errors, forecast_error, deviation),
        *(len, min, max, sum, ceil, median, fmean),
    )
}


def rendered(template: Path, results: Mapping[str, Any]) -> str:
    """The page of a template, with the figures of the results.

    Raises:
        ValueError: an expression is malformed or has no value; the message has its line.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(FUNCTIONS)
    try:
        return environment.get_template(template.name).render(results)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error}") from error
    except (jinja2.TemplateError, ArithmeticError, KeyError, TypeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(frame.lineno for frame in reversed(frames) if frame.filename == str(template))
        raise ValueError(f"line {line}: {error}") from error


def page_of(template: Path) -> Path:
    name = template.relative_to(PAGES)
    return ROOT / name if name == Path("README.md") else ROOT / "docs" / name


def differences(page: Path, wanted: str) -> list[str]:
    """Where a page differs from the wanted text: its name, the line, both texts."""
    old = page.read_text(encoding="utf-8").splitlines(keepends=True) if page.is_file() else []
    new = wanted.splitlines(keepends=True)
    return [
        f"{page.relative_to(ROOT)}:{start + 1}: {_around(''.join(old[start:end]), ''.join(new[new_start:new_end]))}"
        for kind, *block in SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        if kind != "equal"
        for start, end, new_start, new_end in _line_by_line(*block)
    ]


def _line_by_line(start: int, end: int, new_start: int, new_end: int) -> list[tuple[int, int, int, int]]:
    """The lines of a block that differs; a block whose number of lines differs stays whole."""
    count = end - start
    if count != new_end - new_start:
        return [(start, end, new_start, new_end)]
    return [(start + at, start + at + 1, new_start + at, new_start + at + 1) for at in range(count)]


def _around(line: str, right: str) -> str:
    """The first difference of two texts, with the characters before it."""
    start = next((at for at, (one, other) in enumerate(zip(line, right, strict=False)) if one != other), 0)
    start = max(0, start - 30)
    return f"{line[start : start + 60]!r} should be {right[start : start + 60]!r}"


def results_in(folder: Path) -> dict[str, Any]:
    """By name; those of a folder in it by the name of the folder first."""
    results: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return results | {path.name: results_in(path) for path in sorted(folder.iterdir()) if path.is_dir()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Pages with figures from result files.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs")
    check = parser.parse_args().check
    results = results_in(RESULTS)
    failed = False
    for template in sorted(PAGES.rglob("*.md")):
        source = template.relative_to(ROOT)
        page = page_of(template)
        try:
            wanted = rendered(template, results)
        except ValueError as error:
            print(f"{source}: {error}", file=sys.stderr)
            failed = True
            continue
        if differing := differences(page, wanted):
            print("\n".join(differing[:MAX_LINES]), file=sys.stderr)
            if check:
                hint = f"edit {source} and run `python -m benchmarks.figures`"
                print(f"{page.relative_to(ROOT)} differs from its template: {hint}", file=sys.stderr)
                failed = True
            else:
                page.parent.mkdir(parents=True, exist_ok=True)
                page.write_text(wanted, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
