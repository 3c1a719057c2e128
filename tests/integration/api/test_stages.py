"""Recipes with stages, run from Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tidemill as tm
from tests.char_task import char_task
from tests.commands import run_here

RECIPE = (
    char_task()
    + """\
[sampling]
max_new_tokens = 3
[engine]
batch_invariant = true
[batch]
prompts = 4
group_size = 8
[trainer]
threads = 1
[eval]
every_steps = 0
prompts = 8
[checkpoint]
every_steps = 2
[data]
path = "shown.jsonl"
end_token = false
[supervised]
minibatch_tokens = 64
microbatch_tokens = 64

[[stage]]
name = "sft"
kind = "sft"
trainer.steps = 4

[[stage]]
name = "rl"
kind = "rl"
model.source = "stage:sft"
trainer.steps = 4
"""
)
ROWS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(9) for b in range(9)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    rows = [{"prompt": row["prompt"], "completion": row["answer"] + "\n"} for row in ROWS]
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


class StopOnce(tm.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if self.steps == [1, 2]:
            self.stop("enough")


def test_stages_give_the_weights_of_the_command_line_and_resume_after_a_stop(tmp_path: Path) -> None:
    ran = run_here("train", "@r.toml", "--run.dir=cli", "--stage.rl.trainer.steps=3", "--json")
    assert ran.code == 0
    stop = StopOnce()
    arguments: dict[str, Any] = {"run_dir": "api", "overrides": {"stage.rl.trainer.steps": 3}, "callbacks": [stop]}
    run = tm.train("r.toml", **arguments)
    assert (run.interrupted, run.finished, list(run.stages)) == (True, False, ["sft", "rl"])
    run = tm.train("r.toml", **arguments)
    assert (run.interrupted, run.finished, stop.steps) == (False, True, [1, 2, 3])
    assert run.weights_digest == tm.Run("cli").weights_digest
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert [stage["state"] for stage in run.summary["stages"]] == ["done", "done"]
    assert "sft" in run._repr_html_()
    again = tm.train(run_dir="api")
    assert not any(stage["ran"] for stage in again.summary["stages"])


def test_rows_and_rewards_apply_to_the_stages_that_use_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stage.sft.trainer.steps": 1, "stage.rl.trainer.steps": 1}
    run = tm.train("r.toml", data=ROWS, rewards=["numeric"], overrides=settings, run_dir="own")
    rl = run.stages["rl"].config
    assert (rl.task.kind, rl.scoring.rewards[0].kind) == ("file", "numeric")
    assert run.stages["rl"].samples(training=True)[0].prompt in {row["prompt"] for row in ROWS}


def test_stages_use_functions_of_a_notebook_and_run_again_when_they_change(tmp_path: Path) -> None:
    def short(completion: str) -> float:
        return float(len(completion) < 2)

    first, short_before = {"stage.sft.trainer.steps": 1, "stage.rl.trainer.steps": 1}, short
    ran = []
    for reward in (short, short_before, changed()):
        run = tm.train("r.toml", rewards=[reward], overrides=first, run_dir="own")
        ran.append([stage["ran"] for stage in run.summary["stages"]])
    assert ran == [[True, True], [False, False], [False, True]]
    elsewhere = run_here(
        "train", "@r.toml", "--run.dir=own", "--scoring.rewards=[{kind='python',function='session:other'}]"
    )
    assert elsewhere.code == 2
    assert "session:other was defined in the Python session" in elsewhere.err


def changed() -> Callable[[str], float]:
    def short(completion: str) -> float:
        return float(len(completion) < 3)

    return short


def test_what_stages_cannot_use_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"overrides": {"stage.rlx.trainer.steps": 1}}, "no stage of that name"),
        ({"overrides": {"export.dtype": "bf16"}}, "no stage of this recipe has this section"),
    ]
    for arguments, says in cases:
        with pytest.raises(tm.TidemillError) as caught:
            tm.train("r.toml", run_dir="bad", **arguments)
        assert says in str(caught.value)
    with pytest.raises(tm.TidemillError, match="has stages"):
        tm.load_config("r.toml")
