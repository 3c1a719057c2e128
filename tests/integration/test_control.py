"""Whole runs that are paused and resumed: the same weights and samples as of a run that never was."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.control_runs import session as control_session
from tests.integration.supervised_process import spec_of, write_data
from tests.training_process import RECIPE
from tidemill.config.load import from_toml
from tidemill.jobs.callbacks import Callback
from tidemill.jobs.train import train
from tidemill.jobs.train_supervised import train_supervised
from tidemill.telemetry.control import Action, ControlFolder, new_request
from tidemill.telemetry.events import read_events
from tidemill.telemetry.live_state import read_live
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import RunDirectory


class Person(Callback):
    """Pauses the run in step 3, and does something else a second later."""

    def __init__(self, run: Path, then: Action) -> None:
        self.run, self.then = RunDirectory(run), then
        self.activity = ""

    def send(self, action: Action) -> None:
        request = new_request(action, run_id=self.run.read_manifest()["run_id"], session=1, by="test")
        ControlFolder(self.run.path).write(request)

    def go_on(self) -> None:
        live = read_live(self.run.path)
        self.activity = live.activity if live is not None else ""
        self.send(self.then)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 3:
            self.send("pause")
            threading.Timer(1.2, self.go_on).start()


def learn(run: Path, kind: str, *callbacks: Callback) -> dict[str, Any]:
    if kind == "rl":
        spec = from_toml(RECIPE, source="recipe")
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"dir": run})})
        with (run.parent / "view.txt").open("a") as view:
            return train(spec, telemetry_stream=view, callbacks=callbacks)
    if kind == "control":
        return control_session(run, *callbacks)
    spec = spec_of(run, write_data(run.parent / "data.jsonl"), trainer={"steps": 8})
    with (run.parent / "view.txt").open("a") as view:
        return train_supervised(spec, "sft", telemetry_stream=view, callbacks=callbacks)


def history(run: Path) -> list[tuple[int, str]]:
    return [(line.step, line.weights_digest) for line in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a kind that nobody disturbs."""

    @functools.cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind) / "run"
        learn(folder, kind)
        return folder

    return run


@pytest.mark.parametrize("kind", ["rl", "sft", "control"])
def test_a_run_that_is_paused_learns_the_same(tmp_path: Path, plain: Callable[[str], Path], kind: str) -> None:
    person = Person(tmp_path / "paused", "resume")
    summary = learn(tmp_path / "paused", kind, person)
    assert summary["steps"] == 8 and person.activity == "paused"
    assert history(tmp_path / "paused") == history(plain(kind))
    for file in (plain(kind) / "samples").glob("*"):
        assert file.read_bytes() == (tmp_path / "paused" / "samples" / file.name).read_bytes()
    (paused,) = [event for event in read_events(tmp_path / "paused" / "events.jsonl") if event["event"] == "paused"]
    assert paused["step"] == 3 and paused["duration_s"] > 0.5
    assert (tmp_path / "paused" / "checkpoints" / "step_8").is_dir()
    steps = read_metrics(tmp_path / "paused" / "metrics.jsonl")
    assert steps[4].values.get("time_step_s", 0.0) < 0.9, "the pause is not part of a step"


# tests/unit/jobs/test_control.py resumes interrupted control training.
@pytest.mark.parametrize("kind", ["rl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("control", "sft"))])
def test_a_paused_run_that_is_stopped_is_interrupted_and_resumes(
    tmp_path: Path, plain: Callable[[str], Path], kind: str
) -> None:
    summary = learn(tmp_path / "run", kind, Person(tmp_path / "run", "stop"))
    assert (summary["outcome"], summary["steps"]) == ("interrupted", 3)
    assert learn(tmp_path / "run", kind)["steps"] == 8
    assert history(tmp_path / "run") == history(plain(kind))
