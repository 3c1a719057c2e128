from __future__ import annotations

from tidemill.controller.worker_state import WorkBySize
from tidemill.core.records import EngineWork


def test_work_is_summed_by_octaves_of_samples() -> None:
    work = WorkBySize()
    work.observe(EngineWork(passes=2, rows=10, context_tokens=50, drawn=12, prefilled=8, busy_s=0.5, cpu_s=0.25))
    work.observe(EngineWork(passes=4, rows=25, context_tokens=90, drawn=27, prefilled=8, busy_s=1.0, cpu_s=0.5))
    work.observe(EngineWork(passes=5, rows=26, context_tokens=99, drawn=28, prefilled=8, busy_s=1.25, cpu_s=0.75))
    # 12 tokens in 2 passes and 15 in 2 are between 4 and 8 per pass; the last pass sampled one.
    assert work.take() == [
        {"passes": 1, "rows": 1, "context_tokens": 9, "drawn": 1, "prefilled": 0, "busy_s": 0.25, "cpu_s": 0.25},
        {"passes": 4, "rows": 25, "context_tokens": 90, "drawn": 27, "prefilled": 8, "busy_s": 1.0, "cpu_s": 0.5},
    ]
    assert work.take() == []


def test_an_engine_without_work_reports_has_no_rows() -> None:
    work = WorkBySize()
    work.observe(EngineWork())
    assert work.take() == []
