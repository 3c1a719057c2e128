from __future__ import annotations

import math
import random

from tidemill.telemetry.metric_table import MetricTable
from tidemill.telemetry.metrics import MetricLine


def line(step: int, **values: float) -> MetricLine:
    return MetricLine(step, step + 1, f"d{step}", 2, 1, step * 1.5, values)


def table_of(*lines: MetricLine) -> MetricTable:
    table = MetricTable()
    for each in lines:
        table.append(each)
    return table


def test_rows_read_back_as_they_were_written() -> None:
    chance = random.Random(0)
    lines = [
        line(step, **{name: chance.random() for name in "abcdef" if chance.random() < 0.6}) for step in range(1, 40)
    ]
    table = table_of(*lines)
    assert list(table) == lines and table[-3:] == lines[-3:] and table[-1] == lines[-1] and len(table) == 39
    assert [dict(row.values) for row in table] == [row.values for row in lines]
    for name in "abcdef":
        assert table.values(name) == [row.values[name] for row in lines if name in row.values]
        column = table.column(name)
        assert [None if math.isnan(value) else value for value in column] == [row.values.get(name) for row in lines]
    assert table.column("step").tolist() == list(range(1, 40)) and table.last_step == 39


def test_missing_metrics_and_an_empty_table() -> None:
    assert MetricTable().values("a") == [] and MetricTable().column("a").shape == (0,) and MetricTable().last_step == 0
    table = table_of(line(1), line(2, a=1.0))
    assert "a" not in table[0].values and table[0].values.get("b") is None and table.names == ["a"]


def test_lines_out_of_order_are_sorted_and_the_last_of_a_step_counts() -> None:
    table = table_of(line(2, a=1.0), line(1, a=5.0), line(2, b=3.0))
    assert list(table.in_order()) == [line(1, a=5.0), line(2, b=3.0)]
    ordered = table_of(line(1), line(2))
    assert ordered.in_order() is ordered
