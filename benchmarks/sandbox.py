"""Start of a command in a sandbox, 64 at once, the memory that a gigabyte of output takes, and 1,000 killed owners.

    python -m benchmarks.sandbox [--kills N]

Start: from the call to the moment that the command itself reports. A bare bubblewrap with the same namespaces is
measured in turn with it. 64 at once: each command computes and writes a file; the time of all is compared with the CPU
time of the same commands one after another. Owners: processes that open a sandbox and run a command in it; half of
them are killed within 0.4 s of their start, half within 0.05 s of the moment at which they open the sandbox.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import statistics
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from benchmarks.measuring import print_records, write_result
from benchmarks.origin import parsed
from benchmarks.subjects import check_counts
from tidemill.config.sandbox import SandboxConfig
from tidemill.core.errors import UserError
from tidemill.sandbox import Finished, SandboxError, open_sandbox
from tidemill.sandbox.local import launcher

STARTS = 200
AT_ONCE = 64
OUTPUTS = 3
KILLS = 1000
START_AIM_S, AT_ONCE_AIM, OUTPUT_AIM_BYTES, ORPHAN_AIM_S = 0.020, 2.0, 2e6, 2.0
KILLED_WITHIN_S, OPENED_WITHIN_S = 0.4, 0.05
START_DEADLINE_S = 30.0
CLOCK = ["date", "+%s%N"]
BARE = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--"]
WORK = """\
import os
name = os.listdir(".")
total = 0
for number in range(1_500_000): total = (total * 31 + number) % 1_000_003
open("result", "w").write(str(total))
print(name, total)
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=KILLS)
    kills = parsed(parser).kills
    orphans = killed_owners(kills)  # first: a fork of this process must not find a launcher
    check_kills(orphans)
    figures = {**orphans, **output(), **starts(), **at_once()}
    aims = {
        "start": figures["start_s"] <= START_AIM_S,
        "at_once": figures["at_once_ratio"] <= AT_ONCE_AIM,
        "output": figures["output_rss_bytes"] < OUTPUT_AIM_BYTES,
        "orphans": figures["orphans"] == 0 and figures["slowest_end_s"] <= ORPHAN_AIM_S,
    }
    print_records("sandbox", [figures | {f"{name}_reached": reached for name, reached in aims.items()}])
    write_result("sandbox", {"figures": figures, "reached": aims})
    return 0 if all(aims.values()) else 1


def starts() -> dict[str, float]:
    """Medians over interleaved turns, in seconds."""
    opens, commands, fresh, bare, ends = [], [], [], [], []
    with closing(open_sandbox(SandboxConfig())) as used:
        used.run(CLOCK)
        for _ in range(STARTS):
            began = time.time_ns()
            commands.append(_clock(used.run(CLOCK).stdout) - began)
            ends.append(time.time_ns() - began)
            began = time.time_ns()
            with closing(open_sandbox(SandboxConfig())) as sandbox:
                opens.append(time.time_ns() - began)
                fresh.append(_clock(sandbox.run(CLOCK).stdout) - began)
            began = time.time_ns()
            bare.append(_clock(subprocess.run([*BARE, *CLOCK], check=True, capture_output=True).stdout) - began)
    return {
        "starts": STARTS,
        "start_s": statistics.median(commands) / 1e9,
        "start_90th_percentile_s": statistics.quantiles(commands, n=10)[-1] / 1e9,
        "start_to_result_s": statistics.median(ends) / 1e9,
        "start_in_a_new_sandbox_s": statistics.median(fresh) / 1e9,
        "open_s": statistics.median(opens) / 1e9,
        "bare_bubblewrap_s": statistics.median(bare) / 1e9,
    }


def _clock(printed: bytes) -> int:
    return int(printed)


def at_once() -> dict[str, float]:
    """The same commands one after another, then all at once."""
    cores = len(os.sched_getaffinity(0))
    one_by_one = [_work() for _ in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        began = time.perf_counter()
        together = list(threads.map(lambda _: _work(), range(AT_ONCE)))
        wall_s = time.perf_counter() - began
    check_work(one_by_one, together)
    cpu_s = sum(each.cpu_s for each in one_by_one)
    return {
        "at_once": AT_ONCE,
        "cores": cores,
        "one_by_one_cpu_s": cpu_s,
        "at_once_cpu_s": sum(each.cpu_s for each in together),
        "at_once_wall_s": wall_s,
        "at_once_ratio": wall_s / (cpu_s / cores),
    }


def check_work(one_by_one: Sequence[Finished], together: Sequence[Finished]) -> None:
    """Raises RuntimeError: commands failed or printed different things."""
    if {(each.stdout, each.code) for each in (*one_by_one, *together)} != {(one_by_one[0].stdout, 0)}:
        raise RuntimeError("sandboxes at once did other work than one by one")


def _work() -> Finished:
    with closing(open_sandbox(SandboxConfig())) as sandbox:
        return sandbox.run(["python3", "-c", WORK])


def output() -> dict[str, float]:
    """How much this process's memory grows while a command writes 1 GB."""
    grown = []
    with closing(open_sandbox(SandboxConfig(cpu_s=60.0, wall_s=60.0))) as sandbox:
        for _ in range(10):
            sandbox.run(["sh", "-c", "head -c 2000000 /dev/zero"])
        for _ in range(OUTPUTS):
            before = _resident_bytes()
            finished = sandbox.run(["sh", "-c", "head -c 1000000000 /dev/zero"])
            grown.append(_resident_bytes() - before)
            check_output(finished)
    return {"output_bytes": 1_000_000_000, "output_rss_bytes": max(grown)}


def check_output(finished: Finished) -> None:
    """Raises RuntimeError: the sandbox did not receive a gigabyte."""
    if finished.discarded_bytes + len(finished.stdout) != 1_000_000_000:
        raise RuntimeError("output was lost")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def killed_owners(kills: int) -> dict[str, float]:
    """Kill owners; count processes that are left, and how long the last one took to end."""
    draw = random.Random(0)
    slowest, left, outlived, phases = 0.0, 0, 0, [0, 0, 0, 0]
    for number in range(kills):
        mark = f"{os.getpid()}.{number}"
        reading, writing = os.pipe()
        owner = os.fork()
        if owner == 0:
            os.close(reading)
            _own(mark, writing)
        os.close(writing)
        seen = 0
        if number % 2:
            seen = _await_launcher(reading)
            time.sleep(draw.uniform(0, OPENED_WITHIN_S))
        else:
            time.sleep(draw.uniform(0, KILLED_WITHIN_S))
        os.kill(owner, signal.SIGKILL)
        began = time.monotonic()
        os.waitpid(owner, 0)
        phases[seen + len(os.read(reading, 8))] += 1
        os.close(reading)
        found = _marked(mark)
        outlived += bool(found)
        while found and time.monotonic() < began + ORPHAN_AIM_S:
            time.sleep(0.01)
            found = _marked(mark)
        slowest = max(slowest, time.monotonic() - began)
        left += bool(found)
    before, launching, opening, running = phases
    return {
        "kills": kills,
        "killed_before_the_launcher": before,
        "killed_while_the_launcher_started": launching,
        "killed_while_the_sandbox_opened": opening,
        "killed_while_a_command_started_or_ran": running,
        "seen_after_the_kill": outlived,
        "orphans": left,
        "slowest_end_s": slowest,
    }


def check_kills(found: Mapping[str, float]) -> None:
    """Raises RuntimeError: no owner was killed while a command ran, or none of their processes was seen."""
    names = ("killed_while_a_command_started_or_ran", "seen_after_the_kill")
    check_counts("owners", **{name: found[name] for name in names})


def _await_launcher(phase: int) -> int:
    """Wait until an owner's launcher is ready; returns the number of reported phases."""
    seen = 0
    while seen < 2:
        ready, _, _ = select.select([phase], [], [], START_DEADLINE_S)
        read = os.read(phase, 2 - seen) if ready else b""
        if not read:
            raise RuntimeError("an owner did not start its launcher")
        seen += len(read)
    return seen


def _own(mark: str, phase: int) -> None:
    """Open a sandbox and run a command that leaves its session; report each phase by a byte."""
    try:
        os.environ["TIDEMILL_MARK"] = mark
        os.write(phase, b"1")
        launcher("bwrap")
        os.write(phase, b"2")
        with closing(open_sandbox(SandboxConfig())) as sandbox:
            os.write(phase, b"3")
            sandbox.run(["sh", "-c", f"setsid sh -c 'sleep 60; : {mark}' & sleep 60; : {mark}"])
    except (OSError, UserError, SandboxError):
        traceback.print_exc()
    finally:
        os._exit(1)


def _marked(mark: str) -> list[int]:
    """Processes with the mark in their arguments or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                texts = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue  # it has ended
            if mark.encode() in texts:
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
