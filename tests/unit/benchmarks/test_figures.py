"""Pages with figures are rendered from templates and result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import rendered
from scripts.site import explorations
from tidemill.config.schema import EngineConfig

RESULTS = {
    "speed": {"cases": [{"case": "a b", "s": 1.26}, {"case": "c", "s": 2.04}], "share": 0.748, "tokens": 30721},
    "runs": [
        {"kind": "ours", "seed": 0, "accuracy": {"after": 0.205}, "steps": [3, 4]},
        {"kind": "ours", "seed": 1, "accuracy": {"after": 0.075}, "steps": [2]},
        {"kind": "random", "seed": 0, "accuracy": {"after": 0.0}, "steps": []},
    ],
    "memory": [{"forecast": 11, "true": 10}, {"forecast": 4, "true": 5}],
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
        ("outcome(forecast.forecast.step_s[0] > 2)", "reached"),
        ("outcome(forecast.forecast.step_s[0] > 3)", "**missed**"),
        ('percent(largest_error(memory, "forecast", "true"))', "20 %"),  # |4 / 5 - 1|
        ('default("engine.tick_s")', str(EngineConfig().tick_s)),
    ],
)
def test_an_expression_is_replaced_by_its_figure(expression: str, shown: str, tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    template.write_text(f"| **{{{{ {expression} }}}}** s | 7 |\n")
    assert rendered(template, RESULTS) == f"| **{shown}** s | 7 |\n"


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
        'table("no-page").s',
        'default("engine.no_key")',
    ],
)
def test_an_expression_without_a_figure_is_an_error_with_its_line(expression: str, tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    template.write_text(f"# Title\n\n{{{{ fixed({expression}, 1) }}}} s\n")
    with pytest.raises(ValueError, match="line 3: "):
        rendered(template, RESULTS)


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A repository with two results, one table and the templates of four pages, which are up to date."""
        for folder in ("docs", "results/gpu", "pages/results", "pages/explore"):
            (tmp_path / folder).mkdir(parents=True)
        monkeypatch.setattr(figures, "ROOT", tmp_path)
        monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
        monkeypatch.setattr(figures, "PAGES", tmp_path / "pages")
        (tmp_path / "results" / "speed.json").write_text('{"s": 2.4}')
        (tmp_path / "results" / "gpu" / "card.json").write_text('{"s": 0.5}')
        monkeypatch.setattr(explorations, "TABLES", {"lag": lambda: {"tokens": 2048, "samples": 128}})
        (tmp_path / "pages" / "README.md").write_text("# Speed\n\nIt takes {{ fixed(speed.s, 1) }} s.\n")
        (tmp_path / "pages" / "results" / "speed.md").write_text("{{ fixed(speed.s, 0) }} s\n")
        (tmp_path / "pages" / "results" / "card.md").write_text("# A card\n{{ gpu.card.s }} s\n")
        (tmp_path / "pages" / "explore" / "lag.md").write_text(
            '{% set drawn = table("lag") %}\n# Lag\n\n{{ drawn.tokens }} tokens\nof {{ drawn.samples }} samples.\n'
        )
        assert self.run(monkeypatch) == 0
        return tmp_path

    def run(self, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
        monkeypatch.setattr("sys.argv", ["figures", *options])
        return figures.main()

    def test_pages_are_text_without_marks(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (repository / "README.md").read_text() == "# Speed\n\nIt takes 2.4 s.\n"
        assert (repository / "docs" / "results" / "speed.md").read_text() == "2 s\n"
        assert self.run(monkeypatch, "--check") == 0

    @pytest.mark.parametrize(
        ("file", "text", "message"),
        [
            ("results/speed.json", '{"s": 2.5}', "README.md:3: 'It takes 2.4 s.\\n' should be 'It takes 2.5 s.\\n'"),
            ("results/gpu/card.json", '{"s": 0.4}', "docs/results/card.md:2: '0.5 s\\n' should be '0.4 s\\n'"),
            ("README.md", "# Speed\n\nIt takes 2.9 s.\n", "README.md:3: "),  # the page was edited instead
            ("README.md", "# Speed\nMore.\n\nIt takes 2.4 s.\n", "README.md:2: 'More.\\n' should be ''"),
            ("docs/results/speed.md", "", "docs/results/speed.md:1: '' should be '2 s\\n'"),
            ("pages/new.md", "New.\n", "docs/new.md:1: '' should be 'New.\\n'"),
        ],
    )
    def test_the_check_names_the_page_the_line_and_its_template(
        self,
        file: str,
        text: str,
        message: str,
        repository: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (repository / file).write_text(text)
        assert self.run(monkeypatch, "--check") == 1
        errors = capsys.readouterr().err
        assert message in errors
        page = message.partition(":")[0]
        assert f"{page} differs from its template: edit pages/{page.removeprefix('docs/')} and run" in errors
        assert self.run(monkeypatch) == 0
        assert self.run(monkeypatch, "--check") == 0

    def test_the_check_names_the_lines_of_a_changed_table(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (repository / "docs" / "explore" / "lag.md").read_text() == "# Lag\n\n2048 tokens\nof 128 samples.\n"
        monkeypatch.setattr(explorations, "TABLES", {"lag": lambda: {"tokens": 4096, "samples": 256}})
        assert self.run(monkeypatch, "--check") == 1
        errors = capsys.readouterr().err
        assert "docs/explore/lag.md:3: '2048 tokens\\n' should be '4096 tokens\\n'" in errors
        assert "docs/explore/lag.md:4: 'of 128 samples.\\n' should be 'of 256 samples.\\n'" in errors

    @pytest.mark.usefixtures("repository")
    def test_a_table_that_no_template_names_is_not_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unused() -> dict[str, int]:
            raise AssertionError("computed")

        monkeypatch.setattr(explorations, "TABLES", explorations.TABLES | {"unused": unused})
        assert self.run(monkeypatch, "--check") == 0

    def test_a_template_with_an_unknown_result_fails_and_its_page_stays(
        self, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (repository / "pages" / "results" / "speed.md").write_text("\n{{ fixed(pace.s, 0) }} s\n")
        assert self.run(monkeypatch) == 1
        assert "pages/results/speed.md: line 2: 'pace' is undefined" in capsys.readouterr().err
        assert (repository / "docs" / "results" / "speed.md").read_text() == "2 s\n"
