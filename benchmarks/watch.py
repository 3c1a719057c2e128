"""Memory and time of reading runs while they are written, as `tidemill watch` does.

    python -m benchmarks.watch

Three figures, each measured in a fresh process:

- *a long run*: 20,000 steps of 50 metrics (10^6 values) and 10^5 samples, with the events of four workers: resident
  memory after reading it;
- *one new step* of that run: CPU time until its figures are computed again;
- *an idle folder* of 50 runs of 2,000 steps: CPU time as a share of a core, with one run looked at every 0.25 s and the
  list of all every second. All seem to run on another machine, so that none is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import exit_code, write_result
from benchmarks.origin import parsed
from tidemill.telemetry.jsonl import JsonlWriter, encode
from tidemill.telemetry.metrics import METRICS
from tidemill.telemetry.run_dir import RUN_FORMAT, RunDirectory, samples_name
from tidemill.telemetry.run_list import RunList
from tidemill.telemetry.run_reader import RunReader

STEPS, METRICS_OF_A_STEP, SAMPLES_OF_A_STEP, WORKERS = 20_000, 50, 5, 4
RUNS, STEPS_OF_A_RUN = 50, 2_000
MEMORY_BYTES, NEW_STEP_S, IDLE_SHARE = 150e6, 0.3, 0.02
"""Targets."""
WATCHED_S, LISTED_S, IDLE_S = 0.25, 1.0, 20.0
MEGABYTE = 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--idle", type=Path, help=argparse.SUPPRESS)
    options = parsed(parser)
    if options.read or options.idle:
        print(json.dumps(read_run(options.read) if options.read else idle(options.idle)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        long, many = Path(folder) / "long", Path(folder) / "many"
        write_run(long, steps=STEPS, workers=WORKERS, samples=SAMPLES_OF_A_STEP)
        for number in range(RUNS):
            write_run(many / f"run-{number}", steps=STEPS_OF_A_RUN, workers=1, samples=0)
        content = measured("--read", long) | measured("--idle", many)
    content |= {
        "targets": {"memory_bytes": MEMORY_BYTES, "new_step_s": NEW_STEP_S, "idle_share": IDLE_SHARE},
        "reached": content["memory_bytes"] < MEMORY_BYTES
        and content["new_step_s"] < NEW_STEP_S
        and content["idle_share"] <= IDLE_SHARE,
    }
    print(
        f"long run: {content['memory_bytes'] / MEGABYTE:.0f} MB (peak {content['peak_bytes'] / MEGABYTE:.0f}), read in "
        f"{content['read_s']:.2f} s, a new step in {content['new_step_s']:.3f} s; {RUNS} runs: listed in "
        f"{content['list_s']:.2f} s, {content['list_memory_bytes'] / MEGABYTE:.0f} MB, idle {content['idle_share']:.2%}"
    )
    print(f"written: {write_result('watch', content)}")
    return exit_code(content)


def measured(option: str, folder: Path) -> dict[str, Any]:
    """The figures that a fresh process prints."""
    command = [sys.executable, "-m", "benchmarks.watch", option, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return dict(json.loads(done.stdout))


def write_run(path: Path, *, steps: int, workers: int, samples: int) -> None:
    """A run of another machine that has not ended."""
    chance, run = random.Random(0), RunDirectory(path)
    run.samples.mkdir(parents=True)
    run.write_config(f"[trainer]\nsteps = {2 * steps}\n")
    run.write_manifest({"format": RUN_FORMAT, "run": path.name, "run_id": path.name})
    names = [name for name in METRICS if not name.startswith("eval/")][:METRICS_OF_A_STEP]
    metrics, events = list[bytes](), list[bytes]()

    def event(name: str, elapsed_s: float, **fields: Any) -> None:
        header = {"time": "2026-11-27T18:00:00.000Z", "session": 1, "elapsed_s": elapsed_s, "event": name}
        events.append(encode({**header, **fields}) + b"\n")

    event("session_start", 0.0, host="elsewhere", pid=1)
    for step in range(1, steps + 1):
        at_s, own = 2.0 * step, {"policy_version": step, "weights_digest": f"{step:032x}", "optimizer_steps": 1}
        header = {"step": step, **own, "time": "2026-11-27T18:00:00.000Z", "session": 1, "elapsed_s": at_s}
        metrics.append(encode(header | {name: chance.random() for name in names}) + b"\n")
        event("rollout", at_s, step=step, duration_s=1.0)
        for number in range(workers):
            who = {"lease": f"l-{number}", "worker": f"w-{number}", "duration_s": 0.9}
            work = [{"passes": 3, "rows": 24, "drawn": 24, "prefilled": 8, "busy_s": 0.2, "cpu_s": 0.1}] * 3
            kind = "preemptible" if number else "reserved"
            event("decode", at_s, **who, kind=kind, step=step, purpose="train", tokens=900, samples=8, work=work)
            event("pull", at_s, **who, version=step, nbytes=10_000, full=False, swap_s=0.1, retries=0)
        event("training", at_s, step=step, duration_s=0.5)
        event("publish", at_s, version=step, duration_s=0.1)
        if step % 10 == 0:
            event("evaluation", at_s, step=step, reward_mean=chance.random(), reward_stderr=0.1, n=64)
            event("checkpoint", at_s, step=step, duration_s=0.3)
        if samples:
            line = {"step": step, "purpose": "train", "prompt": "3 + 4 =", "completion": " 7\n", "reward": 1.0}
            lines = (encode(line | {"index": index}) + b"\n" for index in range(samples))
            (run.samples / samples_name(step)).write_bytes(b"".join(lines))
    run.metrics.write_bytes(b"".join(metrics))
    run.events.write_bytes(b"".join(events))


def read_run(path: Path) -> dict[str, Any]:
    """Read a run, and then one step more."""
    reader = RunReader(path)
    read_s = timed(lambda: (reader.refresh(), reader.data.summary, reader.state))
    memory_bytes = resident_bytes()
    line = reader.data.metrics[-1]
    last = {**line._asdict(), **line.values}
    del last["values"]
    writer = JsonlWriter(reader.data.run.metrics)
    new_s = []
    for step in range(last["step"] + 1, last["step"] + 6):
        writer.write(last | {"step": step})
        new_s.append(timed(lambda: (reader.refresh(), reader.data.summary, reader.state)))
    writer.close()
    peak_bytes = 1024 * int(_status("VmHWM"))
    return {"read_s": read_s, "memory_bytes": memory_bytes, "peak_bytes": peak_bytes, "new_step_s": sorted(new_s)[2]}


def idle(folder: Path) -> dict[str, Any]:
    """Look at one run and at the list of all, for a while in which nothing changes."""
    runs = RunList(folder)
    list_s = timed(runs.refresh)
    watched = RunReader(next(iter(runs.paths.values())))
    watched.refresh()
    started_s, cpu_s, next_list_s = time.monotonic(), time.process_time(), 0.0
    while (now_s := time.monotonic() - started_s) < IDLE_S:
        watched.refresh()
        _ = watched.state
        if now_s >= next_list_s:
            runs.refresh()
            next_list_s += LISTED_S
        time.sleep(WATCHED_S)
    share = (time.process_time() - cpu_s) / (time.monotonic() - started_s)
    return {"list_s": list_s, "list_memory_bytes": resident_bytes(), "idle_share": share}


def timed(action: Any) -> float:
    """CPU time in seconds: that of a quiet machine."""
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


def resident_bytes() -> int:
    """Of this process, now."""
    return 1024 * int(_status("VmRSS"))


def _status(name: str) -> str:
    """A figure of /proc in kB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())
