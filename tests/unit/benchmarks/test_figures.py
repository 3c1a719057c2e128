"""Figures in documents come from result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import current

RESULTS = {
    "speed": {"cases": [{"case": "a b", "s": 1.26}, {"case": "c", "s": 2.04}], "share": 0.748, "tokens": 30721},
    "runs": [
        {"kind": "ours", "seed": 0, "accuracy": {"after": 0.205}, "steps": [3, 4]},
        {"kind": "ours", "seed": 1, "accuracy": {"after": 0.075}, "steps": [2]},
        {"kind": "random", "seed": 0, "accuracy": {"after": 0.0}, "steps": []},
    ],
    "forecast": {
        "actual": {"step_s": [1.0, 3.0], "total_s": [8.0, 8.0]},
        "forecast": {"step_s": [2.1], "total_s": [7.0]},
    },
}


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ('fixed(case(speed, "a b").s, 1)', "1.3"),
        ("span([speed.cases[1].s, speed.cases[0].s], 2)", "1.26-2.04"),
        ("percent(speed.share)", "75 %"),
        ("percent(speed.share, 1)", "74.8 %"),
        ("shown([speed.cases[0].s, speed.cases[1].s], 1)", "1.3, 2.0"),
        ("shown([speed.cases[0].s, none], 1)", "1.3, not reached"),
        ("fixed(median([1, 5, 3]), 0)", "3"),
        ("percents([0.285, 0.5])", "29 %, 50 %"),  # halves up, though 100 * 0.285 = 28.499...
        ("percent(-0.048)", "−5 %"),
        ("fixed(-0.0003, 3)", "0.000"),
        ("fixed(speed.tokens, 0)", "30,721"),
        ("fixed(speed.tokens, -1)", "30,720"),
        ("signed_percents([0.0089, -0.053, 0.0004], 1)", "+0.9 %, −5.3 %, 0.0 %"),
        ("power(0.0000072)", "7.2e-6"),
        ('fixed(row(runs, kind="random", seed=0).accuracy.after, 1)', "0.0"),
        ('shown(values(runs, "accuracy.after", kind="ours"), 2)', "0.21, 0.08"),
        ('span(values(runs, "steps"), 0)', "2-4"),
        ("percent(forecast_error(forecast), 1)", "12.5 %"),  # |7 / 8 - 1|; of steps |2.1 / 2 - 1| = 5 %
        ('signed_percents(forecast_errors(forecast, "step_s"))', "+5 %"),
        ("fixed(deviation(forecast), 2)", "0.71"),  # sqrt(2) / 2
        ('shown(means(runs[:2], "steps"), 1)', "3.5, 2.0"),
        ("outcome(forecast.forecast.step_s[0] > 2)", "reached"),
        ("outcome(forecast.forecast.step_s[0] > 3)", "**missed**"),
        ("fixed(standard_error([1, 3]), 1)", "1.0"),  # sqrt(2) / sqrt(2)
    ],
)
def test_an_expression_is_replaced_by_its_figure(expression: str, shown: str) -> None:
    text = f"| **<!--= {expression} -->9<!--/-->** s | 7 |"
    assert current(text, RESULTS) == f"| **<!--= {expression} -->{shown}<!--/-->** s | 7 |"


@pytest.mark.parametrize(
    "expression",
    [
        'case(speed, "d").s',
        "speed.cases[7].s",
        "speed.unknown",
        "other.s",
        "fixed(",
        'row(runs, kind="x")',
        'values(runs, "speed")',
        "speed.cases",
    ],
)
def test_an_expression_without_a_figure_is_an_error(expression: str) -> None:
    with pytest.raises(ValueError, match="fixed"):
        current(f"<!--= fixed({expression}, 1) -->9<!--/-->".replace("fixed(fixed(, 1)", "fixed("), RESULTS)


def test_a_figure_that_differs_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "speed.json").write_text('{"s": 2.5}')
    (tmp_path / "README.md").write_text("<!--= fixed(speed.s, 1) -->2.4<!--/--> s")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["figures", "--check"])
    assert figures.main() == 1
    assert "README.md: 2.4 is 2.5" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["figures"])
    assert figures.main() == 0
    assert (tmp_path / "README.md").read_text() == "<!--= fixed(speed.s, 1) -->2.5<!--/--> s"


@pytest.mark.parametrize(
    "text",
    [
        "<!--=percent(speed.share) -->75 %<!--/-->",
        "<!--= percent(speed.share) -->75 %",
        "<!--= percent(\nspeed.share) -->75 %<!--/-->",
        "<!--= percent(speed.share) -->75 %<!-- / -->",
        "75 %<!--/-->",
    ],
)
def test_a_malformed_comment_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="malformed or missing"):
        current(f"| <!--= percent(speed.share) -->75 %<!--/--> | {text} |", RESULTS)
