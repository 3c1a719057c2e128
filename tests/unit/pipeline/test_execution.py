from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.model_folders import save_folder
from tests.model_shapes import llama
from tests.pretend_stages import PowerCut, Quiet, Stages, pipeline, read
from tidemill.config.pipeline import load_recipe
from tidemill.core.errors import UserError
from tidemill.pipeline.execution import plan_pipeline, run_pipeline
from tidemill.pipeline.stage_plan import EVERYTHING, Choice

RECIPE = """\
[run]
name = "three"
[model]
source = "char"
[sampling]
max_new_tokens = 64
[[stage]]
name = "first"
kind = "rl"
[[stage]]
name = "second"
kind = "rl"
model.source = "stage:first"
[[stage]]
name = "third"
kind = "eval"
model.source = "stage:second"
"""


class World:
    """One pipeline's directory, and its stages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stages = folder, Stages()
        self.quiet = Quiet()

    def run(self, *overrides: str, choice: Choice = EVERYTHING, prune_stale: bool = False) -> dict[str, Any]:
        self.quiet = Quiet()
        self.stages.worked.clear()
        return run_pipeline(
            pipeline(self.folder, RECIPE, *overrides),
            reporter=self.quiet,
            choice=choice,
            prune_stale=prune_stale,
            runners=self.stages.runners,
        )

    def run_again(self, recipe: str) -> list[str]:
        """The stages that a run of another recipe starts."""
        self.quiet = Quiet()
        run_pipeline(pipeline(self.folder, recipe), reporter=self.quiet, runners=self.stages.runners)
        return self.quiet.started

    def results(self) -> dict[str, Any]:
        """The recorded inputs of every finished stage of the newest run."""
        state = json.loads((self.folder / "D" / "pipeline.json").read_text())
        return {
            stage["name"]: read(self.folder / "D" / stage["folder"] / stage["product"])
            for stage in state["stages"]
            if stage["product"]
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_stages_run_in_order_with_the_outputs_of_earlier_ones(world: World) -> None:
    summary = world.run()
    assert world.quiet.started == ["first", "second", "third"]
    assert world.quiet.said == ["first: seed 0", "second: seed 0", "third: seed 0"]
    first = {"seed": 0, "from": "char"}
    second = {"seed": 0, "from": first}
    assert world.results() == {"first": first, "second": second, "third": {"seed": 0, "from": second}}
    assert (summary["finished"], summary["interrupted"], summary["outcome"]) == (True, False, "finished")
    assert [(stage["name"], stage["state"], stage["ran"]) for stage in summary["stages"]] == [
        ("first", "done", True),
        ("second", "done", True),
        ("third", "done", True),
    ]
    assert summary["stages"][0]["figures"] == {"seed": 0}
    stored = json.loads((world.folder / "D" / "summary.json").read_text())
    assert stored == summary


def test_finished_stages_are_not_repeated(world: World) -> None:
    world.run()
    summary = world.run("--telemetry.live=false", "--run.name=other")
    assert world.stages.worked == []
    assert [stage["ran"] for stage in summary["stages"]] == [False] * 3
    assert summary["finished"]


def test_a_changed_stage_and_its_dependents_run_again(world: World) -> None:
    world.run()
    world.run("--stage.second.run.seed=5")
    assert world.quiet.started == ["second", "third"]
    assert world.results()["third"] == {"seed": 0, "from": {"seed": 5, "from": {"seed": 0, "from": "char"}}}
    assert [name.rpartition("-")[0] for name in world.quiet.plans[0].stale] == ["second", "third"]
    world.run()  # unchanged: the former results still exist
    assert world.stages.worked == []
    assert world.results()["third"]["from"]["seed"] == 0


def test_stale_results_are_kept_until_pruned(world: World) -> None:
    world.run()
    world.run("--run.seed=5")
    folders = sorted((world.folder / "D" / "stages").iterdir())
    assert len(folders) == 6
    assert len(json.loads((world.folder / "D" / "pipeline.json").read_text())["stale"]) == 3
    world.run("--run.seed=5", prune_stale=True)
    left = sorted((world.folder / "D" / "stages").iterdir())
    assert left == sorted(world.folder / "D" / "stages" / each.folder for each in world.quiet.plans[0].stages)
    assert json.loads((world.folder / "D" / "pipeline.json").read_text())["stale"] == []
    assert world.stages.worked == []


def test_an_interrupted_pipeline_resumes(world: World) -> None:
    world.stages.interrupt_at = 4  # of 9 steps: one into the second stage
    summary = world.run()
    assert (summary["interrupted"], summary["finished"]) == (True, False)
    assert [stage["state"] for stage in summary["stages"]] == ["done", "interrupted", "due"]
    world.stages.interrupt_at = None
    world.run()
    assert [each.action for each in world.quiet.plans[0].stages] == ["done", "resume", "wait"]
    assert [step for _, step in world.stages.worked] == [1, 2, 0, 1, 2]


def test_a_failed_stage_keeps_finished_ones(world: World) -> None:
    def fails() -> None:
        if len(world.stages.worked) == 4:
            raise UserError("no more of it", where="here", hint="try again")

    world.stages.power = fails
    with pytest.raises(UserError, match="no more of it"):
        world.run()
    state = json.loads((world.folder / "D" / "summary.json").read_text())
    assert state["outcome"] == "failed"
    assert [stage["state"] for stage in state["stages"]] == ["done", "failed", "due"]
    assert state["error"] == "UserError: here: no more of it; try again"
    ending = "A stage failed; the same command resumes the pipeline."
    assert f"{ending} {state['error']}" in (world.folder / "D" / "report.html").read_text()
    world.stages.power = lambda: None
    summary = world.run()
    assert summary["finished"] and "error" not in summary
    assert world.quiet.started == ["second", "third"]


def test_an_input_that_changes_while_the_stage_runs_is_an_error(world: World) -> None:
    model = save_folder(llama(), world.folder / "base")
    (model / "weights").write_text("old")

    def changes() -> None:
        if len(world.stages.worked) == 2:
            (model / "weights").write_text("new")

    world.stages.power = changes
    with pytest.raises(UserError) as caught:
        world.run(f"--model.source={model}")
    assert caught.value.where == "model.source of stage first"
    world.stages.power = lambda: None
    world.run(f"--model.source={model}")
    assert world.quiet.started == ["first", "second", "third"]
    assert world.results()["first"] == {"seed": 0, "from": "new"}


def test_a_deleted_output_is_made_again(world: World) -> None:
    world.run()
    state = json.loads((world.folder / "D" / "pipeline.json").read_text())["stages"][0]
    (world.folder / "D" / state["folder"] / state["product"] / "made.json").unlink()
    (world.folder / "D" / state["folder"] / state["product"]).rmdir()
    world.run()
    assert world.quiet.started == ["first"]
    assert world.results()["first"] == {"seed": 0, "from": "char"}


def test_an_unfinished_repetition_is_not_a_result(world: World) -> None:
    world.run()
    state = json.loads((world.folder / "D" / "pipeline.json").read_text())["stages"][0]
    product = world.folder / "D" / state["folder"] / state["product"]
    (product / "made.json").unlink()
    product.rmdir()

    def cut() -> None:
        if product.exists():
            raise PowerCut

    world.stages.power = cut
    with pytest.raises(PowerCut):
        world.run()
    assert product.exists()
    world.stages.power = lambda: None
    world.run()
    assert world.quiet.started == ["first"]
    assert world.results()["first"] == {"seed": 0, "from": "char"}


def test_the_directory_may_be_moved(world: World, tmp_path: Path) -> None:
    world.stages.interrupt_at = 4
    world.run()
    world.stages.interrupt_at = None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "D").rename(tmp_path / "elsewhere" / "D")
    moved = World(tmp_path / "elsewhere")
    moved.run()
    assert [step for _, step in moved.stages.worked] == [1, 2, 0, 1, 2]
    stage = next((tmp_path / "elsewhere" / "D" / "stages").glob("second-*"))
    assert str(tmp_path / "elsewhere") in tomllib.loads((stage / "config.toml").read_text())["model"]["source"]


def test_only_one_stage(world: World) -> None:
    world.run(choice=Choice(only="first"))
    assert world.quiet.started == ["first"]
    with pytest.raises(UserError, match="needs stage second") as caught:
        world.run(choice=Choice(only="third"))
    assert caught.value.where == "stage third"
    assert not world.run(choice=Choice(start="second", only=None))["interrupted"]
    assert world.quiet.started == ["second", "third"]


def test_the_written_configuration_parses_back_equal(world: World) -> None:
    recipe = pipeline(world.folder, RECIPE, "--stage.second.trainer.steps=3")
    world.run("--stage.second.trainer.steps=3")
    again = load_recipe([f"@{world.folder / 'D' / 'config.toml'}"])
    assert again == recipe


def test_partial_files_of_a_killed_process_are_deleted(world: World) -> None:
    (world.folder / "D").mkdir()
    for name in ("config.toml", "report.html"):
        (world.folder / "D" / f".{name}.0123abcd.partial").touch()
    world.run()
    assert not list((world.folder / "D").glob(".*.partial"))


def test_planning_writes_nothing(world: World) -> None:
    plan = plan_pipeline(pipeline(world.folder, RECIPE))
    assert [each.action for each in plan.stages] == ["run", "wait", "wait"]
    assert not (world.folder / "D").exists()


def test_a_stage_that_another_process_runs_is_refused(world: World) -> None:
    world.run()
    (first,) = (path for path in (world.folder / "D" / "stages").iterdir() if path.name.startswith("first-"))
    (first / "stage.json").unlink()
    with FileLock(first / ".stage.lock"), pytest.raises(UserError, match="another process") as caught:
        world.run()
    assert caught.value.where == str(first)


@pytest.mark.parametrize("choice", [Choice(only="first"), EVERYTHING])
def test_two_processes_run_two_stages_at_the_same_time(world: World, choice: Choice) -> None:
    """One runs the second stage while the other is in the first; both see what the other has done."""
    recipe = RECIPE.replace('model.source = "stage:first"\n', "", 1)  # the second stage needs nothing
    other = World(world.folder)

    def run(one: World, choice: Choice) -> dict[str, Any]:
        return run_pipeline(pipeline(one.folder, recipe), reporter=one.quiet, choice=choice, runners=one.stages.runners)

    def meanwhile() -> None:
        if world.stages.worked and not other.stages.worked:
            assert run(other, Choice(only="second"))["stages"][0]["state"] == "running"

    world.stages.power = meanwhile
    summary = run(world, choice)
    whole = choice == EVERYTHING
    assert [(each["name"], each["state"], each["ran"]) for each in summary["stages"]] == [
        ("first", "done", True),
        ("second", "done", False),
        ("third", "done" if whole else "left out", whole),
    ]
    assert not any(folder.startswith("second-") for folder, _ in world.stages.worked)
    assert world.run_again(recipe) == ([] if whole else ["third"])


def test_a_second_run_of_the_whole_pipeline_is_refused(world: World) -> None:
    other = World(world.folder)

    def meanwhile() -> None:
        if world.stages.worked and not other.quiet.plans:
            with pytest.raises(UserError, match="another process"):
                other.run()
            world.stages.power = lambda: None

    world.stages.power = meanwhile
    assert world.run()["finished"]


def test_a_directory_of_a_single_run_is_refused(world: World) -> None:
    (world.folder / "D").mkdir()
    (world.folder / "D" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="single run") as caught:
        world.run()
    assert caught.value.where == str(world.folder / "D")
    assert sorted(path.name for path in (world.folder / "D").iterdir()) == ["manifest.json"]


def test_a_file_in_place_of_the_directory_is_an_error(world: World) -> None:
    (world.folder / "D").write_text("")
    with pytest.raises(UserError) as caught:
        world.run()
    assert caught.value.where == str(world.folder / "D")


def test_a_kill_while_pruning_leaves_no_partial_result(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()

    def cut(path: Path) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr("tidemill.pipeline.state.shutil.rmtree", cut)
        with pytest.raises(PowerCut):
            world.run("--run.seed=5", prune_stale=True)
    world.run("--run.seed=5")
    assert world.quiet.started == ["first", "second", "third"]
    assert not [each for each in (world.folder / "D" / "stages").iterdir() if each.name.startswith(".")]
