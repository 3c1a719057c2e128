"""Whether standard runs still give the results that were recorded, bit by bit.

    python -m benchmarks.standard_runs [--only RUN ...] [--values FOLDER]
    python -m benchmarks.standard_runs --record

Every run of `benchmarks.standard_cases` happens in new processes with one thread, in a folder of its own. Of all run
directories in it digests are taken: of the weights after every step and of the model files, of every metric over the
steps, of the samples (without their order), of rows that stages wrote, and of what commands printed. Times, memory and
the names of machines are left out. A difference from results/standard_runs.json is printed, and ends with 1. It depends
on the machine and the version of torch, too: record before a change, and compare after it on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import RESULTS, machine, write_result
from benchmarks.origin import ROOT, parsed
from benchmarks.standard_cases import FILES, RUNS, SAME, StandardRun
from benchmarks.stopping import INTERRUPTED_CODE, sigterm_as_ctrl_c
from benchmarks.turns import OFFLINE, ONE_THREAD

NAME = "standard_runs"
DEADLINE_S = 300.0  # of one command
KILLED_AFTER_STEP = 12
POLL_S = 0.002
SAID = 2000  # characters of a failed command's last output
SHOWN = 40  # parts of a run that differ

TIMED = re.compile(r"(^|_)time_|_s$|^cpu_|_bytes$")
"""Metrics of time and memory."""
MOVED = re.compile(
    r"evictions|crashes|migrations|tokens_(lost|recovered|recomputed|discarded|other_weights)|deltas_ignored|env_"
    r"|prompt_tokens_|samples_restarted|mismatch_.*/|workers_mean"
)
"""Metrics that depend on when machines come and go."""
PRINTED_TIMES = {"duration_s", "wall_s", "peak_rss_bytes"}
MACHINES = {"segments", "call_id"}
"""Of a turn: which machine generated it, and the random names of its calls."""
STAGE_DIGEST = re.compile(r"-[0-9a-f]{10}$")
FREE = re.compile(r"[\d.]+ [kMG]B are free")
SAMPLE_PARTS = {
    "prompts": ("prompt_id", "prompt", "messages", "answer"),
    "tokens": ("token_ids",),
    "logprobs": ("logprobs",),
    "rewards": ("reward", "components", "valid", "reason", "correct", "weight"),
    "versions": ("versions",),
    "ends": ("finish", "episode_end", "fault"),
    "turns": ("turns",),
}
SAMPLE_KEY = ("step", "purpose", "prompt_id", "epoch", "index")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the digests of all runs")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--values", type=Path, help="also write what is digested to this folder, to compare by diff")
    options = parsed(parser)
    if not options.record and not (RESULTS / f"{NAME}.json").is_file():
        parser.error("nothing is recorded yet; use --record first")
    found, problems = dict[str, dict[str, str]](), list[str]()
    for name in RUNS if options.record else options.only:
        try:
            values = values_of(name, RUNS[name])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            problems.append(f"{name}: {error}")
            continue
        if options.values:
            options.values.mkdir(parents=True, exist_ok=True)
            (options.values / f"{name}.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
        found[name] = {part: hashlib.sha256(encoded(value)).hexdigest()[:12] for part, value in values.items()}
    problems += disagreements(found, SAME)
    if options.record and not problems:
        write_result(NAME, {"runs": found})
    elif not options.record:
        recorded = json.loads((RESULTS / f"{NAME}.json").read_text())
        problems += differences(recorded["runs"], found)
        here = machine()
        changed = [name for name in ("cpu", "python", "torch") if recorded["machine"][name] != here[name]]
        problems += [f"recorded elsewhere: another {', '.join(changed)}"] if problems and changed else []
    print(*problems or [f"{len(found)} runs give the recorded results"], sep="\n")
    return int(bool(problems))


def differences(recorded: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each run that differs, with the parts that do."""
    lines = []
    for name, parts in found.items():
        before = recorded.get(name, {})
        differing = sorted(part for part in parts.keys() | before.keys() if parts.get(part) != before.get(part))
        more = [f"{len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        lines += [f"{name}: {', '.join([*differing[:SHOWN], *more])}"] if differing else []
    return lines


def disagreements(found: Mapping[str, Mapping[str, str]], same: Mapping[str, str]) -> list[str]:
    """Lines about runs whose samples or weights are not those of the run that they repeat under other conditions."""
    kept = {
        name: {part: digest for part, digest in parts.items() if " metric " not in part}
        for name, parts in found.items()
    }
    lines = []
    for name, other in same.items():
        if name in found and other in found:
            title = f"{name} is not {other}"
            lines += differences({title: kept[other]}, {title: kept[name]})
    return lines


def values_of(name: str, run: StandardRun) -> dict[str, Any]:
    """Do a run in a temporary folder, and return all that it wrote by the name of the part (`run metric loss`).

    Raises:
        RuntimeError: a command failed, or what the run is about did not happen.
        subprocess.TimeoutExpired: a command exceeded its deadline.
    """
    started, values = time.monotonic(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="tidemill-standard-") as place:
        folder = Path(place).resolve()
        for file, text in FILES.items():
            (folder / file).write_text(text)
        for number, command in enumerate(run.commands, 1):
            printed = execute(command, folder)
            if command.startswith("python") or "--json" in command:
                values |= {f"command {number} {part}": value for part, value in printed_values(printed, folder)}
        values |= dict(read(folder, moves=run.moves))
        logs = "".join(path.read_text() for path in folder.rglob("events.jsonl"))
        if run.needs and f'"event":"{run.needs}"' not in logs:
            raise RuntimeError(f"{name}: no {run.needs} happened")
    print(f"{name}: {len(values)} parts, {time.monotonic() - started:.1f} s", flush=True)
    return values


def execute(command: str, folder: Path) -> str:
    """What a command prints on standard output. Raises: see `values_of`."""
    killed = command.startswith("killed ")
    words = shlex.split(command.removeprefix("killed "))
    arguments = ["-m", *words] if words[0] == "tidemill" else words[1:]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | ONE_THREAD | OFFLINE | path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            if killed:
                _kill_in_time(process, folder / "run" / "metrics.jsonl")
            printed, said = process.communicate(timeout=DEADLINE_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != (-signal.SIGKILL if killed else 0):
        raise RuntimeError(f"`{command}` ended with {process.returncode}: {said[-SAID:]}")
    return printed


def _kill_in_time(process: subprocess.Popen[str], metrics: Path) -> None:
    """Kill a run once it has written the metrics of a step."""
    until = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < until:
        if metrics.is_file() and f'"step":{KILLED_AFTER_STEP},' in metrics.read_text():
            os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(POLL_S)


def printed_values(printed: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object, or the lines of a text, without times and places."""
    text = FREE.sub("", printed.replace(str(folder), ".").replace(str(ROOT), "ROOT").replace(str(Path.home()), "~"))
    try:
        content = json.loads(text)
    except ValueError:
        content = {"text": text.splitlines()}
    yield from _plain(content if isinstance(content, dict) else {"list": content}, PRINTED_TIMES).items()


def read(folder: Path, *, moves: bool) -> Iterator[tuple[str, Any]]:
    """(part, value) of everything below a folder that a run promises to repeat."""
    for path in sorted(folder.rglob("*.safetensors")):
        if "trainer_state" not in path.parts:
            yield f"{_place(path, folder)} weights", tensors(path)
    for path in sorted(folder.rglob("rows.jsonl")):
        if path.parent != folder:
            yield f"{_place(path, folder)}", _lines(path)
    for path in sorted(folder.rglob("metrics.jsonl")):
        here, steps = _place(path.parent, folder), _lines(path)
        yield from ((f"{here} weights after step {line['step']}", line["weights_digest"]) for line in steps)
        for metric in sorted(set().union(*steps) - {"time", "session", "weights_digest"}):
            if not TIMED.search(metric) and not (moves and MOVED.match(metric)):
                yield f"{here} metric {metric}", [(line["step"], line[metric]) for line in steps if metric in line]
    for path in sorted(folder.rglob("samples")):
        lines = [line for file in path.glob("*.jsonl") for line in _lines(file)]
        for part, fields in SAMPLE_PARTS.items():
            if values := sample_values(lines, fields):
                yield f"{_place(path.parent, folder)} samples {part}", values


def sample_values(lines: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> list[Any]:
    """(key, fields) of every sample that has one of them, sorted by the key."""
    values = [
        (
            [line.get(name) for name in SAMPLE_KEY],
            _plain({name: line[name] for name in fields if name in line}, MACHINES),
        )
        for line in lines
    ]
    return sorted((each for each in values if each[1]), key=encoded)


def tensors(path: Path) -> dict[str, str]:
    """Type, shape and digest of every tensor of a safetensors file, without its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {
        name: f"{entry['dtype']} {entry['shape']} {hashlib.sha256(data[slice(*entry['data_offsets'])]).hexdigest()}"
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _place(path: Path, folder: Path) -> str:
    """A path below a folder; stages without the digests of their configurations."""
    return "/".join(STAGE_DIGEST.sub("", part) for part in path.relative_to(folder).parts)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _plain(value: Any, left_out: set[str]) -> Any:
    """Without some keys, also inside."""
    if isinstance(value, dict):
        return {key: _plain(each, left_out) for key, each in value.items() if key not in left_out}
    return [_plain(each, left_out) for each in value] if isinstance(value, list) else value


def encoded(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


if __name__ == "__main__":
    try:
        with sigterm_as_ctrl_c():
            sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
