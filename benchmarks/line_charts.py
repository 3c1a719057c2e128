"""Line charts with bands as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tidemill.telemetry.statistics import Interval

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
COLOURS = ("#0b7a83", "#d9762b", "#6f5bb5", "#c3423f", "#2c8a57", "#8a979e", "#b8860b", "#1f4e8c")
PANEL_INCHES = (4.0, 2.6)
STYLE: Any = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#dce5e9",
    "svg.fonttype": "none",
    "svg.hashsalt": "tidemill",  # the same chart gives the same file
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points from left to right, with the bounds of their intervals if `lows` and `highs` are given."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    colour: int = 0  # index into COLOURS
    dashed: bool = False

    @classmethod
    def through(
        cls,
        points: Mapping[int, Interval] | Mapping[float, Interval],
        *,
        label: str,
        colour: int,
        dashed: bool = False,
        band: bool = True,
    ) -> Line:
        """A line of values with intervals by x position."""
        found = points.values() if band else ()
        return cls(
            label=label,
            xs=list(points),
            ys=[point.value for point in points.values()],
            lows=[point.low for point in found],
            highs=[point.high for point in found],
            colour=colour,
            dashed=dashed,
        )


@dataclass(frozen=True, kw_only=True)
class Panel:
    title: str
    x_title: str
    lines: Sequence[Line]
    low: float | None = None  # of the y axis; default: range of the lines
    high: float | None = None
    marks: Sequence[float] = ()  # y of horizontal lines, for example a target
    logarithmic: bool = False  # the x axis


def write_chart(path: Path, title: str, panels: Sequence[Panel], *, columns: int = 2) -> None:
    """Write panels in rows, with one legend for all of them."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.6), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for panel, ax in zip(panels, axes, strict=False):
            _draw(panel, ax)
        for ax in list(figure.axes)[len(panels) :]:
            ax.remove()
        handles = {
            label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns, frameon=False)
        figure.suptitle(title)
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(f"written: {path}")


def _draw(panel: Panel, ax: Axes) -> None:
    for line in panel.lines:
        colour, style = COLOURS[line.colour], "--" if line.dashed else "-"
        ax.plot(line.xs, line.ys, style, color=colour, label=line.label, linewidth=1.4)
        if line.lows:
            ax.fill_between(line.xs, line.lows, line.highs, color=colour, alpha=0.12, linewidth=0)
    for y in panel.marks:
        ax.axhline(y, color="#16252d", linestyle=":", linewidth=1)
    if panel.logarithmic:
        ax.set_xscale("log")
    ax.set(title=panel.title, xlabel=panel.x_title, ylim=(panel.low, panel.high))
