"""What a log shows of a whole run, word for word. To accept a change: delete plain_lines.txt, run twice."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.plain import HEARTBEAT_S
from tidemill.telemetry.recorder import Recorder

GOLDEN = Path(__file__).with_name("plain_lines.txt")


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
    for step in range(6, 13):
        fabricated.learn(second, step)
    second.finish("finished")
    second.run.close()
    third = fabricated.session()
    third.event("already_finished", step=12, steps=12)
    third.close()
    third.run.close()
    text = "".join(f"--- session\n{shown(recorder)}" for recorder in (first, second, third))
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
        pytest.fail("plain_lines.txt was written; look at it and run again")
    assert text == GOLDEN.read_text()


def test_a_reader_that_went_away_does_not_end_the_run(tmp_path: Path) -> None:
    fabricated = FabricatedRun(tmp_path, steps=2)
    recorder = fabricated.session()
    recorder._view._stream.close()  # type: ignore[union-attr]
    fabricated.learn(recorder, 1)
    recorder.close()
    recorder.run.close()
