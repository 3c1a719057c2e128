"""Line charts with bands as an SVG file: no library, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

from tidemill.telemetry.statistics import Interval

PICTURES = Path(__file__).resolve().parent.parent / "docs"
COLOURS = ("#0b7a83", "#d9762b", "#6f5bb5", "#c3423f", "#2c8a57", "#8a979e", "#b8860b", "#1f4e8c")
PANEL_WIDTH, PANEL_HEIGHT = 400.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 14.0, 34.0, 40.0
HEAD, LEGEND_ROW, LEGEND_COLUMN = 30.0, 18.0, 200.0
STYLE = "font-family: system-ui, sans-serif; font-size: 12px; fill: #16252d"
TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points from left to right, each with the ends of its interval, where it has one."""

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
    marks: Sequence[float] = field(default=())  # horizontal lines: a target
    logarithmic: bool = False  # the horizontal axis, which then has its ticks at powers of ten


def ticks(low: float, high: float, most: int = TICKS) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within [low, high], at most `most` steps."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def write_chart(path: Path, title: str, panels: Sequence[Panel], *, columns: int = 2) -> None:
    """Panels in rows, and one legend of every label below them."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    labels = {line.label: line for panel in panels for line in panel.lines}
    width = columns * PANEL_WIDTH
    across = max(1, int(width / LEGEND_COLUMN))
    legend_y = HEAD + rows * PANEL_HEIGHT + LEGEND_ROW
    height = legend_y + math.ceil(len(labels) / across) * LEGEND_ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" style="{STYLE}">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="{LEFT:g}" y="20" style="font-size: 15px; font-weight: 600">{escape(title)}</text>',
    ]
    for at, panel in enumerate(panels):
        x, y = (at % columns) * PANEL_WIDTH, HEAD + (at // columns) * PANEL_HEIGHT
        parts += [f'<g transform="translate({x:g} {y:g})">', *_panel(panel), "</g>"]
    for at, line in enumerate(labels.values()):
        x, y = LEFT + (at % across) * LEGEND_COLUMN, legend_y + (at // across) * LEGEND_ROW
        parts.append(f'<path d="M{x:g} {y - 4:g}h24" {_stroke(line)}/>')
        parts.append(f'<text x="{x + 30:g}" y="{y:g}">{escape(line.label)}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))
    print(f"written: {path}")


def _panel(panel: Panel) -> list[str]:
    ys = [y for line in panel.lines for y in (*line.ys, *line.lows, *line.highs)] + list(panel.marks)
    scaled = math.log10 if panel.logarithmic else float
    xs = [scaled(x) for line in panel.lines for x in line.xs]
    low = min(ys) if panel.low is None else panel.low
    high = max(ys) if panel.high is None else panel.high
    high = high if high > low else low + 1.0
    right = max(xs) if max(xs) > min(xs) else min(xs) + 1.0
    inner_width, inner_height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def at_x(x: float) -> float:
        return LEFT + (scaled(x) - min(xs)) / (right - min(xs)) * inner_width

    def at_y(y: float) -> float:
        return TOP + (high - min(max(y, low), high)) / (high - low) * inner_height

    parts = [f'<text x="{LEFT:g}" y="{TOP - 12:g}" style="font-weight: 600">{escape(panel.title)}</text>']
    parts += [
        f'<path d="M{LEFT:g} {at_y(y):.1f}h{inner_width:g}" stroke="#dce5e9"/>'
        f'<text x="{LEFT - 6:g}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        for y in ticks(low, high)
    ]
    parts += [
        f'<text x="{at_x(x):.1f}" y="{PANEL_HEIGHT - BOTTOM + 16:g}" text-anchor="middle">{x:g}</text>'
        for x in (_powers(min(xs), right) if panel.logarithmic else ticks(min(xs), right))
    ]
    middle = LEFT + inner_width / 2
    parts.append(f'<text x="{middle:g}" y="{PANEL_HEIGHT - 8:g}" text-anchor="middle">{escape(panel.x_title)}</text>')
    parts += [
        f'<path d="M{LEFT:g} {at_y(y):.1f}h{inner_width:g}" stroke="#16252d" stroke-dasharray="2 3"/>'
        for y in panel.marks
    ]
    for line in panel.lines:
        if line.lows:
            there = [f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(line.xs, line.highs, strict=True)]
            back = [f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(line.xs, line.lows, strict=True)]
            area = "L".join([*there, *reversed(back)])
            parts.append(f'<path d="M{area}Z" fill="{COLOURS[line.colour]}" fill-opacity="0.12"/>')
    for line in panel.lines:
        points = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(line.xs, line.ys, strict=True))
        parts.append(f'<path d="M{points}" fill="none" {_stroke(line)}/>')
    return parts


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten whose logarithms are within [low, high]."""
    return [10.0**power for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def _stroke(line: Line) -> str:
    dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
    return f'stroke="{COLOURS[line.colour]}" stroke-width="1.8"{dashes}'
