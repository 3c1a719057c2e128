"""Whether standard runs still give the results that were recorded, bit by bit.

    python -m benchmarks.standard_runs [--only WORDS] [--values FOLDER]
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
SHOWN = 8  # parts of a run that differ

Values = dict[str, Any]
"""What a run gave, by the name of the part: `run metric loss`."""

TIMED = re.compile(r"(^|_)time_|_s$|^cpu_|_bytes$")
"""Metrics of time and memory."""
MOVED = re.compile(
    r"evictions|crashes|migrations|tokens_(lost|recovered|recomputed|discarded|other_weights)|deltas_ignored|env_"
    r"|prompt_tokens_|samples_restarted|mismatch_.*/"
)
"""Metrics that depend on when machines come and go."""
PRINTED_TIMES = {"duration_s", "wall_s", "seconds", "tokens_per_s", "peak_rss_bytes", "training_s", "time"}
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
    parser.add_argument("--only", default="", help="runs, separated by commas")
    parser.add_argument("--values", type=Path, help="also write what is digested to this folder, to compare by diff")
    options = parsed(parser)
    chosen = options.only.split(",") if options.only else list(RUNS)
    if unknown := [name for name in chosen if name not in RUNS]:
        parser.error(f"there is no run {unknown[0]}; choose from {', '.join(RUNS)}")
    if options.record and options.only:
        parser.error("--record is for all runs; leave --only out")
    values = dict[str, Values]()
    for name in chosen:
        values[name] = values_of(name, RUNS[name])
        if options.values:
            options.values.mkdir(parents=True, exist_ok=True)
            (options.values / f"{name}.json").write_text(json.dumps(values[name], indent=1, sort_keys=True) + "\n")
    found = {name: digests(parts) for name, parts in values.items()}
    problems = disagreements(found, SAME)
    if options.record and not problems:
        write_result(NAME, {"runs": found})
        return 0
    if not options.record:
        recorded = json.loads((RESULTS / f"{NAME}.json").read_text())
        problems += differences({name: recorded["runs"].get(name) for name in chosen}, found)
        problems += other_machine(recorded["machine"], machine()) if problems else []
    print(*problems or [f"{len(found)} runs give the recorded results"], sep="\n")
    return int(bool(problems))


def differences(recorded: Mapping[str, Mapping[str, str] | None], found: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each run that differs, with the parts that do."""
    lines = []
    for name, parts in found.items():
        before = recorded.get(name)
        if before is None:
            lines.append(f"{name}: not recorded")
            continue
        differing = [part for part in [*parts, *(before.keys() - parts.keys())] if parts.get(part) != before.get(part)]
        words = {part: f" (only {'now' if part in parts else 'before'})" for part in before.keys() ^ parts.keys()}
        shown = [f"{part}{words.get(part, '')}" for part in differing[:SHOWN]]
        more = [f"{len(differing) - SHOWN} more"] if len(differing) > SHOWN else []
        lines += [f"{name}: {', '.join([*shown, *more])}"] if differing else []
    return lines


def disagreements(found: Mapping[str, Mapping[str, str]], same: Mapping[str, str]) -> list[str]:
    """Lines about runs whose samples or weights are not those of the run that they repeat under other conditions."""
    lines = []
    for name, other in same.items():
        if name in found and other in found:
            kept = [
                {part: value for part, value in found[run].items() if " metric " not in part} for run in (name, other)
            ]
            lines += [
                line.replace(":", f" is not {other}:", 1) for line in differences({name: kept[1]}, {name: kept[0]})
            ]
    return lines


def other_machine(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line if the record is from another processor or version of a package."""
    names = [name for name in ("cpu", "python", "torch", "transformers") if recorded.get(name) != here.get(name)]
    changes = [f"{name} {recorded.get(name)} became {here.get(name)}" for name in names]
    return [f"recorded elsewhere: {', '.join(changes)}"] if changes else []


def digests(values: Values) -> dict[str, str]:
    """12 hex digits for each part."""
    return {part: hashlib.sha256(_encoded(value)).hexdigest()[:12] for part, value in values.items()}


def values_of(name: str, run: StandardRun) -> Values:
    """Do a run in a temporary folder and read all it wrote.

    Raises:
        RuntimeError: a command failed, or what the run is about did not happen.
        subprocess.TimeoutExpired: a command exceeded its deadline.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tidemill-standard-") as place:
        folder = Path(place).resolve()
        for file, text in FILES.items():
            (folder / file).write_text(text)
        values: Values = {}
        for number, command in enumerate(run.commands, 1):
            printed = execute(command, folder)
            if not command.startswith(("tidemill train", "killed")) or "--dry-run" in command:
                values |= {f"command {number} {part}": value for part, value in printed_values(printed, folder)}
        values |= dict(read(folder, moves=run.moves))
        logs = "".join(path.read_text() for path in folder.rglob("events.jsonl"))
        if run.needs and f'"event":"{run.needs}"' not in logs:
            raise RuntimeError(f"{name}: no {run.needs} happened")
    print(f"{name}: {len(values)} parts, {time.monotonic() - started:.1f} s", flush=True)
    return values


def execute(command: str, folder: Path) -> str:
    """What a command prints on standard output.

    Raises:
        RuntimeError, subprocess.TimeoutExpired: see `values_of`.
    """
    killed, words = command.startswith("killed "), shlex.split(command.removeprefix("killed "))
    arguments = [sys.executable, *(["-m", "tidemill", *words[1:]] if words[0] == "tidemill" else words[1:])]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            arguments,
            cwd=folder,
            env=os.environ | ONE_THREAD | OFFLINE | path,
            stdout=out,
            stderr=err,
            start_new_session=True,
        ) as process,
    ):
        try:
            if killed:
                _kill_in_time(process, folder / "run" / "metrics.jsonl")
            code = process.wait(DEADLINE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if code != (-signal.SIGKILL if killed else 0):
            err.seek(0)
            raise RuntimeError(f"`{command}` ended with {code}: {err.read()[-SAID:]}")
        out.seek(0)
        return out.read()


def _kill_in_time(process: subprocess.Popen[bytes], metrics: Path) -> None:
    """Kill a run once it has written the metrics of a step."""
    until = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < until:
        if metrics.is_file() and f'"step":{KILLED_AFTER_STEP},' in metrics.read_text():
            os.killpg(process.pid, signal.SIGKILL)
            return
        time.sleep(POLL_S)


def printed_values(printed: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object, or the lines of a text, without times and places."""
    text = FREE.sub("", printed.replace(str(folder), ".").replace(str(Path.home()), "~"))
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


def sample_values(lines: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> list[list[Any]]:
    """(key, fields) of every sample that has one of them, sorted by the key."""
    rows = [
        [[line.get(name) for name in SAMPLE_KEY], _plain({name: line[name] for name in fields if name in line})]
        for line in lines
        if any(name in line for name in fields)
    ]
    return sorted(rows, key=_encoded)


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


def _plain(value: Any, left_out: set[str] | frozenset[str] = frozenset({"segments"})) -> Any:
    """Without some keys: of a turn, the machines that generated it."""
    if isinstance(value, dict):
        return {key: _plain(each, left_out) for key, each in value.items() if key not in left_out}
    return [_plain(each, left_out) for each in value] if isinstance(value, list) else value


def _encoded(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


if __name__ == "__main__":
    try:
        with sigterm_as_ctrl_c():
            sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_CODE)
