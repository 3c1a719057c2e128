"""All checks that need a GPU, in one command for a bare machine with one GPU and no network.

    python -m benchmarks.gpu.session [--minutes 7] [--out DIR] [--only CHECKS] [--device cpu --tiny]
    python -m benchmarks.gpu.session --list
    python -m benchmarks.gpu.session --show FILE

Each check runs in a process of its own with a limit, most valuable first; none stops another. After each, DIR has its
result in a JSON file named after the device, and its output in a log. What the time does not suffice for is skipped,
and the reason is listed. The exit code is 1 if a check failed or found something wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import measuring
from benchmarks.gpu.check_process import Ended, run_to_end
from benchmarks.gpu.session_checks import CHECKS, Check
from benchmarks.gpu.session_results import SessionResults, show
from benchmarks.origin import ROOT, origin, parsed
from benchmarks.stopping import INTERRUPTED_CODE, sigterm_as_ctrl_c

DEVICE_LIMIT_S = 120.0  # the first import of torch from a cold disk
DEVICE_PROGRAM = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
SAID = 600  # characters of a failed check's output in its result
LOGGED = 1 << 20  # bytes of a check's output in the log
CPU_PATIENCE = 3.0
UNUSED_S = 5.0  # of the time, to write results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=_minutes, default=7.0, help="of the whole session")
    parser.add_argument("--out", type=Path, default=measuring.RESULTS / "gpu", help="folder of the results")
    parser.add_argument("--only", default="", help="checks to run, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to see that every check runs")
    parser.add_argument("--list", action="store_true", help="print the checks and their limits")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the results of a session as a table")
    options = parsed(parser)
    if options.list:
        _print_checks()
        return 0
    if options.show is not None:
        return _shown(options.show)
    began = time.monotonic()
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := sorted(set(names) - {check.name for check in CHECKS}):
        known = ", ".join(check.name for check in CHECKS)
        print(f"--only: no check {', '.join(unknown)}; known: {known}", file=sys.stderr)
        return 2
    device = "cpu" if options.device == "cpu" else _device_name()
    if not device:
        print("no GPU; use --device cpu --tiny", file=sys.stderr)
        return 2
    chosen = [check for check in CHECKS if not names or check.name in names]
    if device == "cpu":  # limits are those of a machine with a GPU
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        chosen = [dataclasses.replace(check, limit_s=CPU_PATIENCE * check.limit_s) for check in chosen]
    arguments = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    try:
        results = SessionResults(options.out, device, tiny=options.tiny, about=_about)
    except OSError as error:
        print(f"--out {options.out}: {error}", file=sys.stderr)
        return 2
    return run_checks(chosen, results, arguments, until=began + 60 * options.minutes - UNUSED_S)


def run_checks(checks: Sequence[Check], results: SessionResults, arguments: Sequence[str], *, until: float) -> int:
    """Run checks one after another until a time of the monotonic clock; returns the exit code.

    Args:
        arguments: of `one_check`.
    """
    verdicts, unwritten = [], False
    for number, check in enumerate(checks, 1):
        left_s = until - time.monotonic()
        if left_s < check.needs_s:
            why = f"needs {check.needs_s:.0f} s, and {max(left_s, 0):.0f} s were left"
            found = _result(check, "skipped", why, rows=[], seconds=0.0)
        else:
            found = _checked(check, results, arguments, left_s)
        try:
            results.add(found)
        except OSError as error:  # a full disk; what follows is printed
            print(f"not written: {error}", file=sys.stderr)
            unwritten = True
        verdicts.append(found["verdict"])
        why = f": {found['why']}" if found["why"] else ""
        print(f"{number}/{len(checks)} {check.name}: {found['verdict']}, {found['seconds']:.0f} s{why}", flush=True)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
    print(f"{counts}; written: {results.path}, {results.log_path}")
    return int(unwritten or any(verdict in ("wrong", "failed") for verdict in verdicts))


def _checked(check: Check, results: SessionResults, arguments: Sequence[str], left_s: float) -> dict[str, Any]:
    """Run a check. Never raises: a check that cannot be started has failed."""
    try:
        return _run_check(check, results, arguments, left_s)
    except OSError as error:
        return _result(check, "failed", f"cannot be started: {error}", rows=[], seconds=0.0)


def _run_check(check: Check, results: SessionResults, arguments: Sequence[str], left_s: float) -> dict[str, Any]:
    limit_s = min(check.limit_s, left_s)
    with tempfile.TemporaryDirectory(prefix="tidemill-gpu-") as folder, results.log(check.name) as log:
        rows = Path(folder) / "rows.jsonl"
        program = "benchmarks.gpu.one_check"
        command = [sys.executable, "-m", program, check.function, "--rows", str(rows), *arguments]
        if check.kernels and "cpu" in arguments:
            command.append("--interpret")
        start = log.tell()
        ended = run_to_end(command, limit_s=limit_s, log=log)
        measured = _read(rows)
        said = _shortened(results.log_path, start)[-SAID:].decode(errors="replace").strip()
    why = _why_failed(ended, limit_s, cut=limit_s < check.limit_s, rows=len(measured))
    verdict = "failed" if why else _worst([row["verdict"] for row in measured])
    if not why:
        why = "; ".join(f"{row['row']}: {row['why']}" for row in measured if row["verdict"] in ("wrong", "failed"))
    found = _result(check, verdict, why, rows=measured, seconds=ended.seconds)
    return {**found, "said": said} if verdict == "failed" else found


def _shortened(log: Path, start: int) -> bytes:
    """The end of the output from `start` on; more than `LOGGED` bytes are removed before it."""
    with log.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - LOGGED))
        kept = file.read()
        if size - start > LOGGED:
            file.seek(start)
            file.write(b"...\n" + kept)
            file.truncate()
    return kept


def _why_failed(ended: Ended, limit_s: float, *, cut: bool, rows: int) -> str:
    """Why a process is no result; "" if it is one."""
    if ended.timed_out:
        which = "the end of the session" if cut else "its limit"
        return f"stopped after {limit_s:.0f} s, {which}; {rows} rows before"
    if ended.code:
        how = f"killed by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        return f"{how} after {rows} rows"
    if ended.left_behind:
        return f"left {ended.left_behind} processes running, which were killed"
    return "" if rows else "ended without a row"


def _worst(verdicts: Sequence[str]) -> str:
    if "failed" in verdicts or "wrong" in verdicts:
        return "failed" if "failed" in verdicts else "wrong"
    return "ok" if "ok" in verdicts else "skipped"


def _read(rows: Path) -> list[dict[str, Any]]:
    """The rows that a check wrote; the last line may be cut."""
    found = []
    for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def _result(
    check: Check, verdict: str, why: str, *, rows: Sequence[Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    return {
        "check": check.name,
        "about": check.about,
        "verdict": verdict,
        "why": why,
        "seconds": seconds,
        "limit_s": check.limit_s,
        "origin": origin(),
        "rows": rows,
    }


def _about() -> dict[str, Any]:
    return {"machine": measuring.machine(), "origin": origin()}


def _device_name() -> str:
    """Of the GPU; "" if there is none. Asked in another process: this one loads neither torch nor a driver."""
    command = [sys.executable, "-c", DEVICE_PROGRAM]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEVICE_LIMIT_S, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        print(f"torch did not name its device within {DEVICE_LIMIT_S:.0f} s", file=sys.stderr)
        return ""
    name = ended.stdout.strip()
    if not name:
        print(ended.stderr[-SAID:], end="", file=sys.stderr)  # torch warns there of a driver that does not fit
    return name


def _minutes(text: str) -> float:
    minutes = float(text)
    if not (0 < minutes < math.inf):
        raise argparse.ArgumentTypeError("a number above 0 is needed")
    return minutes


def _shown(path: Path) -> int:
    try:
        show(path, Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "180"))))
    except (OSError, ValueError) as error:
        print(f"--show {path}: {error}", file=sys.stderr)
        return 2
    return 0


def _print_checks() -> None:
    table = Table("check", "needs, s", "limit, s", "what", box=box.SIMPLE)
    for check in CHECKS:
        table.add_row(check.name, f"{check.needs_s:.0f}", f"{check.limit_s:.0f}", check.about)
    Console(width=140).print(table)
    print(f"limits together: {sum(check.limit_s for check in CHECKS) / 60:.0f} min; needed: ", end="")
    print(f"{sum(check.needs_s for check in CHECKS) / 60:.1f} min")


if __name__ == "__main__":
    try:
        with sigterm_as_ctrl_c():
            sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the results of finished checks are kept", file=sys.stderr)
        sys.exit(INTERRUPTED_CODE)
