from __future__ import annotations

import itertools
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fabricated_run import FabricatedRun
from tests.unit.cli.conftest import Pretend, Run
from tidemill.cli import control_commands
from tidemill.telemetry.recorder import Recorder


@pytest.fixture(autouse=True)
def quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_commands, "ANSWER_S", 1.0)


@contextmanager
def working(recorder: Recorder, each: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """The run beats in another thread, and calls `each`."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            recorder.beat(now=True)
            each()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    fabricated = FabricatedRun(tmp_path / "run", steps=20)
    recorder = fabricated.session()
    recorder.control.attach(lambda reason: None)
    fabricated.learn(recorder, 1)
    yield recorder
    recorder.close()
    recorder.run.close()


def test_each_verb_sends_a_request_and_says_what_follows(run: Run, recorder: Recorder) -> None:
    folder = str(recorder.run.path)
    with working(recorder):
        paused = run("pause", folder, "--hold", "90s")
        assert (paused.code, paused.out.strip()) == (
            0,
            "pauses after its current step, with a checkpoint; rented machines are kept for 1:30",
        )
        assert recorder.control.waiting["pause"].hold_s == 90.0
        assert run("checkpoint", folder).out.strip() == "writes a checkpoint after its current step"
        assert run("stop", folder).out.strip() == "stops, with a checkpoint"
        assert run("resume", folder).out.strip() == "resumes after step 1"
        again = run("resume", folder)
    assert (again.code, again.out) == (2, "")
    assert "the run ignored the request: the run is not paused" in again.err


def test_a_run_that_is_busy_takes_the_request_later(run: Run, recorder: Recorder) -> None:
    ran = run("pause", str(recorder.run.path), "--json")
    assert (ran.code, ran.data["taken"]) == (0, False)
    recorder.beat(now=True)
    assert [request.request_id for request in recorder.control.waiting.values()] == [ran.data["request"]]


def test_a_run_on_another_machine_answers_through_the_disk(
    run: Run, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    with working(recorder):
        assert run("pause", str(recorder.run.path)).code == 0
    silent = run("resume", str(recorder.run.path))
    assert silent.code == 2 and "the run did not answer in 1.0 s" in silent.err
    assert not list(recorder.run.path.glob("control/*"))


@pytest.mark.parametrize("hold", ["ten", "-1", "10d", ""])
def test_a_time_that_is_none(run: Run, recorder: Recorder, hold: str) -> None:
    ran = run("pause", str(recorder.run.path), f"--hold={hold}")
    assert ran.code == 2 and "10m" in ran.err
    assert not list(recorder.run.path.glob("control/*"))


def test_runs_that_take_no_request(run: Run, tmp_path: Path) -> None:
    finished = FabricatedRun(tmp_path / "finished", steps=13).make()
    older = FabricatedRun(tmp_path / "older").session()
    (older.run.path / "live.json").unlink()
    texts = {
        str(finished.path): "the run is not running (finished)",
        str(older.run.path): "the run takes no requests",
        str(tmp_path / "finishing"): f"did you mean {finished.path}?",
        str(tmp_path): "no run there",
    }
    for verb, (folder, text) in itertools.product(("pause", "checkpoint", "stop"), texts.items()):
        ran = run(verb, folder)
        assert ran.code == 2 and text in ran.err and len(ran.err.splitlines()) <= 2, folder
    older.close()
    older.run.close()


@pytest.fixture
def trained_with(pretend: Pretend) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []

    def train(*items: str) -> Any:
        calls.append(items)

    pretend("tidemill.cli.train_command", "train", train)
    return calls


def test_resume_starts_a_run_that_ended_early(run: Run, recorder: Recorder, trained_with: list[Any]) -> None:
    recorder.close("interrupted")
    assert run("resume", str(recorder.run.path)).code == 0
    assert trained_with == [("--run.dir", str(recorder.run.path))]


def test_resume_of_a_finished_run_says_so(run: Run, tmp_path: Path, trained_with: list[Any]) -> None:
    finished = FabricatedRun(tmp_path / "finished", steps=13).make()
    ran = run("resume", str(finished.path))
    assert ran.code == 0 and "the run has finished" in ran.out and not trained_with


def test_a_pipeline_is_resumed_as_a_whole(run: Run, tmp_path: Path, trained_with: list[Any]) -> None:
    stage = FabricatedRun(tmp_path / "stages" / "rl-1").session()
    (tmp_path / "pipeline.json").write_text('{"stages": [{"state": "running", "folder": "stages/rl-1"}]}')
    stage.control.attach(lambda reason: None)
    with working(stage):
        assert "pauses after its current step" in run("pause", str(tmp_path)).out
        assert "resumes after step 0" in run("resume", str(tmp_path)).out
    stage.close("interrupted")
    stage.run.close()
    assert f"write `tidemill resume {tmp_path}`" in run("resume", str(stage.run.path)).err
    assert run("resume", str(tmp_path)).code == 0
    assert trained_with == [(f"@{tmp_path / 'config.toml'}", "--run.dir", str(tmp_path))]
