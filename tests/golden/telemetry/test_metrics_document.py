from __future__ import annotations

from pathlib import Path

from tidemill.telemetry.events import EVENTS
from tidemill.telemetry.fleet_figures import fleet_figures
from tidemill.telemetry.metrics import METRICS, describe_metrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_document_says_what_the_code_does() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == describe_metrics()
    assert all(f"| `{name}` |" in describe_metrics() for name in (*METRICS, *EVENTS))


def test_every_figure_of_the_fleet_is_explained() -> None:
    figures = fleet_figures([], [], wall_s=1.0, tokens_trained=1, reserved_usd_per_hour=0.0)
    assert all(f"`{key}`" in describe_metrics() for key in figures)
