from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidemill.telemetry.events import EVENTS
from tidemill.telemetry.fleet_figures import fleet_figures
from tidemill.telemetry.metrics import CHARTS, EPISODE_ENDS, METRICS

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"


def update_document(text: str) -> str:
    """The text of docs/reference/metrics.md with its tables of metrics and events replaced by the current ones."""
    metrics = [
        f"| `{name}` | {one.unit or '-'} | {one.meaning} |"
        for name, one in METRICS.items()
        if name not in EPISODE_ENDS.values()  # one sentence of the page describes them
    ]
    events = [f"| `{name}` | {meaning} |" for name, meaning in EVENTS.items()]
    tables = {
        "metrics": ["| name | unit | meaning |", "|---|---|---|", *metrics],
        "events": ["| event | meaning |", "|---|---|", *events],
    }
    for name, rows in tables.items():
        begin, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
        text = re.sub(f"(?s){begin}.*?{end}", lambda _: begin + "\n".join(rows) + end, text)  # noqa: B023
    return text


def test_the_tables_of_the_document_are_generated_from_the_registry() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    if (current := update_document(text)) != text:
        DOCUMENT.write_text(current, encoding="utf-8")
        pytest.fail("the tables of docs/reference/metrics.md were updated; look at them and run again")
    assert all(text.count(f"<!-- {mark} -->") == 1 for mark in ("metrics: generated", "events: generated"))


def test_every_figure_of_the_fleet_is_explained() -> None:
    figures = fleet_figures([], [], wall_s=1.0, tokens_trained=1, reserved_usd_per_hour=0.0)
    assert all(f"`{key}`" in DOCUMENT.read_text(encoding="utf-8") for key in figures)


def test_each_chart_has_a_title_of_its_own_and_draws_registered_metrics() -> None:
    assert len({chart.title for chart in CHARTS}) == len(CHARTS)
    names = {name for chart in CHARTS for name in chart.series}
    assert {name.removeprefix("eval/") for name in names - METRICS.keys()} - METRICS.keys() == {"forecast/step_s"}
