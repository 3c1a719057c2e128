from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Pretend, Run
from tidemill.config.schema import RunSpec

Asked = list[tuple[RunSpec, Path | None]]


@pytest.fixture
def asked(pretend: Pretend) -> Asked:
    calls: Asked = []

    def evaluate(spec: RunSpec, *, model_folder: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
        calls.append((spec, model_folder))
        progress("half way")
        return {"greedy_accuracy": 0.8125, "n": 64, "samples": [{"prompt": "1+1="}]}

    pretend("tidemill.runtime.evaluate", "evaluate", evaluate)
    return calls


def test_figures_for_people_and_programs(run: Run, asked: Asked) -> None:
    ran = run("eval", "--eval.prompts=64")
    assert ran.code == 0
    assert ran.out.splitlines() == ["greedy_accuracy  0.8125", "n                64"]
    assert ran.err == "half way\n"
    assert run("eval", "--json").data["samples"] == [{"prompt": "1+1="}]
    assert asked[0][0].eval.prompts == 64
    assert asked[0][1] is None


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}", encoding="utf-8")
    return path


def test_a_checkpoint_brings_its_runs_configuration(run: Run, asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "D").mkdir()
    (tmp_path / "D" / "config.toml").write_text("[run]\nseed = 7\n", encoding="utf-8")
    early, late = (checkpoint(tmp_path / "D" / "checkpoints" / name) for name in ("step_9", "step_10"))
    (tmp_path / "D" / "checkpoints" / "step_11.partial").mkdir()
    assert run("eval", "--checkpoint", "D/checkpoints/step_9").code == 0
    assert run("eval", "--checkpoint", "D", "--eval.prompts=3").code == 0
    assert run("eval", "--checkpoint=D/checkpoints").code == 0
    assert [spec.run.seed for spec, _ in asked] == [7, 7, 7]
    assert asked[1][0].eval.prompts == 3
    folders = [folder.resolve() for _, folder in asked if folder]
    assert folders == [early, late, late]  # by number, not by spelling


def test_a_recipe_goes_before_the_checkpoints_own(run: Run, asked: Asked, tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    (tmp_path / "r.toml").write_text("[run]\nseed = 1\n", encoding="utf-8")
    assert run("eval", "@r.toml", "--checkpoint", "model", "--checkpoint.keep_last=3").code == 0
    assert asked[0][0].run.seed == 1
    assert asked[0][0].checkpoint.keep_last == 3  # the option does not take the section's keys
    assert asked[0][1] == Path("model")


@pytest.mark.parametrize(
    ("folder", "says"),
    [("none", "error: --checkpoint none: no such folder"), ("empty", "error: --checkpoint empty: holds no checkpoint")],
)
def test_no_checkpoint_there(run: Run, asked: Asked, tmp_path: Path, folder: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("eval", "--checkpoint", folder)
    assert ran.code == 2
    assert ran.err.startswith(says)
    assert asked == []


def test_dry_run(run: Run, asked: Asked) -> None:
    assert "evaluation  at most 64 held-out prompts" in run("eval", "--dry-run").out
    assert asked == []
