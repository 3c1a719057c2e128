"""What the logs of a run tell of the time that its parts took."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import numpy as np

from tidemill.config.load import from_toml
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.planner.calibration.least_squares import Array
from tidemill.telemetry.events import CHECKPOINT, DECODE, EVALUATION, JOIN, LEASE, PUBLISH, PULL, read_events
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.metrics import CONTROLLER_CPU, STEP_TIME, MetricLine, read_metrics
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.sample_files import Sample, read_samples

FEWEST_STEPS = 3
"""One to warm up, and two that say what a step is like."""
QUIET = 0.9
"""Of the time that engines computed, what they had a processor on a machine that did nothing else; the controller's
thread takes its part of Python's lock."""
PASSES = ("passes", "rows", "prefilled", "drawn", "context_tokens")
"""Causes of an engine's time, the most important first."""
PROMPT_TOKENS = ("prompt_tokens_computed", "prompt_tokens_reused")
TRAINING = ("optimizer_steps", "tokens_packed", "pairs_packed")
"""Causes of the trainer's."""


class Hardware(Record):
    """What the costs are of."""

    processor: str
    cores: Annotated[int, msgspec.Meta(ge=1)]


class Session(Record):
    machine: Hardware


class Manifest(Record):
    """Of manifest.json, what is needed here."""

    sessions: Annotated[tuple[Session, ...], msgspec.Meta(min_length=1)]
    run_id: str = ""


class Observed(Record):
    """One run, as far as costs go. Lists are in the order of the logs."""

    spec: RunSpec
    manifest: Manifest
    machine: dict[str, Any]  # the event
    events: list[dict[str, Any]]
    metrics: list[MetricLine]  # steps, the one before the first left out
    first_steps: set[int]  # of each session
    samples: list[Sample]  # of training
    held_out: list[Sample]

    @property
    def on_processor(self) -> bool:
        """Whether models compute in single threads on the machine's own cores; then processor time is what their work
        takes, whoever else is on the machine."""
        return self.machine.get("device") == "cpu" and self.machine.get("threads") == 1

    @property
    def engine_work(self) -> tuple[Array, Array]:
        """(amounts [N, len(PASSES)], seconds [N])"""
        seconds = "cpu_s" if self.on_processor else "busy_s"
        rows = [row for event in self.named(DECODE) for row in _work(event)]
        return _table([[amount(row, name) for name in PASSES] for row in rows], len(PASSES)), np.array(
            [amount(row, seconds) for row in rows]
        )

    @property
    def processor_share(self) -> float:
        """Of the time that engines computed, what they had a processor: less where others were on the machine."""
        rows = [row for event in self.named(DECODE) for row in _work(event)]
        busy_s = sum(amount(row, "busy_s") for row in rows)
        return sum(amount(row, "cpu_s") for row in rows) / busy_s if busy_s else 1.0

    @property
    def quiet(self) -> bool:
        """Whether the machine did nothing else, as far as engines noticed."""
        return self.processor_share >= QUIET

    def training(self, lines: Iterable[MetricLine]) -> tuple[Array, Array]:
        """(amounts [N, len(TRAINING)], seconds [N])"""
        seconds = "cpu_train_s" if self.on_processor else "time_train_s"
        rows, times = [], []
        for line in lines:
            rows.append([float(line.optimizer_steps), *(line.values.get(name, 0.0) for name in TRAINING[1:])])
            times.append(line.values.get(seconds, 0.0))
        return _table(rows, len(TRAINING)), np.array(times)

    @property
    def usual(self) -> list[MetricLine]:
        """Steps but the first of each session, which warm up."""
        return [line for line in self.metrics if line.step not in self.first_steps]

    @property
    def controller_s(self) -> list[float]:
        """By sample, of each usual step."""
        return [
            line.values[CONTROLLER_CPU] / line.values["samples"]
            for line in self.usual
            if line.values.get("samples") and CONTROLLER_CPU in line.values
        ]

    @property
    def publish_s(self) -> list[float]:
        return [amount(event, "duration_s") for event in self.named(PUBLISH) if amount(event, "version") > 0]

    @property
    def pulls_s(self) -> list[tuple[float, float]]:
        """(fetching and verifying, swapping) of each."""
        pulls = self.named(PULL)
        return [
            (max(0.0, amount(event, "duration_s") - amount(event, "swap_s")), amount(event, "swap_s"))
            for event in pulls
        ]

    @property
    def checkpoint_s(self) -> list[float]:
        return [amount(event, "duration_s") for event in self.named(CHECKPOINT)]

    @property
    def joins_s(self) -> list[float]:
        """From the lease to the first report that could come, pull and all."""
        return [amount(event, "duration_s") for event in self.named(JOIN) if "error" not in event]

    @property
    def boots_s(self) -> list[float]:
        """Of each worker that came up, without its first pull and what it waited for a version to be there."""
        pulled: dict[tuple[float, str], float] = {}
        for event in self.named(PULL):
            pulled.setdefault((amount(event, "session"), str(event.get("lease"))), amount(event, "duration_s"))
        return [
            max(0.0, amount(event, "duration_s") - pulled.get((amount(event, "session"), str(event.get("lease"))), 0.0))
            for event in self.named(JOIN)
            if "error" not in event
        ]

    @property
    def start_s(self) -> float:
        """From the beginning of the first session to the controller's loop."""
        return amount(self.machine, "elapsed_s")

    @property
    def step_s(self) -> list[float]:
        """Wall time of each usual step."""
        return [line.values[STEP_TIME] for line in self.usual if STEP_TIME in line.values]

    @property
    def step_cpu_s(self) -> list[float]:
        """CPU time of each usual step: of engines, the trainer's thread and the controller's."""
        engines_s: defaultdict[int, float] = defaultdict(float)
        for event in self.named(DECODE):
            engines_s[int(amount(event, "step"))] += sum(amount(row, "cpu_s") for row in _work(event))
        return [
            engines_s[line.step] + line.values.get("cpu_train_s", 0.0) + line.values.get(CONTROLLER_CPU, 0.0)
            for line in self.usual
            if STEP_TIME in line.values
        ]

    def unhindered_step_s(self, most: float = math.inf) -> list[float]:
        """Wall time of each usual step up to `most`. Where one thread computes for all on a machine that others used,
        less its waits for a processor; where there are several threads, they may have been the others."""
        waited_s: defaultdict[int, float] = defaultdict(float)
        if self.on_processor and self.spec.runtime == "inprocess" and not self.quiet:
            for event in self.named(DECODE):
                if event.get("purpose") == "train":
                    waited_s[int(amount(event, "step"))] += sum(
                        amount(row, "busy_s") - amount(row, "cpu_s") for row in _work(event)
                    )
            for line in self.usual:
                waited_s[line.step] += line.values.get("time_train_s", 0.0) - line.values.get("cpu_train_s", 0.0)
        return [
            line.values[STEP_TIME] - waited_s[line.step]
            for line in self.usual
            if STEP_TIME in line.values and line.step <= most
        ]

    @property
    def prompt_tokens(self) -> float:
        """Of one prompt, on average; moved samples' prefixes are in it where there were any."""
        tokens = [
            sum(line.values.get(name, 0.0) for name in PROMPT_TOKENS) / line.values["samples"]
            for line in self.metrics
            if line.values.get("samples") and not line.values.get("migrations")
        ]
        return fmean(tokens) if tokens else 1.0

    @property
    def new_prompt_share(self) -> float:
        """Of a group's prompt, what was computed for it: the rest it had in common with others."""
        groups = sum(line.values.get("samples", 0.0) for line in self.metrics) / self.spec.batch.group_size
        computed = sum(line.values.get("prompt_tokens_computed", 0.0) for line in self.metrics)
        return computed / max(groups * self.prompt_tokens, 1e-9)

    @property
    def leases(self) -> int:
        return len(self.named(LEASE))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [event for event in self.named(EVALUATION) if not event.get("recovered")]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def new_by_depth(self, most: int = 64) -> tuple[float, ...]:
        """Of the samples of a group that go on after k tokens, the share with k tokens that no other begins with:
        what training computes once where they begin alike. For k = 1, 2, ... as far as there are such samples."""
        groups: defaultdict[tuple[int, str], list[tuple[int, ...]]] = defaultdict(list)
        for sample in self.samples:
            groups[sample.step, sample.prompt_id].append(sample.token_ids)
        shares = []
        for depth in range(1, most + 1):
            longer = [[ids[:depth] for ids in group if len(ids) > depth] for group in groups.values()]
            count = sum(map(len, longer))
            if not count:
                break
            shares.append(sum(len(set(prefixes)) for prefixes in longer) / count)
        return tuple(shares)


def observe(run_dir: Path) -> Observed:
    """Read a run's logs.

    Raises:
        UserError: it is no run, has too few steps with a time, was written before engines told of their work, or lacks
            its samples or its machine.
    """
    run, where = RunDirectory(run_dir), str(run_dir)
    text = run.read_config()
    if text is None:
        raise UserError("no run there", where=where, hint="name a directory given as --run.dir")
    # A line that is there twice is one observation.
    events = list({encode(event): event for event in read_events(run.events)}.values())
    lines = [line for line in read_metrics(run.metrics) if line.step > 0 and line.values.get(STEP_TIME, 0.0) > 0]
    sessions: dict[int, int] = {}
    for line in lines:
        sessions.setdefault(line.session, line.step)
    first_steps = set(sessions.values())
    if sum(line.step not in first_steps and line.step <= len(lines) for line in lines) < FEWEST_STEPS - 1:
        steps = counted(len(lines), "timed step")
        what = f"a run of {steps} says too little: a session's first warms up, and two more say what a step takes"
        raise UserError(what, where=where, hint=f"let it train for {FEWEST_STEPS} steps at least, better for ten")
    machine = next((event for event in events if event["event"] == "machine"), {})
    worked = any(_work(event) for event in events if event["event"] == DECODE)
    if not worked or sum(line.values.get("samples", 0.0) for line in lines) <= 0:
        what = "its engines did not tell what they computed"
        raise UserError(what, where=where, hint="calibrate on a run of `tidemill train` made with this version")
    files = run.sample_files()
    samples = [sample for _, purpose, path in files if purpose == "train" for sample in read_samples(path)]
    if not any(sample.length for sample in samples):
        hint = "calibrate on a run whose samples are still there"
        raise UserError("no samples of training, and costs follow their lengths", where=str(run.samples), hint=hint)
    return Observed(
        spec=from_toml(text, source=str(run.config)),
        manifest=_manifest(run),
        machine=machine,
        events=events,
        metrics=lines,
        first_steps=first_steps,
        samples=samples,
        held_out=[sample for _, purpose, path in files if purpose != "train" for sample in read_samples(path)],
    )


def _manifest(run: RunDirectory) -> Manifest:
    try:
        return msgspec.convert(run.read_manifest(), Manifest)
    except msgspec.ValidationError as error:
        what = f"does not say which machine the run was on: {error}"
        raise UserError(what, where=str(run.manifest), hint="calibrate on a run whose manifest is whole") from error


def _work(event: dict[str, Any]) -> list[dict[str, Any]]:
    """What an engine computed, by octaves; what is damaged is left out."""
    rows = event.get("work")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _table(rows: list[list[float]], columns: int) -> Array:
    return np.array(rows, dtype=np.float64).reshape(-1, columns)
