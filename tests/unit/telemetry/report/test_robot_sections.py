from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fabricated_robot import robot_run, twin_run
from tests.unit.telemetry.report.test_report import Page
from tidemill.telemetry.events import event_text
from tidemill.telemetry.report import robot_sections, write_report
from tidemill.telemetry.report.charts import chart_data
from tidemill.telemetry.run_data import RunData, headline_figure

UNKNOWN_WORDS = ("prompt", "completion", "token", "sample")  # of language models


def test_the_page_of_a_robot_has_its_sections_and_no_words_of_language_models(tmp_path: Path) -> None:
    page = Page(write_report(robot_run(tmp_path / "run").path).read_text(encoding="utf-8"))
    assert not page.mismatched
    panels = [attributes["id"] for tag, attributes in page.tags if attributes.get("class") == "panel"]
    assert panels == ["overview", "episodes", "fleet", "learning", "setup"]
    shown = page.text.split("Setup")[1].split("Configuration")[0].lower()
    assert [word for word in UNKNOWN_WORDS if word in shown] == []
    assert "before <label>" in page.text


@pytest.mark.parametrize(
    ("evaluated", "headline", "figure"),
    [
        (("before", "after"), "Success rose from 0.000 to 0.750 in 3 iterations.", ("success", 0.75)),
        (
            ("before",),
            "Mean return in training went from 1.000 to 3.000 in 3 iterations.",
            ("success in training", 0.75),
        ),
        ((), "Mean return in training went from 1.000 to 3.000 in 3 iterations.", ("success in training", 0.75)),
    ],
)
def test_the_headline_is_of_the_evaluations(
    tmp_path: Path, evaluated: tuple[str, ...], headline: str, figure: tuple[str, float]
) -> None:
    data = RunData.read(robot_run(tmp_path / "run", evaluated=evaluated, episodes=False).path)
    assert robot_sections.headline(data) == headline
    assert headline_figure(data)[:2] == figure
    bars = robot_sections.success_bars(data)
    assert [row["label"] for row in bars["rows"]] == list(evaluated) if bars else evaluated == ()
    found = robot_sections.episodes(data)
    assert found["playback"] == {} and bool(found["compared"]) == (len(evaluated) == 2)


def test_bars_tiles_and_means(tmp_path: Path) -> None:
    data = RunData.read(robot_run(tmp_path / "run").path)
    bars = robot_sections.success_bars(data)
    assert bars is not None and bars["of"] == "64 episodes"
    # Wilson, z = 1.96, of 48 of 64: centre (0.75 + 0.0300) / 1.0600 = 0.7358, half 0.1037.
    assert [row["interval"] for row in bars["rows"]] == ["0.00 to 0.06", "0.63 to 0.84"]
    tiles = {label: figure for label, figure, _ in robot_sections.tiles(data)}
    assert tiles["Control steps"] == "6.14k"  # 3 iterations of 128 worlds and 16 steps
    assert tiles["Simulation"] == "6.0 s" and tiles["Chunks repeated"] == "3"
    assert not any("Tokens" in label for label in tiles)
    means = robot_sections.episodes(data)["compared"]
    assert ("return", "-1.000", "6.500") in means and ("reward term upright", "0.000", "9.000") in means
    assert ("height", "0.000", "0.750") in means


def test_the_page_of_an_environment_without_success(tmp_path: Path) -> None:
    run = robot_run(tmp_path / "run", episodes=False)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    kept = [{name: line[name] for name in line if not name.startswith("success")} for line in lines]
    run.events.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    config = run.config.read_text()
    run.config.write_text(config.replace("[robot]", '[robot]\nenvironment = "package:make"'))

    data = RunData.read(run.path)
    assert robot_sections.headline(data) == "Mean return went from -1.000 to 6.500 in 3 iterations."
    assert headline_figure(data)[:2] == ("mean return", 6.5)
    assert [row[0] for row in robot_sections.episodes(data)["compared"]][:2] == ["return", "falls"]
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert not page.mismatched
    assert "falls0.5000.125" in page.text
    assert "The environment shows no poses to play." in page.text
    assert event_text("robot_evaluation", kept[-2]) == "after training: falls 12 %, mean return 6.500"


def test_charts_of_a_robot(tmp_path: Path) -> None:
    found = chart_data(RunData.read(robot_run(tmp_path / "run").path))
    titles = {chart["title"]: chart for chart in found["charts"]}
    assert {"Success and falls", "Episode return", "Reward terms", "height", "Entropy"} <= titles.keys()
    assert found["overview"][:3] == ["Success and falls", "Episode return", "Reward terms"]
    assert titles["Entropy"]["low"] is None, "the entropy of continuous actions may be negative"


def test_the_page_of_a_twin(tmp_path: Path) -> None:
    run = twin_run(tmp_path / "twin")
    found = robot_sections.twin(RunData.read(run.path))
    assert found["cells"][1][0] == "delay_s=0.02" and found["cells"][1][-1] == "not passed"
    (curve,) = found["curves"]
    assert curve["title"] == "delay, s" and [point["x"] for point in curve["points"]] == [0, 1]
    assert curve["points"][1]["success"][0] == 0.25  # from the upper edge
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert "Not passed." in page.text and "success <0.750>" in page.text and not page.mismatched
    assert "step 0 of" not in page.text, "a twin has no training steps"
