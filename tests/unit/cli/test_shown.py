"""Tables of plans, on whatever terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tidemill.cli.plan_options import table

NAMES, PRICES = ("aws-p5e.48xlarge-block", "azure-nd96isr-mi300x-v5"), ("$110.24", "$48.00")


@pytest.mark.parametrize("width", [40, 60, 200])
def test_nothing_is_left_out_where_it_is_narrow(width: int) -> None:
    stream = io.StringIO()
    rows = [[name, price, "8 × NVIDIA H100", "3,200 Gbit/s"] for name, price in zip(NAMES, PRICES, strict=True)]
    Console(file=stream, width=width).print(table(("machine", "an hour", "GPUs", "network"), rows))
    lines = stream.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    written = ["".join(line[column].strip() for line in lines) for column in _columns(lines)]
    assert all(name in written[0] for name in NAMES)
    assert all(price in written[1] for price in PRICES)


def _columns(lines: list[str]) -> list[slice]:
    """Where at least two blanks stand in every line, one column ends."""
    width = max(len(line) for line in lines)
    blank = [all(line.ljust(width)[at] == " " for line in lines) for at in range(width)]
    edges = [at for at in range(1, width) if blank[at - 1] and not blank[at]]
    return [slice(begin, end) for begin, end in zip([0, *edges], [*edges, width], strict=True)]


def test_a_title_may_have_brackets() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80).print(table(("a column",), [["as wide as its title"]], title="[red]x[/foo]"))
    assert "[red]x[/foo]" in stream.getvalue()
