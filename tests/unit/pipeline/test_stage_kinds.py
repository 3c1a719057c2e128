"""The headline, figures and report of an evaluation stage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.telemetry.report.test_report import Page
from tidemill.config.schema import RunSpec
from tidemill.pipeline.stage_kinds import evaluation_headline, write_evaluation
from tidemill.telemetry.run_data import RunData

FOUND: dict[str, Any] = {
    "reward_mean": 0.55,
    "reward_mean_interval": [0.2, 0.9],
    "greedy_accuracy": 0.5,
    "greedy_accuracy_interval": [0.15, 0.85],
    "n": 4,
    "invalid": 0,
    "truncated_fraction": 0.25,
    "completion_tokens_mean": 1.5,
    "duration_s": 2.0,
    "model": "this/model",
    "weights_digest": "ab",
    "completion_tokens": {"mean": 1.5, "max": 2.0},
    "distinct_1": 0.612,
    "scores": {"liked": {"value": 0.7, "low": 0.41, "high": 0.93, "invalid": 0}},
    "drawn": {
        "samples_per_prompt": 2,
        "pass_at": {"1": {"value": 0.375, "low": 0.125, "high": 0.625}, "2": {"value": 0.75, "low": 0.3, "high": 0.95}},
        "invalid": 0,
        "truncated_fraction": 0.0,
        "completion_tokens": {"mean": 1.25},
        "distinct_1": 0.513,
        "distinct_1_in_prompt": 0.834,
    },
    "samples": [
        {"prompt": "1+1=", "completion": "<2>", "answer": "2", "reward": 1.0, "correct": True},
        {"prompt": "1+2=", "completion": "9", "answer": "3", "reward": 0.1, "correct": False},
    ],
    "compared_with": {
        "model": "other/model",
        "weights_digest": "cd",
        "figures": {
            "greedy_accuracy": {
                "n": 4,
                "other": 0.25,
                "this": 0.5,
                "difference": {"value": 0.25, "low": -0.11, "high": 0.61},
                "higher": 2,
                "lower": 1,
                "p_value": 0.875,
            }
        },
        "samples": [
            {"prompt": "1+1=", "completion": "8", "reward": 0.1, "correct": False},
            {"prompt": "1+2=", "completion": "7", "reward": 0.1, "correct": False},
        ],
    },
}
ALONE = {name: value for name, value in FOUND.items() if name not in ("scores", "drawn", "compared_with")}
GRADED: dict[str, Any] = {
    **{name: value for name, value in ALONE.items() if not name.startswith("greedy_accuracy")},
    "reward_mean": 1.5,
    "reward_mean_interval": [1.25, 1.75],
    "samples": [
        {"prompt": "1+1=", "completion": "2", "answer": "2", "reward": 1.75, "correct": None},
        {"prompt": "1+2=", "completion": "", "answer": "3", "reward": None, "correct": None},
        {"prompt": "1+3=", "completion": "9", "answer": "4", "reward": 1.25, "correct": None},
    ],
}


def test_the_headline_has_pass_at_k_and_intervals() -> None:
    assert evaluation_headline(FOUND) == (
        "held-out mean reward 0.550 (95 %: 0.200 to 0.900; n = 4), "
        "held-out greedy accuracy 0.500 (95 %: 0.150 to 0.850; n = 4), pass@2 0.750 (0.300 to 0.950), "
        "score of liked 0.700 (0.410 to 0.930), greedy accuracy +0.250 (p = 0.875) compared with the other model"
    )
    assert evaluation_headline(GRADED) == "held-out mean reward 1.500 (95 %: 1.250 to 1.750; n = 4)"


def test_the_figures_have_pass_at_k_and_intervals(tmp_path: Path) -> None:
    figures = write_evaluation(tmp_path, RunSpec(), FOUND)
    assert figures["greedy_accuracy_interval"] == [0.15, 0.85]
    assert (figures["reward_mean"], figures["reward_mean_interval"]) == (0.55, [0.2, 0.9])
    assert (figures["pass@1"], figures["pass@2_interval"]) == (0.375, [0.3, 0.95])
    assert (figures["score_liked"], figures["score_liked_interval"]) == (0.7, [0.41, 0.93])
    assert figures["greedy_accuracy_difference_interval"] == [-0.11, 0.61]
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == FOUND


def test_every_set_has_its_figures_and_samples(tmp_path: Path) -> None:
    found = ALONE | {"sets": {"math": GRADED}}
    figures = write_evaluation(tmp_path, RunSpec(), found)
    assert (figures["reward_mean"], figures["math/reward_mean"]) == (0.55, 1.5)
    assert evaluation_headline(found).endswith(", math mean reward 1.500 (95 %: 1.250 to 1.750; n = 4)")
    data = RunData.read(tmp_path)
    assert [one.reward_mean for one in (*data.evaluations, *data.eval_sets["math"])] == [0.55, 1.5]
    assert (tmp_path / "samples" / "step_000000.eval-math.jsonl").is_file()
    assert "math, greedy" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("found", [FOUND, ALONE], ids=["everything", "accuracy alone"])
def test_the_report_of_an_evaluation_has_no_training_sections(tmp_path: Path, found: dict[str, Any]) -> None:
    write_evaluation(tmp_path, RunSpec(), found)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.mismatched == [] and page.open == []
    for words in ("before training", "Steps", "No step has been", "Curves", "Events"):
        assert words not in page.text, words
    told = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    for words in (
        "Held-out accuracy is 0.500.",
        "greedy accuracy 0.500 0.150 to 0.850",
        "greedy mean reward 0.550 0.200 to 0.900",
        "distinct-1 0.612",
        "&lt;2&gt;",
    ):
        assert words in told, words
    for words in (
        "2 per prompt pass@1 0.375 0.125 to 0.625",
        "2 per prompt pass@2 0.750 0.300 to 0.950",
        "greedy score of liked 0.700 0.410 to 0.930",
        "2 per prompt distinct-1 in prompt 0.834",
        "greedy accuracy 4 0.250 0.500 0.250 -0.110 to 0.610 2 1 0.875",
        "other/model cd",
    ):
        assert (words in told) == (found is FOUND), words
    # Shares are drawn with their brackets: from 15 to 85 %, 12.5 to 62.5 % and 30 to 95 %.
    brackets = [attributes["style"] for _, attributes in page.tags if attributes.get("class") == "interval"]
    assert (
        brackets
        == ["left:15.00%;width:70.00%", "left:12.50%;width:50.00%", "left:30.00%;width:65.00%"][: len(brackets)]
    )
    assert len(brackets) == (3 if found is FOUND else 1)


def test_the_report_of_graded_rewards_has_their_mean_and_no_accuracy(tmp_path: Path) -> None:
    assert write_evaluation(tmp_path, RunSpec(), GRADED)["reward_mean"] == 1.5
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page, told = Page(text), " ".join(re.sub(r"<[^>]*>", " ", text).split())
    assert page.mismatched == [] and page.open == []
    assert "Held-out mean reward is 1.500." in told
    assert "greedy mean reward 1.500 1.250 to 1.750" in told
    assert "accuracy" not in page.text
    assert not [tag for tag, attributes in page.tags if attributes.get("class") == "track"], "a mean is not a share"


def test_report_and_headline_without_valid_rewards(tmp_path: Path) -> None:
    sample = {"prompt": "1+1=", "completion": "2", "answer": "2", "reward": None, "correct": None}
    figures = {name: value for name, value in GRADED.items() if not name.startswith("reward_mean")}
    found = {**figures, "invalid": 4, "samples": [sample]}
    assert evaluation_headline(found) == "no valid reward in 4 held-out completions"
    write_evaluation(tmp_path, RunSpec(), found)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page, told = Page(text), " ".join(re.sub(r"<[^>]*>", " ", text).split())
    assert page.mismatched == [] and page.open == []
    assert "No held-out completion has a valid reward." in told
    assert "greedy without a valid reward 4" in told


def test_answers_whose_rewards_differ_come_first(tmp_path: Path) -> None:
    write_evaluation(tmp_path, RunSpec(), FOUND)
    told = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert told.index("1+1=") < told.index("1+2=")
    write_evaluation(tmp_path / "alone", RunSpec(), ALONE)
    told = Page((tmp_path / "alone" / "report.html").read_text(encoding="utf-8")).text
    assert told.index("1+2=") < told.index("1+1=")
