from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pretend_stages import Stages
from tests.unit.cli.conftest import Run
from tidemill.config.pipeline import load_recipe
from tidemill.pipeline import stage_kinds

RECIPE = """\
[run]
name = "two"
[model]
source = "char"
[trainer]
steps = 3
[[stage]]
name = "first"
kind = "rl"
[[stage]]
name = "second"
kind = "eval"
model.source = "stage:first"
"""
DONE = [
    "  first   seed 0",
    "  second  seed 0",
    "figures and reports: D/report.html",
]


@pytest.fixture
def stages(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """A recipe `r.toml` in the working directory, and stages that take no time."""
    (tmp_path / "r.toml").write_text(RECIPE, encoding="utf-8")
    pretend = Stages()
    for kind, runner in pretend.runners.items():
        monkeypatch.setitem(stage_kinds.RUNNERS, kind, runner)
    return pretend


def told(err: str) -> list[list[str]]:
    """The plan's lines, a list of words each."""
    lines = [line.split() for line in err.splitlines()]
    start = next(index for index, words in enumerate(lines) if words[:2] == ["stage", "kind"])
    return [words for words in lines[start + 2 : start + 5] if words]


def test_the_output_has_plan_stages_and_results(run: Run, stages: Stages) -> None:
    ran = run("train", "@r.toml", "--run.dir", "D")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines() == ["finished: 2 of 2 stages done, 2 of them now", *DONE]
    assert told(ran.err) == [
        ["first", "rl", "char", "run", "3", "steps,", "192", "samples"],
        ["second", "eval", "stage:first", "first", "waits", "up", "to", "64", "prompts"],
    ]
    assert "1 of 2: first (rl)" in ran.err
    assert "2 of 2: second (eval)" in ran.err
    assert "first: seed 0, in" in ran.err
    again = run("train", "@r.toml", "--run.dir", "D")
    assert again.out.splitlines() == ["nothing to do: 2 of 2 stages done, 0 of them now", *DONE]
    assert [line[-4:] for line in told(again.err)] == [["3", "steps,", "192", "samples"], ["up", "to", "64", "prompts"]]
    assert all("done" in line for line in told(again.err))


def test_one_json_object(run: Run, stages: Stages) -> None:
    data: dict[str, Any] = run("train", "@r.toml", "--run.dir=D", "--json").data
    assert data["finished"] is True
    assert data["run_dir"] == "D"
    assert [stage["name"] for stage in data["stages"]] == ["first", "second"]


def test_a_change_is_shown_in_the_plan(run: Run, stages: Stages) -> None:
    run("train", "@r.toml", "--run.dir=D")
    ran = run("train", "@r.toml", "--run.dir=D", "--stage.first.trainer.steps", "4", "--dry-run")
    assert "run (trainer.steps changed)" in ran.out
    assert "waits (first changed)" in ran.out
    assert "stale, kept: first-" in ran.out
    assert not stages.worked[6:]


def test_interrupted(run: Run, stages: Stages) -> None:
    stages.interrupt_at = 1
    ran = run("train", "@r.toml", "--run.dir=D")
    assert ran.code == 130
    assert ran.out.splitlines() == [
        "interrupted: 0 of 2 stages done, 0 of them now",
        "  first   interrupted",
        "  second  due",
        "the same command resumes it",
        "figures and reports: D/report.html",
    ]
    assert run("train", "@r.toml", "--run.dir=D", "--json").data["interrupted"] is True
    stages.interrupt_at = None
    ran = run("train", "@r.toml", "--run.dir=D")
    assert ran.code == 0
    assert "resume" in told(ran.err)[0]


def test_ctrl_c_where_no_stage_catches_it(run: Run, stages: Stages) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    stages.power = press
    ran = run("train", "@r.toml", "--run.dir=D")
    assert ran.code == 130
    assert "  first   interrupted" in ran.out
    assert "the same command resumes it" in ran.out
    assert run("train", "@r.toml", "--run.dir=D", "--json").data["interrupted"] is True
    assert "The pipeline was interrupted" in Path("D/report.html").read_text(encoding="utf-8")


def test_dry_run_shows_plan_and_configuration_and_makes_nothing(run: Run, stages: Stages, tmp_path: Path) -> None:
    ran = run("train", "@r.toml", "--run.dir=D", "--dry-run")
    assert ran.code == 0
    assert not (tmp_path / "D").exists()
    (tmp_path / "written.toml").write_text(ran.out.split("\n stage ")[0], encoding="utf-8")
    assert load_recipe(["@written.toml"]) == load_recipe(["@r.toml", "--run.dir=D"])
    data = run("train", "@r.toml", "--run.dir=D", "--dry-run", "--json").data
    assert [(each["stage"], each["action"], each["inputs"]) for each in data["plan"]] == [
        ("first", "run", []),
        ("second", "wait", ["first"]),
    ]
    assert data["config"]["stage"][0]["trainer"]["steps"] == 3
    assert "batch" not in data["config"]["stage"][1]


def test_an_unused_section_is_shown_in_the_plan(run: Run, stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[preference]\nbeta = 0.2\n" + RECIPE, encoding="utf-8")
    words = "r.toml:1: no stage uses [preference] (only dpo)"
    assert run("train", "@r.toml", "--run.dir=D", "--dry-run", "--json").data["unused"] == [words]
    ran = run("train", "@r.toml", "--run.dir=D")
    assert ran.code == 0
    assert f"warning: {words}" in ran.err


def test_only_from_and_prune(run: Run, stages: Stages) -> None:
    ran = run("train", "@r.toml", "--run.dir=D", "--only", "second")
    assert ran.code == 2
    assert "stage second: needs stage first, which is not finished" in ran.err
    assert run("train", "@r.toml", "--run.dir=D", "--only", "first").code == 0
    assert run("train", "@r.toml", "--run.dir=D", "--from=second").code == 0
    assert [name.rpartition("-")[0] for name, _ in stages.worked] == ["first"] * 3 + ["second"] * 3
    assert run("train", "@r.toml", "--run.dir=D", "--run.seed=1", "--prune-stale").code == 0
    assert len(list(Path("D/stages").iterdir())) == 2


@pytest.mark.parametrize("option", [["--only", "x"], ["--from", "x"], ["--prune-stale"]])
def test_a_run_without_stages_takes_none_of_these(run: Run, option: list[str]) -> None:
    ran = run("train", *option)
    assert ran.code == 2
    assert f"{option[0]}: this recipe has no stages" in ran.err


def test_a_run_and_a_pipeline_do_not_share_a_directory(run: Run, stages: Stages) -> None:
    run("train", "@r.toml", "--run.dir=D")
    ran = run("train", "--run.dir=D")
    assert ran.code == 2
    assert "D: the directory contains a pipeline" in ran.err


def test_the_report_is_written_again_at_any_time(run: Run, stages: Stages) -> None:
    run("train", "@r.toml", "--run.dir=D")
    Path("D/report.html").unlink()
    assert run("report", "D").out == "D/report.html\n"
    page = Path("D/report.html").read_text(encoding="utf-8")
    assert "2 of 2 stages finished" in page


def test_the_help_knows_stages(run: Run) -> None:
    out = run("train", "--help").out
    assert "--only" in out
    assert "--from" in out
    assert "export.dtype" in run("train", "--help-all").out
