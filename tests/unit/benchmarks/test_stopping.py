"""Benchmarks that are stopped say so in a line and keep what they have."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks import addition_runs, sft_start
from benchmarks.stopping import INTERRUPTED_CODE, interruptible


def test_a_sigterm_is_reported_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def killed() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert interruptible(killed) == INTERRUPTED_CODE
    assert capsys.readouterr().err == "stopped; nothing was written\n"
    assert interruptible(killed, keeps=True) == INTERRUPTED_CODE
    assert capsys.readouterr().err.startswith("stopped; finished runs are kept")
    assert interruptible(lambda: 1) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_half_a_run_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addition_runs, "train", lambda *_, **__: {"interrupted": True})
    with pytest.raises(KeyboardInterrupt):
        addition_runs.addition_run(tmp_path, "a", seed=0, steps=1, changes={}, metrics=())


def test_half_a_start_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_start, "CACHE", tmp_path)
    monkeypatch.setattr(sft_start, "demonstrations", list)
    monkeypatch.setattr(sft_start, "train_supervised", lambda *_, **__: {"interrupted": True, "model": None})
    with pytest.raises(KeyboardInterrupt):
        sft_start.sft_start()


def test_who_begins_at_the_same_moment_waits_for_the_start_and_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_start, "CACHE", tmp_path)
    monkeypatch.setattr(sft_start, "demonstrations", list)
    made: list[Any] = []
    both_want_it = threading.Barrier(2, timeout=60)
    finished = sft_start._finished

    def looked(run: Path) -> Path | None:
        found = finished(run)
        if threading.current_thread() not in seen:
            seen.add(threading.current_thread())
            both_want_it.wait()  # nobody has made it yet
        return found

    def train(spec: Any, *_: Any, **__: Any) -> dict[str, Any]:
        made.append(spec)
        spec.run.dir.mkdir()
        (spec.run.dir / "summary.json").write_text('{"finished": true, "model": "elsewhere/step_9"}')
        return {"interrupted": False, "model": str(spec.run.dir / "checkpoints" / "step_9")}

    seen: set[threading.Thread] = set()
    monkeypatch.setattr(sft_start, "_finished", looked)
    monkeypatch.setattr(sft_start, "train_supervised", train)
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(sft_start.sft_start())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert got[0] == got[1] == made[0].run.dir / "checkpoints" / "step_9"
