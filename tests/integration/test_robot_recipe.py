"""The recipe `robot` through the real command line, shortened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.robot_story import main as tell
from tests.commands import run_fork
from tidemill.pipeline.pipeline_page import context
from tidemill.pipeline.state import PipelineFolder

SHORT = (
    *("--robot.task=swingup", "--robot.worlds=64", "--stage.train.trainer.steps=2", "--stage.train.pool.kind=static"),
    *("--stage.twin.twin.engine=mujoco", "--stage.twin.twin.min_success=0", "--stage.twin.twin.max_falls=1"),
    *("--stage.twin.twin.mass=[1.0]",),
    *("--stage.bundle.bundle.deadline_ms=20", "--stage.bundle.bundle.decisions=100"),
)


@pytest.mark.timeout(300)
def test_a_robot_is_trained_checked_and_bundled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "robot"
    ran = run_fork("train", "@robot", *SHORT, f"--run.dir={run}", "--json", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert [stage["state"] for stage in ran.data["stages"]] == ["done"] * 3
    train, twin, bundle = (run / stage["run_dir"] for stage in ran.data["stages"])
    plays = json.loads((train / "episodes.json").read_bytes())["plays"]
    assert [play["when"] for play in plays] == ["before", "after"]
    assert "Passed." in (twin / "report.html").read_text(encoding="utf-8")
    assert (bundle / "bundle" / "SHA256SUMS").is_file()
    shown = context(PipelineFolder(run))
    assert shown["headline"].startswith("Success ") and "twin is finished: passed" in shown["headline"]
    assert [bar["label"] for bar in shown["bars"]] == ["before", "after"] and shown["main"] == "train"
    assert tell([str(run)]) == 0
    story = capsys.readouterr().out
    assert "before training: success 0." in story and "n = 64" in story and f"file://{run / 'report.html'}" in story
