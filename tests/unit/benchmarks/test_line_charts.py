"""Charts are valid, reproducible SVG files with all labels."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.line_charts import Line, Panel, write_chart
from tidemill.telemetry.statistics import Interval

POINTS = {1.0: Interval(0.0, 0.0, 0.1), 10.0: Interval(1.0, 0.9, 1.0)}


def chart(path: Path) -> str:
    lines = [Line.through(POINTS, label="one & two", colour=1)]
    panels = [
        Panel(title="a < b", x_title="step", lines=lines, marks=(0.5,)),
        Panel(title="c", x_title="seconds", lines=lines, low=0.0, high=1.0, logarithmic=True),
        Panel(title="d", x_title="step", lines=[Line(label="three", xs=[0, 1], ys=[0, 2])]),
    ]
    write_chart(path, "all of them", panels)
    return path.read_text()


def test_a_chart_is_valid_svg_with_titles_and_one_legend(tmp_path: Path) -> None:
    texts = [
        element.text for element in ET.fromstring(chart(tmp_path / "a.svg")).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"all of them", "a < b", "c", "d", "seconds"} <= set(texts)
    assert texts.count("one & two") == texts.count("three") == 1


def test_the_same_chart_gives_the_same_file(tmp_path: Path) -> None:
    assert chart(tmp_path / "a.svg") == chart(tmp_path / "b.svg")
