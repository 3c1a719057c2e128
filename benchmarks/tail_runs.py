"""Tail batching in real runs on a task whose answers have a long tail, at policy lag 0.

    python -m benchmarks.tail_runs [--only equal,learning,time] [--seeds N]

GRPO from the start of `benchmarks.copying`, with `schedule.tail` = "wait" and "batching".

- *equal*: each run of tail batching once undisturbed, once with evictions and two SIGKILLs of the controller: weights
after every step, final files, members of every round and all samples are compared bit by bit.
- *learning*: held-out accuracy at equal steps, both schedules in turn, in one process.
- *time*: seconds of a step on Ray, one worker and one trainer, each a process with one thread. Runs alternate. All
samples of a round decode at once (`together`, ranked by the longest sample), or five wait for each slot (`shared`,
ranked by the nominal schedule). Both schedules train the same groups by the end, so the ratio of the mean step times
counts; the median leaves out most long rounds.

The aim: tail batching is at least 1.3 times as fast, and the difference of accuracy, as the mean over all evaluations,
has 0 in its 95 % interval.

`engine_steps` is the longest trained completion of a round, which with all samples at once is the number of engine
steps that it takes: their ratio is that of the step times if an engine step takes equally long at any batch size and
nothing else takes time.

Task and sizes were fixed before the measurement, after one revision. With batches of 16 prompts, a pilot of 16 steps on
a busy machine was slower with tail batching (0.9). On a CPU an engine step of 80 samples takes more than twice as long
as one of 8, unlike on a GPU, so the tail is cheap. Batches now have 8 prompts, and `engine_step_ms` is measured by the
number of samples. (A model of six layers had learned too little from the demonstrations.)
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.addition_runs import interval
from benchmarks.copying import ALPHABET, CONTEXT, STOP, WIDEST, numbers, prompt, start, write_rows
from benchmarks.equivalent_runs import digests, samples_of
from benchmarks.generation_tidemill import VERSION
from benchmarks.measuring import exit_code, print_records, write_part
from benchmarks.models import quiet
from benchmarks.origin import parsed
from benchmarks.ray_runs import total
from benchmarks.stopping import interruptible
from benchmarks.subjects import check_counts
from benchmarks.training_run import train
from benchmarks.turns import OFFLINE, ONE_THREAD
from tidemill.config.load import merge
from tidemill.config.schema import RunSpec
from tidemill.config.toml import tables_to_toml
from tidemill.core.records import GenerateRequest, SampleId, SamplingParams, pack_tokens
from tidemill.jobs.train import train as train_here
from tidemill.models.loading import load_model
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.telemetry.events import EVICTION, MIGRATION, read_events
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.metrics import STEP_TIME, MetricLine, read_metrics
from tidemill.telemetry.run_data import evaluations
from tidemill.telemetry.run_dir import TRAINING_PURPOSE, RunDirectory

NAME = "tail_runs"
SCHEDULES = ("wait", "batching")
AIM = 1.3
DEADLINE_S = 300.0
POLL_S = 0.01
GROUP_SIZE = 4
WARM_UP_POLLS = 8
COMMON: dict[str, Any] = {
    "scoring": {"rewards": [{"kind": "exact"}]},
    "sampling": {"max_new_tokens": WIDEST + 1, "stop": [STOP]},
    "engine": {"tick_s": 0.02},
    "batch": {"prompts": 8, "group_size": GROUP_SIZE},
    "optimizer": {"learning_rate": 2e-4},
    "trainer": {"threads": 1},
    "checkpoint": {"every_steps": 0},
    "eval": {"every_steps": 0, "prompts": 4},
    "telemetry": {"live": False},
}
EQUAL_STEPS, KILLED_AFTER = 20, (6, 13)
EQUAL: dict[str, Any] = {
    "engine": {"batch_invariant": True, "slots": 6, "tick_s": 0.005},
    "schedule": {"tail": "batching", "nominal_slots": 12},
    "checkpoint": {"every_steps": 5},
}
DISTURBED: dict[str, Any] = {
    "pool": {
        "kind": "synthetic",
        "workers": 3,
        "mean_time_to_eviction_s": 0.9,
        "mean_time_to_return_s": 0.1,
        "notice_s": 0.05,
        "noticed": 0.5,
    },
    # Seconds of the reserved engine, which takes part but leaves most work to preemptible workers.
    "fleet": {"seed_window_s": 0.05, "window_gain": 1e6, "drain_margin_s": 0.1},
}
LEARNING_STEPS = 24
LEARNING: dict[str, Any] = {"engine": {"slots": 48}, "eval": {"every_steps": 3, "prompts": 128}}
TIME_STEPS, BEGINNING = 40, 1  # the first step, in which the worker starts, is not counted
TIME: dict[str, Any] = {
    "runtime": "ray",
    "pool": {"kind": "static", "workers": 1},
    "fleet": {"seeding": False},
}
SLOTS = {"together": 48, "shared": 6}
NOMINAL_SLOTS = {"together": 0, "shared": 6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="equal,learning,time", help="parts, separated by commas")
    parser.add_argument("--seeds", type=int, help="of each part; default: 3, 10 and 6")
    options = parsed(parser)
    quiet()
    torch.set_num_threads(1)
    parts: dict[str, tuple[Callable[[Path, int], Iterator[dict[str, Any]]], int]] = {
        "equal": (equal_part, 3),
        "learning": (learning_part, 10),
        "time": (time_part, 6),
    }
    reached = True
    for name in options.only.split(","):
        part, seeds = parts[name]
        with tempfile.TemporaryDirectory(prefix="tidemill-tail-") as folder:
            for figures in part(Path(folder), options.seeds or seeds):  # so that it may be stopped
                write_part(NAME, name, figures, parts=tuple(parts))
        reached = reached and not exit_code(figures)
    return 0 if reached else 1


def run_spec(directory: Path, *, seed: int, steps: int, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a run from the common start; its prompts are written next to its directory."""
    rows, held_out = write_rows(directory.parent, seed=seed)
    here = {
        "run": {"seed": seed},
        "model": {"source": str(start())},
        "task": {"kind": "file", "path": str(rows), "held_out_path": str(held_out)},
        "trainer": {"steps": steps},
    }
    return merge(merge(COMMON, here), sections)


def schedule(tail: str, nominal_slots: int) -> dict[str, Any]:
    return {"tail": tail, "nominal_slots": nominal_slots} if tail == "batching" else {"tail": tail}


# Evictions and kills.


def equal_part(folder: Path, seeds: int) -> Iterator[dict[str, Any]]:
    runs = []
    for seed in range(seeds):
        here, recipes = {}, {}
        for kind, changes in (("quiet", {}), ("disturbed", DISTURBED | {"pool": DISTURBED["pool"] | {"seed": seed}})):
            here[kind], recipes[kind] = folder / f"{kind}-{seed}", folder / f"{kind}-{seed}.toml"
            spec = run_spec(here[kind], seed=seed, steps=EQUAL_STEPS, **EQUAL)
            recipes[kind].write_text(tables_to_toml(merge(spec, changes)))
        for step in KILLED_AFTER:
            train_killed(recipes["disturbed"], here["disturbed"], after_step=step)
        for kind, recipe in recipes.items():
            train(recipe, here[kind], environment=ONE_THREAD | OFFLINE, progress=False, deadline_s=DEADLINE_S)
        runs.append({"seed": seed, **differences(here["quiet"], here["disturbed"])})
        check_counts(
            f"seed {seed}", **{name: runs[-1][name] for name in ("evictions", "migrations", "groups_returned")}
        )
    print_records("tail batching: undisturbed run against one with evictions and two kills", runs)
    names = ("differing_steps", "differing_files", "differing_rounds", "differing_samples")
    yield {
        "runs": runs,
        "evictions": sum(run["evictions"] for run in runs),
        "kills": len(KILLED_AFTER) * len(runs),
        "reached": all(run[name] == 0 for run in runs for name in names),
    }


def train_killed(recipe: Path, run: Path, *, after_step: int) -> None:
    """Train until the metrics have a step, then SIGKILL the controller's process.

    Raises:
        RuntimeError: it ended before.
    """
    command = [sys.executable, "-m", "tidemill", "train", f"@{recipe}", "--json", "--run.dir", str(run)]
    metrics, until = run / "metrics.jsonl", time.monotonic() + DEADLINE_S
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | ONE_THREAD | OFFLINE,
    ) as process:
        try:
            while process.poll() is None and time.monotonic() < until:
                if metrics.is_file() and f'"step":{after_step},' in metrics.read_text():
                    return
                time.sleep(POLL_S)
            raise RuntimeError(f"{run.name} ended with {process.poll()} before step {after_step}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def differences(quiet_run: Path, disturbed: Path) -> dict[str, Any]:
    """Counts of what differs between two runs, and what disturbed the second."""
    pairs = list(zip(digests(quiet_run), digests(disturbed), strict=True))
    files = [
        sorted((run / "checkpoints" / f"step_{EQUAL_STEPS}").glob("*.safetensors")) for run in (quiet_run, disturbed)
    ]
    rounds = [members(run) for run in (quiet_run, disturbed)]
    ours, theirs = samples_of(quiet_run), samples_of(disturbed)
    events = Counter(event["event"] for _, event in read_lines(disturbed / "events.jsonl"))
    lines = [line for line in read_metrics(quiet_run / "metrics.jsonl") if line.step]
    return {
        "steps": len(pairs) - 1,
        "steps_that_learned": len({digest for digest, _ in pairs}) - 1,
        "samples": len(ours),
        "groups_returned": int(total(lines, "groups_returned")),
        "evictions": events[EVICTION],
        "migrations": events[MIGRATION],
        "kills": len(KILLED_AFTER),
        "differing_steps": sum(one != other for one, other in pairs),
        "differing_files": sum(one.read_bytes() != other.read_bytes() for one, other in zip(*files, strict=True)),
        "files": len(files[0]),
        "differing_rounds": sum(rounds[0].get(step) != rounds[1].get(step) for step in rounds[0] | rounds[1]),
        "differing_samples": sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys()),
    }


def members(run: Path) -> dict[int, Counter[tuple[str, int]]]:
    """Samples that each step trained on, by prompt and epoch."""
    found: dict[int, Counter[tuple[str, int]]] = {}
    for step, purpose, prompt_id, epoch, _ in samples_of(run):
        if purpose == TRAINING_PURPOSE:
            found.setdefault(step, Counter())[prompt_id, epoch] += 1
    return found


# Learning.


def learning_part(folder: Path, seeds: int) -> Iterator[dict[str, Any]]:
    curves: dict[str, list[dict[int, float]]] = {tail: [] for tail in SCHEDULES}
    for seed in range(seeds):
        for tail in SCHEDULES[:: 1 if seed % 2 else -1]:
            run = folder / f"{tail}-{seed}"
            sections = run_spec(run, seed=seed, steps=LEARNING_STEPS, schedule=schedule(tail, 0), **LEARNING)
            spec = RunSpec.model_validate(merge(sections, {"run": {"dir": run}}))
            if train_here(spec, telemetry_stream=io.StringIO())["interrupted"]:
                raise KeyboardInterrupt
            paths = RunDirectory(run)
            found = evaluations(read_events(paths.events), read_metrics(paths.metrics))
            curves[tail].append({one.step: one.greedy_accuracy or 0.0 for one in found})
            print(f"seed {seed}, {tail}: {curves[tail][-1]}", file=sys.stderr, flush=True)
    yield learning_figures(curves)


def learning_figures(curves: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, Any]:
    """Over seeds; the interval of the mean over all steps decides, since one of many intervals may miss 0 by chance."""
    pairs = list(zip(curves["wait"], curves["batching"], strict=True))
    steps = sorted(pairs[0][0])
    rows = [
        {
            "step": step,
            **{tail: statistics.fmean(curve[step] for curve in of_tail) for tail, of_tail in curves.items()},
            "difference": interval(batching[step] - wait[step] for wait, batching in pairs)._asdict(),
        }
        for step in steps
    ]
    print_records("held-out accuracy: mean over seeds; difference: batching - wait", [_flat(row) for row in rows])
    difference = interval(
        statistics.fmean(batching[step] - wait[step] for step in steps[1:]) for wait, batching in pairs
    )
    return {
        "seeds": len(pairs),
        "by_step": rows,
        "difference_over_steps": difference._asdict(),
        "curves": msgspec.to_builtins(curves, str_keys=True),
        "reached": difference.low <= 0 <= difference.high,
    }


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals as text."""
    return {
        name: f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})" if isinstance(value, dict) else value
        for name, value in row.items()
    }


# Time.


def time_part(folder: Path, seeds: int) -> Iterator[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    steps_ms = {samples: engine_step_ms(samples) for samples in (8, 16, 40, 80)}
    for seed in range(seeds):
        for slots in SLOTS:
            # The two runs that are compared follow each other, so that other load meets both.
            turns = SCHEDULES[:: 1 if seed % 2 else -1]
            pair = {tail: timed_run(folder / f"{slots}-{tail}-{seed}", slots, tail, seed) for tail in turns}
            runs.append({"case": slots, "seed": seed, **compared(pair)})
            print(f"  {runs[-1]}", file=sys.stderr, flush=True)
        cases = {slots: summary([run for run in runs if run["case"] == slots]) for slots in SLOTS}
        yield {
            "seeds": seed + 1,
            "aim": AIM,
            "cases": cases,
            "engine_step_ms": steps_ms,
            "runs": runs,
            "settings": {"common": COMMON, "time": TIME, "slots": SLOTS, "steps": TIME_STEPS, "not_counted": BEGINNING},
        }
    print_records("wait / batching", [_flat({"case": slots, **row}) for slots, row in cases.items()])


def engine_step_ms(samples: int) -> float:
    """CPU time of an engine step that decodes so many samples, without prefill."""
    model = load_model(start(), device=torch.device("cpu"))
    engine = EmbeddedEngine(model, decode=lambda _: "", slots=samples, context=CONTEXT, version=VERSION)
    engine.submit(
        [
            GenerateRequest(
                sample_id=SampleId(run_seed=0, purpose="benchmark", prompt_id=number, epoch=0, index=index),
                lease_id="benchmark",
                attempt=0,
                prompt_ids=pack_tokens([ALPHABET.index(character) for character in prompt(number)]),
                sampling=SamplingParams(max_new_tokens=WIDEST),
            )
            for number in numbers(samples // GROUP_SIZE, random.Random(0))
            for index in range(GROUP_SIZE)
        ]
    )
    for _ in range(WARM_UP_POLLS):
        engine.poll(0.0)
    before, began_s = engine.status().tokens_generated, time.process_time()
    while engine.status().running == samples:
        engine.poll(0.0)
    spent_s = time.process_time() - began_s
    return 1e3 * spent_s / ((engine.status().tokens_generated - before) / samples)


def timed_run(run: Path, slots: str, tail: str, seed: int) -> tuple[list[MetricLine], dict[int, Counter[str]]]:
    """Its steps, and the groups of each step by prompt."""
    sections = run_spec(
        run,
        seed=seed,
        steps=TIME_STEPS,
        schedule=schedule(tail, NOMINAL_SLOTS[slots]),
        engine={"slots": SLOTS[slots]},
        **TIME,
    )
    recipe = run.with_suffix(".toml")
    recipe.write_text(tables_to_toml(sections))
    train(recipe, run, environment=ONE_THREAD | OFFLINE, progress=False, deadline_s=DEADLINE_S)
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line.step]
    trained = {step: Counter(prompt_id for prompt_id, _ in groups) for step, groups in members(run).items() if step}
    return lines, trained


def compared(pair: Mapping[str, tuple[list[MetricLine], dict[int, Counter[str]]]]) -> dict[str, Any]:
    """Figures of the two runs of a seed; ratios are wait / batching."""
    counted = {tail: lines[BEGINNING:] for tail, (lines, _) in pair.items()}
    lines = counted["batching"]
    mean_s = {tail: statistics.fmean(_values(of_run, STEP_TIME)) for tail, of_run in counted.items()}
    median_s = {tail: statistics.median(_values(of_run, STEP_TIME)) for tail, of_run in counted.items()}
    rollout_s = {tail: statistics.fmean(_values(of_run, "time_rollout_s")) for tail, of_run in counted.items()}
    engine_steps = {tail: sum(_values(of_run, "completion_tokens_max")) for tail, of_run in counted.items()}
    discarded, generated = (total(lines, name) for name in ("tokens_discarded", "tokens_generated"))
    apart = groups_apart(*(pair[tail][1] for tail in SCHEDULES))
    return {
        "mean_step_s": mean_s,
        "median_step_s": median_s,
        "mean_ratio": mean_s["wait"] / mean_s["batching"],
        "median_ratio": median_s["wait"] / median_s["batching"],
        "rollout_ratio": rollout_s["wait"] / rollout_s["batching"],
        "rollout_share": {tail: rollout_s[tail] / mean_s[tail] for tail in SCHEDULES},
        "engine_steps_ratio": engine_steps["wait"] / engine_steps["batching"],
        "discarded_share": discarded / (discarded + generated),
        "groups_returned": int(total(lines, "groups_returned")),
        "groups_apart_at_end": apart[-1],
        "groups_apart_most": max(apart),
        "load_average": os.getloadavg()[0],
    }


def _values(lines: Iterable[MetricLine], name: str) -> list[float]:
    return [line.values[name] for line in lines]


def groups_apart(ours: Mapping[int, Counter[str]], theirs: Mapping[int, Counter[str]]) -> list[int]:
    """After each step, the groups that one run has trained on and the other not yet."""
    counts, apart = (Counter[str](), Counter[str]()), list[int]()
    for step in sorted(ours.keys() | theirs.keys()):
        for count, run in zip(counts, (ours, theirs), strict=True):
            count.update(run.get(step, Counter()))
        apart.append((counts[0] - counts[1]).total())
    return apart


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over seeds, with 95 % intervals."""
    names = ("mean_ratio", "median_ratio", "rollout_ratio", "engine_steps_ratio", "discarded_share")
    figures = {name: interval(run[name] for run in runs)._asdict() for name in names}
    same = all(run["groups_apart_at_end"] == 0 for run in runs)
    most = max(run["groups_apart_most"] for run in runs)
    return {
        **figures,
        "groups_apart_most": most,
        "same_groups_reached": same,
        "reached": figures["mean_ratio"]["value"] >= AIM,
    }


if __name__ == "__main__":
    sys.exit(interruptible(main))
