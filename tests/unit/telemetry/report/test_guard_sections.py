from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fabricated_guard import DECIDED, ONSET, REASON, TARGET, hacked_run
from tests.unit.telemetry.report.test_report import page_of
from tidemill.telemetry.events import event_line
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.run_data import RunData


def test_the_page_tells_the_story_of_a_hacked_run(tmp_path: Path) -> None:
    page = page_of(hacked_run(tmp_path))
    assert page.mismatched == [] and page.open == []
    for words in (
        "158 gold scores, 2 missing; dotted: steps that were taken back",
        f"Step {DECIDED}: rollback.",
        f"The reward rises and quality does not since about step {ONSET}; the run returns to step {TARGET}. {REASON}",
        "Test: gain, proxy 0.420 → 0.830, gold 0.410 → 0.210.",
        "The reward likes a text that it should not (empty): score 1.000, typical 0.250.",
        "1.2 % of gold scores are missing. The guard cannot judge these samples.",
        "First: the judge did not answer within 10 s",
        "Samples of steps 12-14, taken back",
        "Health of machines",
        "its logprobs differ from its cohort's (0.310, limit 0.050)",
    ):
        assert words in page.text, words
    charts = {chart["title"]: chart for chart in json.loads(page.scripts["data"])["charts"]}
    quality = charts["Reward and gold"]
    assert quality["marks"] == [[ONSET, "onset"], [DECIDED, "rollback"]]
    proxy, gold = quality["series"]
    assert gold["counts"][3:6] == [8, 6, 8]  # steps 3 to 5
    # From the last step that was left to the decision; then the new life has values, too.
    assert [at for at, value in enumerate(proxy["abandoned"]) if value is not None] == list(range(TARGET, DECIDED + 1))
    assert proxy["abandoned"][TARGET] == proxy["values"][TARGET]
    assert all(value is not None for value in proxy["values"][1:])
    assert "abandoned" in charts["Reward"]["series"][0]


def test_a_run_that_has_just_returned_to_the_initial_model_shows_what_it_left(tmp_path: Path) -> None:
    fields = {"number": 1, "step": 2, "onset": 1, "action": "rollback", "target": 0, "reason": "R.", "test": "gain"}
    events: list[tuple[str, dict[str, Any]]] = [
        ("gold", {"step": step, "proxy_mean": 0.5 * step, "gold_mean": 0.25, "pairs": 4}) for step in (1, 2)
    ]
    run = RunData.load(hacked_run(tmp_path)).run
    lines = [event_line(*one, unix_s=0.0, session=1, elapsed_s=0.0) for one in [*events, ("guard", fields)]]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.metrics.write_text("")
    (quality, *_) = chart_data(RunData.load(run))["charts"]
    assert [one["abandoned"][-14:][:2] for one in quality["series"]] == [[0.5, 1.0], [0.25, 0.25]]
    page = page_of(run)
    assert "the run returns to the initial model" in page.text and page.open == []


def test_ordinary_runs_have_neither_section(tmp_path: Path) -> None:
    run = hacked_run(tmp_path)
    kept = [line for line in run.events.read_text().splitlines() if '"guard' not in line and '"gold"' not in line]
    run.events.write_text("".join(line + "\n" for line in kept if '"worker_health"' not in line))
    page = page_of(run)
    assert "Reward and quality" not in page.text and "Health of machines" not in page.text
