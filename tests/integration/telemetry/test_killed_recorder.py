"""A process that records continuously is killed at random times; its files must be complete."""

from __future__ import annotations

import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.events import read_events
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0

RECORD = """
import sys
from pathlib import Path
from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.metrics import read_metrics
run = FabricatedRun(Path(sys.argv[1]), steps=10**6, groups=2, group_size=2)
recorder = run.session()
start = max(0, len(read_metrics(recorder.run.metrics)) - 2)
recorder.resume(start)
print("ready", flush=True)
for step in range(start + 1, 10**6):
    run.learn(recorder, step)
"""

LIVE = """
import signal, sys, time
from pathlib import Path
from tests.fabricated_run import FabricatedRun
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
fabricated = FabricatedRun(Path(sys.argv[1]))
recorder = Recorder(RunDirectory.open(Path(sys.argv[1])), fabricated.spec)
stop = []
if sys.argv[2] == "cleanly":  # as a run is stopped: what it is writing it writes to the end
    signal.signal(signal.SIGINT, lambda *_: stop.append(True))
try:
    for step in range(1, 10**6):
        fabricated.learn(recorder, step)
        time.sleep(0.05)
        if stop:
            recorder.finish("interrupted")
            break
except KeyboardInterrupt:
    raise SystemExit(0)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "TERM": "xterm-256color"}


def test_a_kill_leaves_only_complete_lines(tmp_path: Path) -> None:
    chance = random.Random(0)
    for round_number in range(1, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", RECORD, str(tmp_path)], stdout=subprocess.PIPE, env=environment(), cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.02, 0.3))
        process.kill()
        process.wait(timeout=DEADLINE_S)
        process.stdout.close()
        run = RunDirectory(tmp_path)
        for path in (run.config, run.manifest):
            assert path.stat().st_size > 0
        for _, _, path in run.sample_files():
            for line in path.read_bytes().splitlines():
                msgspec.json.decode(line)
        with RunDirectory.open(tmp_path) as opened:
            assert opened.past.count == round_number
            for log in (opened.events, opened.metrics):
                for line in log.read_bytes().splitlines():
                    msgspec.json.decode(line)
        steps = [line.step for line in read_metrics(run.metrics)]
        assert steps == list(range(1, len(steps) + 1)) and len(run.metrics.read_bytes().splitlines()) == len(steps)
    summary = RunData.load(run).summarize(outcome="running", total_steps=10)
    assert summary["steps"] == len(steps) > 0 and summary["sessions"] == 4
    assert write_report(tmp_path).stat().st_size > 50_000
    resumed = [event["step"] for event in read_events(run.events) if event["event"] == "resume"]
    assert len(resumed) == 3 and min(resumed) > 0, "the first session resumes nothing"


@pytest.mark.parametrize("way", ["cleanly", "abruptly"])
def test_ctrl_c_restores_the_terminal(tmp_path: Path, way: str) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(tmp_path), way],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(secondary)
    shown, deadline_s, signalled = b"", time.monotonic() + DEADLINE_S, False
    while time.monotonic() < deadline_s:
        if select.select([primary], [], [], 0.2)[0]:
            try:
                shown += os.read(primary, 65536)
            except OSError:  # the other end is closed
                break
        if b"step 3/20" in shown and not signalled:
            process.send_signal(signal.SIGINT)
            signalled = True
    os.close(primary)
    assert process.wait(timeout=DEADLINE_S) == 0, shown[-4000:].decode(errors="replace")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"
    assert "reward" in shown.decode() and b"\x1b[?1049h" not in shown, "printed lines stay on the screen"


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    recorder = FabricatedRun(tmp_path).session()
    done = subprocess.run(
        [sys.executable, "-c", RECORD, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=False,
    )
    recorder.close()
    recorder.run.close()
    assert done.returncode != 0
    assert f"another process is working on this run (process {os.getpid()} on " in done.stderr
