"""`tidemill.sft`, `reward_model`, `dpo`, `demonstrations` and `pairs`: as the stages of a recipe, resumed, refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tidemill as tm

SETTINGS: dict[str, Any] = {
    "model": {"source": "char", "char": {"layers": 1, "hidden_size": 32, "heads": 2}},
    "supervised": {"minibatch_tokens": 64, "microbatch_tokens": 64, "evaluate_every_steps": 2},
    "optimizer": {"learning_rate": 3e-3},
    "trainer": {"threads": 1},
    "checkpoint": {"every_steps": 4},
}
RL: dict[str, Any] = {
    "sampling": {"max_new_tokens": 2},
    "engine": {"batch_invariant": True},
    "batch": {"prompts": 4, "group_size": 4},
    "trainer": {"threads": 1, "steps": 2},
    "eval": {"every_steps": 0},
    "checkpoint": {"every_steps": 4},
}
QUESTIONS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(6) for b in range(6)]
SHOWN = [{"prompt": row["prompt"], "completion": row["answer"]} for row in QUESTIONS]
PREFERENCES = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "x"} for row in QUESTIONS]

RECIPE = """\
[model]
source = "char"
char = { layers = 1, hidden_size = 32, heads = 2 }
[supervised]
minibatch_tokens = 64
microbatch_tokens = 64
evaluate_every_steps = 2
[trainer]
threads = 1
steps = 2
[checkpoint]
every_steps = 4
[task]
kind = "file"
path = "questions.jsonl"
[sampling]
max_new_tokens = 2
[engine]
batch_invariant = true
[batch]
prompts = 4
group_size = 4
[eval]
every_steps = 0

[[stage]]
name = "sft"
kind = "sft"
data.path = "shown.jsonl"
optimizer.learning_rate = 3e-3

[[stage]]
name = "scores"
kind = "reward_model"
model.source = "stage:sft"
data.path = "preferences.jsonl"
optimizer.learning_rate = 3e-3

[[stage]]
name = "grpo"
kind = "rl"
model.source = "stage:sft"
scoring.rewards = [{ kind = "model", model = "stage:scores" }]

[[stage]]
name = "dpo"
kind = "dpo"
model.source = "stage:grpo"
data.path = "preferences.jsonl"
optimizer.learning_rate = 3e-3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, rows in (("questions", QUESTIONS), ("shown", SHOWN), ("preferences", PREFERENCES)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def sft(**arguments: Any) -> tm.Run:
    return tm.sft(overrides=SETTINGS | arguments.pop("settings", {}), **arguments)


def test_calls_give_the_weights_of_the_stages_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    stages = tm.train("r.toml", run_dir="recipe").stages
    later = {name: value for name, value in SETTINGS.items() if name != "model"}
    shown = sft(data=SHOWN)
    scores = tm.reward_model(model=shown, data="preferences.jsonl", overrides=later)
    grpo = tm.train(model=shown, data=QUESTIONS, rewards=[tm.rewards.model(scores)], overrides=RL)
    # Not its checkpoint: a resumed run keeps that of its first session.
    assert tm.rewards.model(scores).settings["model"] == str(scores.path.absolute())
    dpo = tm.dpo(model=grpo, data=[(1, "preferences.jsonl")], overrides=later)
    runs = {"sft": shown, "scores": scores, "grpo": grpo, "dpo": dpo}
    assert {name: run.weights_digest for name, run in runs.items()} == {
        name: stages[name].weights_digest for name in runs
    }
    assert [run.kind for run in runs.values()] == ["sft", "reward_model", "rl", "dpo"]
    assert [str(run.path) for run in runs.values()] == ["runs/sft", "runs/reward_model", "runs/run", "runs/dpo"]
    assert tm.generate("1+2=", model=dpo)[0]["prompt"] == "1+2="


class Watch(tm.Callback):
    def __init__(self, stop_at: int) -> None:
        self.stop_at, self.steps, self.losses, self.checkpoints = stop_at, list[int](), list[float](), list[Path]()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step == self.stop_at:
            self.stop()

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        self.losses.append(metrics["loss"])

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.checkpoints.append(path)


def test_a_stopped_run_resumes_to_the_same_weights_and_a_finished_one_is_returned() -> None:
    twice, stop = {"supervised.epochs": 2}, Watch(stop_at=3)
    whole = sft(data=SHOWN, run_dir="whole", settings=twice)
    stopped = sft(data=SHOWN, run_dir="parts", settings=twice, callbacks=[stop])
    assert (stopped.interrupted, stopped.finished, stop.steps) == (True, False, [1, 2, 3])
    assert stop.checkpoints == [stopped.path / "checkpoints" / "step_3"]
    assert len(stop.losses) == 2  # before the first step, and after step 2
    resumed = tm.sft(run_dir="parts", callbacks=[stop])
    assert (resumed.finished, resumed.weights_digest) == (True, whole.weights_digest)
    again = sft(data=SHOWN, run_dir="whole", settings=twice)
    assert (again.finished, len(again.metrics)) == (True, len(whole.metrics))
    assert again.summary["held_out"] == whole.summary["held_out"]
    assert again.report().read_text().count("Held-out loss") > 0
    shown = again._repr_html_()
    assert "<th>held-out loss</th>" in shown
    assert "→" in shown
    assert "held-out accuracy" in shown


class Interrupt(tm.Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_is_raised_after_the_checkpoint_with_the_run() -> None:
    with pytest.raises(KeyboardInterrupt, match="the same call resumes it") as caught:
        sft(data=SHOWN, callbacks=[Interrupt()])
    assert caught.value.run.checkpoint.name == "step_1"  # type: ignore[attr-defined]


def test_an_export_lists_the_runs_that_trained_the_model() -> None:
    first = sft(data=SHOWN, run_dir="first")
    settings = {"supervised": SETTINGS["supervised"], "trainer": SETTINGS["trainer"]}
    for _ in range(2):  # the second call finds a finished run
        second = tm.dpo(model=first, data=PREFERENCES, overrides=settings, run_dir="second")
    steps = second.summary["steps"]
    card = (tm.export(second, "exported") / "README.md").read_text()
    assert f"1. first: 3 steps of sft from char\n2. second: {steps} steps of dpo from first\n" in card


def test_the_best_checkpoint_is_the_model_of_the_next_call() -> None:
    settings = {"optimizer": {"learning_rate": 0.3}, "checkpoint": {"every_steps": 2}}  # too high: the loss rises
    run = sft(data=SHOWN, settings=settings, run_dir="hot")
    assert run.model != run.checkpoint.absolute()
    assert run.model.parent == run.checkpoint.parent.absolute()
    kept = {"optimizer": {"learning_rate": 0.3}, "checkpoint": {"every_steps": 2, "keep_best": False}}
    last = sft(data=SHOWN, settings=kept, run_dir="last")
    assert last.model == last.checkpoint.absolute()


def test_rows_of_a_task_and_pairs_of_a_model_are_data_of_the_next_call() -> None:
    @tm.reward(correct_at=1.0)
    def right(completion: str, answer: str) -> float:  # cannot be imported
        return float(completion.strip() == answer)

    made = tm.demonstrations(data=QUESTIONS, overrides={"model": SETTINGS["model"]})
    assert made.rows[0].keys() == {"prompt", "completion"}
    assert made._repr_html_().count("demonstrations") > 1
    settings = {"supervised": {"epochs": 12, "minibatch_tokens": 64, "microbatch_tokens": 64}}
    shown = sft(data=made, settings=settings)
    drawn: dict[str, Any] = {
        "data_generation": {"prompts": 24, "samples_per_prompt": 8},
        "sampling": {"max_new_tokens": 3},
        "trainer": {"threads": 1},
    }
    arguments: dict[str, Any] = {"model": shown, "data": QUESTIONS, "rewards": [right]}
    pairs = tm.pairs(overrides=drawn, **arguments)
    assert pairs.summary["prompts"] == 24
    assert pairs.rows[0].keys() >= {"prompt", "chosen", "rejected"}
    assert tm.pairs(overrides=drawn, **arguments).rows == pairs.rows  # read, not drawn again
    with pytest.raises(tm.TidemillError, match=r"another configuration: data_generation\.prompts = 9"):
        tm.pairs(overrides=drawn | {"data_generation": {"prompts": 9, "samples_per_prompt": 8}}, **arguments)
    assert tm.dpo(model=shown, data=pairs, overrides={"trainer": {"threads": 1}}).finished


def test_rows_of_a_file_that_has_changed_are_not_taken_for_its_rows() -> None:
    call: dict[str, Any] = {"data": "questions.jsonl", "overrides": {"model": SETTINGS["model"]}}
    made = tm.demonstrations(**call)
    assert tm.demonstrations(**call).rows == made.rows
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS[1:]))
    with pytest.raises(tm.TidemillError, match=r"task\.path has changed .*\n.*run_dir, such as runs/demonstrations-2"):
        tm.demonstrations(**call)


MISTAKES: list[tuple[Callable[..., tm.Run], dict[str, Any], str]] = [
    (tm.sft, {}, "data: is missing"),
    (tm.sft, {"data": []}, "data: has no rows"),
    (tm.sft, {"data": PREFERENCES}, "data[0]: the row is a preference pair"),
    (tm.dpo, {"data": SHOWN}, "data[0]: the row has a `completion` and no `chosen`"),
    (tm.reward_model, {"data": QUESTIONS}, "data[0]: the row has no `chosen`, only `prompt`, `answer`"),
    (tm.sft, {"data": QUESTIONS}, "data[0]: the row has no `completion`, only `prompt`, `answer`"),
    (tm.sft, {"data": SHOWN, "columns": {"completion": "reply"}}, "the row has no column `reply`"),
    (tm.sft, {"data": {"prompt": ["a"]}}, "data: expected rows, a datasets.Dataset or a path, found dict with prompt"),
    (tm.sft, {"data": SHOWN, "eval_data": []}, "eval_data: has no rows"),
    (tm.sft, {"recipe": SHOWN}, "recipe: needs a TOML file or a name, was given list"),
    (tm.sft, {"data": SHOWN, "overrides": {"batch.prompts": 4}}, "batch: a stage of kind sft does not have this"),
    (tm.sft, {"data": SHOWN, "callbacks": [print]}, "is not a tidemill.Callback"),
    (tm.dpo, {"data": PREFERENCES, "overrides": {"preference.bta": 1}}, "did you mean preference.beta?"),
    (tm.dpo, {"train_dataset": PREFERENCES}, "did you mean data=rows?"),
]


@pytest.mark.parametrize(("call", "arguments", "says"), MISTAKES)
def test_a_mistake_is_one_clear_error(call: Callable[..., tm.Run], arguments: dict[str, Any], says: str) -> None:
    settings = {"model": SETTINGS["model"], "trainer.threads": 1} | arguments.get("overrides", {})
    with pytest.raises(tm.TidemillError) as caught:
        call(**arguments | {"overrides": settings})
    assert says in str(caught.value)


def test_what_a_run_directory_holds_is_not_trained_otherwise(tmp_path: Path) -> None:
    run = sft(data=SHOWN, run_dir="mine")
    with pytest.raises(tm.TidemillError, match="data: the rows have changed since this run started"):
        sft(data=SHOWN[:-1], run_dir="mine")
    with pytest.raises(tm.TidemillError, match="holds a run of kind sft, and this one is of kind rl"):
        tm.train(run_dir="mine")
    with pytest.raises(tm.TidemillError, match="holds a run of kind sft, and this one is of kind demonstrations"):
        tm.demonstrations(run_dir="mine")
    with pytest.raises(tm.TidemillError, match="a run of kind sft has no reward model"):
        tm.rewards.model(run)
    with pytest.raises(tm.TidemillError, match="the run has written no rows"):
        tm.sft(data=run, run_dir="other")
    scores = tm.reward_model(model=run, data=PREFERENCES, overrides={"trainer.threads": 1})
    with pytest.raises(tm.TidemillError, match="the folder holds a reward model"):
        tm.dpo(model=scores, data=PREFERENCES)
