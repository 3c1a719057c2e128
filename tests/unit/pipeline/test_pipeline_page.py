from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidemill.pipeline.pipeline_page import context, figure, write_page
from tidemill.pipeline.state import PipelineFolder


def made(path: Path, *, figures: dict[str, Any], name: str = "rm", state: str = "done") -> PipelineFolder:
    folder = PipelineFolder(path)
    stage = {"name": name, "kind": "reward_model", "state": state, "folder": "stages/rm-1", "model": "char"}
    summary = {"name": name, "headline": "all <well>", "wall_s": 61.0, "figures": figures}
    folder.write_json(
        folder.state, {"name": "p", "outcome": "finished", "stages": [stage | {"needs": []}], "stale": ["x-1"]}
    )
    folder.write_json(folder.summary, {"stages": [summary], "wall_s": 61.0})
    return folder


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_rss_bytes", 1_500_000_000, "1.50 GB"),
        ("duration_s", 61.0, "1:01"),
        ("tokens_trained", 12_345, "12.3k"),
        ("loss", 0.69314, "0.693"),
        ("kind", "pairs", "pairs"),
    ],
)
def test_figures_as_text(name: str, value: Any, text: str) -> None:
    assert figure(name, value) == text


def test_a_share_is_shown_as_a_bar_with_its_interval(tmp_path: Path) -> None:
    (bar,) = context(made(tmp_path, figures={"loss": 0.5, "pairwise_accuracy": 0.75, "n": 100}))["bars"]
    # Wilson, z = 1.96: centre (0.75 + 0.038416 / 2) / 1.038416 = 0.7408, half 1.96 / 1.038416 *
    # sqrt(0.75 * 0.25 / 100 + 0.038416 / 400) = 0.0838.
    assert bar["interval"] == "0.66 to 0.82, n = 100"
    assert (bar["share"], bar["faint"]) == (75, False)
    assert context(made(tmp_path, figures={"loss": 0.5}))["bars"] == []


@pytest.mark.parametrize(("state", "dot"), [("done", "finished"), ("started", "interrupted"), ("due", "due")])
def test_a_stage_that_has_not_started_has_no_dot_of_another_state(tmp_path: Path, state: str, dot: str) -> None:
    (stage,) = context(made(tmp_path, figures={}, state=state))["stages"]
    assert stage["dot"] == dot


def test_the_page_shows_headlines_escaped(tmp_path: Path) -> None:
    folder = made(tmp_path, figures={"pairwise_accuracy": 0.75})
    page = write_page(folder).read_text(encoding="utf-8")
    assert "all &lt;well&gt;" in page
    assert "<well>" not in page
    assert "1 of 1 stages finished" in page
    assert "x-1" in page
    assert 'href="stages' not in page  # the stage has no report yet
    (tmp_path / "stages" / "rm-1").mkdir(parents=True)
    (tmp_path / "stages" / "rm-1" / "report.html").write_text("")
    assert 'href="stages/rm-1/report.html"' in write_page(folder).read_text(encoding="utf-8")


def test_an_empty_directory_has_a_page(tmp_path: Path) -> None:
    page = write_page(PipelineFolder(tmp_path)).read_text(encoding="utf-8")
    assert "0 of 0 stages finished" in page
    assert "running or was killed" in page
