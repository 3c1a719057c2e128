from __future__ import annotations

from pathlib import Path

from tidemill.telemetry.events import EVENTS
from tidemill.telemetry.metrics import METRICS, describe_metrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_the_document_says_what_the_code_does() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == describe_metrics()
    assert all(f"| `{name}` |" in describe_metrics() for name in (*METRICS, *EVENTS))
