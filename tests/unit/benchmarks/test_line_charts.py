"""Ticks, and pictures that are well-formed and have their points where they belong."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.line_charts import BOTTOM, LEFT, PANEL_HEIGHT, PANEL_WIDTH, RIGHT, TOP, Line, Panel, ticks, write_chart
from tidemill.telemetry.statistics import Interval


def test_ticks_are_round_and_within_the_axis() -> None:
    assert ticks(0.0, 1.0) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.32, 0.97) == pytest.approx([0.4, 0.6, 0.8])
    assert ticks(0.0, 100.0) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.0, 0.0004) == pytest.approx([0.0, 0.0001, 0.0002, 0.0003, 0.0004])


def test_a_chart_is_well_formed_and_its_ends_are_at_the_corners(tmp_path: Path) -> None:
    points = {0.0: Interval(0.0, 0.0, 0.1), 10.0: Interval(1.0, 0.9, 1.0)}
    panel = Panel(
        title="a < b", x_title="step", lines=[Line.through(points, label="one & two", colour=1)], marks=(0.5,)
    )
    write_chart(tmp_path / "chart.svg", "title", [panel])
    text = (tmp_path / "chart.svg").read_text()
    ET.fromstring(text)  # "<" and "&" are escaped
    (line,) = re.findall(r'<path d="M([^"]*)" fill="none"', text)
    first, last = (tuple(map(float, point.split())) for point in line.split("L"))
    # The lowest value at the lower left corner of the panel, the highest at the upper right.
    assert first == pytest.approx((LEFT, PANEL_HEIGHT - BOTTOM))
    assert last == pytest.approx((PANEL_WIDTH - RIGHT, TOP))
    assert text.count('Z"') == 1  # the band


def test_values_beyond_a_given_axis_stay_on_its_edge(tmp_path: Path) -> None:
    line = Line(label="one", xs=[0, 1], ys=[0.0, 2.0])
    write_chart(tmp_path / "chart.svg", "title", [Panel(title="", x_title="", lines=[line], low=0.0, high=1.0)])
    (path,) = re.findall(r'<path d="M([^"]*)" fill="none"', (tmp_path / "chart.svg").read_text())
    assert float(path.split()[-1]) == pytest.approx(TOP)


def test_a_logarithmic_axis_has_its_ticks_at_powers_of_ten(tmp_path: Path) -> None:
    line = Line(label="one", xs=[1, 10, 1000], ys=[0.0, 1.0, 2.0])
    panel = Panel(title="", x_title="", lines=[line], logarithmic=True)
    write_chart(tmp_path / "chart.svg", "title", [panel])
    text = (tmp_path / "chart.svg").read_text()
    (path,) = re.findall(r'<path d="M([^"]*)" fill="none"', text)
    xs = [float(point.split()[0]) for point in path.split("L")]
    assert (xs[1] - xs[0]) / (xs[2] - xs[0]) == pytest.approx(1 / 3, abs=1e-3)  # one of three powers of ten
    assert re.findall(r'text-anchor="middle">(\d+)<', text) == ["1", "10", "100", "1000"]
