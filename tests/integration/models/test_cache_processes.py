"""Several processes that build the same cache entry, and one that is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tidemill.models.cache import build_once, damage

DEADLINE_S = 30.0

# Appends its process id to `builds`, writes half of the entry, waits for `go`, then writes the rest.
BUILDER = """
import os, sys, time
from pathlib import Path
from tidemill.models.cache import build_once

root = Path(sys.argv[1])

def build(folder):
    with (root / "builds").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "first").write_bytes(b"1" * 100_000)
    (root / "half-way").touch()
    deadline = time.monotonic() + 20
    while not (root / "go").exists():
        if time.monotonic() > deadline:
            sys.exit("nobody said go")
        time.sleep(0.01)
    (folder / "second").write_bytes(b"2" * 100_000)

def progress(line):
    print(line, flush=True)

build_once(root / "entry", build, progress=progress)
print("done", flush=True)
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(root)], stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def builders(root: Path) -> list[str]:
    return (root / "builds").read_text().split()


def ignore(_: str) -> None:
    pass


def test_two_concurrent_processes_build_once(tmp_path: Path) -> None:
    processes = [start(tmp_path), start(tmp_path)]
    wait_for(tmp_path / "half-way")
    assert not (tmp_path / "entry").exists()  # a partial entry is never visible
    time.sleep(1.0)  # long enough for the other process to report that it waits
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (builder,) = builders(tmp_path)
    waiting = [line for output in outputs for line in output.splitlines() if line.startswith("waiting for")]
    assert waiting and all(f"process {builder} on " in line for line in waiting)
    assert [output.splitlines()[-1] for output in outputs] == ["done", "done"]
    assert damage(tmp_path / "entry") == ""
    assert sorted(path.name for path in (tmp_path / "entry").glob("[fs]*")) == ["first", "second"]


def test_a_killed_build_is_completed_by_the_next_process(tmp_path: Path) -> None:
    victim = start(tmp_path)
    wait_for(tmp_path / "half-way")
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate(timeout=DEADLINE_S)
    leftovers = list(tmp_path.glob(".entry.partial-*"))
    assert len(leftovers) == 1 and (leftovers[0] / "first").exists()
    assert not (tmp_path / "entry").exists()

    (tmp_path / "go").touch()
    successor = start(tmp_path)
    output = successor.communicate(timeout=DEADLINE_S)[0]
    assert successor.returncode == 0
    assert output.splitlines() == ["done"]  # the dead process's lock delays nobody
    assert builders(tmp_path) == [str(victim.pid), str(successor.pid)]
    assert not list(tmp_path.glob(".entry.partial-*"))
    assert damage(tmp_path / "entry") == ""

    def forbidden(_: Path) -> None:
        raise AssertionError("built again")

    build_once(tmp_path / "entry", forbidden, progress=ignore)


def test_a_waiting_process_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    victim = start(tmp_path)
    wait_for(tmp_path / "half-way")
    heir = start(tmp_path)
    assert heir.stdout is not None
    assert heir.stdout.readline().startswith(f"waiting for process {victim.pid} on ")
    (tmp_path / "go").touch(
        exist_ok=True
    )  # whether the victim finishes or dies, the next process gets a complete entry
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate(timeout=DEADLINE_S)
    heir.communicate(timeout=DEADLINE_S)
    assert heir.returncode == 0
    assert damage(tmp_path / "entry") == ""
