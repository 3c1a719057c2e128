"""What a log shows of a whole run, word for word. To accept a change: delete the text file, run twice."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.fabricated_fleet import FabricatedFleet
from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.progress_views import HEARTBEAT_S
from tidemill.telemetry.recorder import Recorder

HERE = Path(__file__).parent


def shown(recorder: Recorder) -> str:
    stream = recorder._view._stream  # type: ignore[union-attr]
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_the_lines_of_a_run_that_is_interrupted_and_resumed(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path, steps=12)
    first = fabricated.session()
    fabricated.evaluate(first, 0)
    for step in range(1, 8):
        fabricated.learn(first, step)
    first.progress("rollout", 64, 64)
    first.progress("training", 0, 64)
    fabricated.clock.pass_s(HEARTBEAT_S - 1)
    first.progress("training", 16, 64)
    fabricated.clock.pass_s(2)
    first.progress("training", 24, 64)
    first.progress("training", 32, 64)
    first.event("waiting", awaited="the trainer to commit step 8", waited_s=32.0, deadline_s=600.0)
    first.event("checkpoint", step=7, duration_s=0.5, error="OSError")
    first.close("interrupted")
    first.run.close()
    second = fabricated.session()
    second.resume(5)
    second.event("replay", first_step=6, last_step=7)
    second.event("replay", first_step=8, last_step=8)
    for step in range(6, 13):
        fabricated.learn(second, step)
    second.finish("finished")
    second.run.close()
    third = fabricated.session()
    third.event("already_finished", step=12, steps=12)
    third.close()
    third.run.close()
    text = "".join(f"--- session\n{shown(recorder)}" for recorder in (first, second, third))
    assert text == golden("plain_lines.txt", text)


def golden(name: str, text: str) -> str:
    if not (HERE / name).exists():
        (HERE / name).write_text(text)
        pytest.fail(f"{name} was written; look at it and run again")
    return (HERE / name).read_text()


def test_the_lines_of_a_run_whose_workers_come_and_go(tmp_path: Path) -> None:
    fleet = FabricatedFleet(tmp_path, places=3, life_s=15.0, steps=4)
    recorder = fleet.session()
    for step in range(1, 5):
        fleet.learn(recorder, step)
    fleet.leave(recorder)
    recorder.finish("finished")
    recorder.run.close()
    text = shown(recorder)
    assert text == golden("fleet_lines.txt", text)


def test_a_closed_stream_does_not_end_the_run(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path, steps=2)
    recorder = fabricated.session()
    recorder._view._stream.close()  # type: ignore[union-attr]
    fabricated.learn(recorder, 1)
    recorder.close()
    recorder.run.close()
