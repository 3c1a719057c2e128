"""Reads the times of a run's parts from its logs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import numpy as np

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.formatting import counted
from tidemill.core.records import Record
from tidemill.planner.calibration.least_squares import Array
from tidemill.telemetry.events import CHECKPOINT, DECODE, EVALUATION, JOIN, PUBLISH, PULL
from tidemill.telemetry.fleet_figures import amount
from tidemill.telemetry.jsonl import encode
from tidemill.telemetry.metrics import CONTROLLER_CPU, STEP_TIME, MetricLine
from tidemill.telemetry.run_data import RunData
from tidemill.telemetry.sample_files import Sample

FEWEST_STEPS = 3
"""One step to warm up, and two others."""
QUIET = 0.9
"""Minimum fraction of the engines' time on a processor on an otherwise idle machine; the controller's thread takes the
rest through Python's lock."""
PASSES = ("passes", "rows", "prefilled", "drawn", "context_tokens")
"""Causes of an engine's time, the most important first."""
PROMPT_TOKENS = ("prompt_tokens_computed", "prompt_tokens_reused")
TRAINING = ("optimizer_steps", "tokens_packed", "pairs_packed")
"""Causes of the trainer's time."""


class Hardware(Record):
    """The machine that the costs belong to."""

    processor: str
    cores: Annotated[int, msgspec.Meta(ge=1)]


class Session(Record):
    machine: Hardware


class Manifest(Record):
    """The fields of manifest.json that are needed here."""

    sessions: Annotated[tuple[Session, ...], msgspec.Meta(min_length=1)]
    run_id: str = ""


class Observed(Record):
    """The costs of one run. Lists are in the order of the logs."""

    spec: RunSpec
    manifest: Manifest
    machine: dict[str, Any]  # the event
    events: list[dict[str, Any]]
    metrics: list[MetricLine]  # steps, without the line before the first
    first_steps: set[int]  # of each session
    samples: list[Sample]  # of training
    held_out: list[Sample]

    @property
    def on_processor(self) -> bool:
        """Whether models compute in single threads on the machine's cores; then costs are processor times, which do not
        depend on other load."""
        return self.machine.get("device") == "cpu" and self.machine.get("threads") == 1

    @property
    def engine_work(self) -> tuple[Array, Array]:
        """(amounts [N, len(PASSES)], seconds [N])"""
        name = "cpu_s" if self.on_processor else "busy_s"
        rows = [row for event in self.named(DECODE) for row in _work(event)]
        seconds = np.array([amount(row, name) for row in rows])
        return _table([[amount(row, cause) for cause in PASSES] for row in rows], len(PASSES)), seconds

    @property
    def processor_share(self) -> float:
        """Fraction of the engines' time on a processor: lower if other programs used the machine."""
        rows = [row for event in self.named(DECODE) for row in _work(event)]
        busy_s = sum(amount(row, "busy_s") for row in rows)
        return sum(amount(row, "cpu_s") for row in rows) / busy_s if busy_s else 1.0

    @property
    def quiet(self) -> bool:
        """Whether the machine was otherwise idle."""
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
        """Steps without the first of each session, which warms up."""
        return [line for line in self.metrics if line.step not in self.first_steps]

    @property
    def controller_s(self) -> list[float]:
        """Controller time per sample, for each usual step."""
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
        """(fetching and verifying, swapping) of each pull."""
        return [
            (max(0.0, amount(event, "duration_s") - amount(event, "swap_s")), amount(event, "swap_s"))
            for event in self.named(PULL)
        ]

    @property
    def checkpoint_s(self) -> list[float]:
        return [amount(event, "duration_s") for event in self.named(CHECKPOINT)]

    @property
    def joins_s(self) -> list[float]:
        """From each lease to the worker's first possible report, including the pull."""
        return [amount(event, "duration_s") for event in self.named(JOIN) if "error" not in event]

    @property
    def boots_s(self) -> list[float]:
        """Boot time of each worker, without its first pull and its wait for a version."""
        pulled: dict[tuple[float, str], float] = {}
        for event in self.named(PULL):
            pulled.setdefault((amount(event, "session"), str(event.get("lease"))), amount(event, "duration_s"))
        return [
            max(0.0, amount(event, "duration_s") - pulled.get((amount(event, "session"), str(event.get("lease"))), 0.0))
            for event in self.named(JOIN)
            if "error" not in event
        ]

    @property
    def step_s(self) -> list[float]:
        """Wall time of each step in `usual`."""
        return [line.values[STEP_TIME] for line in self.usual if STEP_TIME in line.values]

    @property
    def step_cpu_s(self) -> list[float]:
        """CPU time of each step in `usual`: engines, trainer thread and controller thread."""
        engines_s: defaultdict[int, float] = defaultdict(float)
        for event in self.named(DECODE):
            engines_s[int(amount(event, "step"))] += sum(amount(row, "cpu_s") for row in _work(event))
        return [
            engines_s[line.step] + line.values.get("cpu_train_s", 0.0) + line.values.get(CONTROLLER_CPU, 0.0)
            for line in self.usual
            if STEP_TIME in line.values
        ]

    def unhindered_step_s(self, most: float = math.inf) -> list[float]:
        """Wall time of each usual step up to `most`.

        Without the waits for a processor if one thread computes everything; several threads may have waited for
        each other.
        """
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
        """Mean tokens per prompt; includes the prefixes of migrated samples."""
        tokens = [
            sum(line.values.get(name, 0.0) for name in PROMPT_TOKENS) / line.values["samples"]
            for line in self.metrics
            if line.values.get("samples") and not line.values.get("migrations")
        ]
        return fmean(tokens) if tokens else 1.0

    @property
    def new_prompt_share(self) -> float:
        """Fraction of a group's prompt that was computed; the rest is shared with other prompts."""
        groups = sum(line.values.get("samples", 0.0) for line in self.metrics) / self.spec.batch.group_size
        computed = sum(line.values.get("prompt_tokens_computed", 0.0) for line in self.metrics)
        return computed / max(groups * self.prompt_tokens, 1e-9)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Those of the task's held-out prompts."""
        return [event for event in self.named(EVALUATION) if not event.get("recovered") and "set" not in event]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def new_by_depth(self, most: int = 64) -> tuple[float, ...]:
        """For k = 1, 2, ...: of a group's samples with more than k tokens, the fraction with distinct first k tokens.

        Training computes a prefix that samples share only once.
        """
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
        UserError: there is no run, it has too few steps, or it lacks samples, machine or engine measurements.
    """
    data, where = RunData.read(run_dir), str(run_dir)
    run = data.run
    # A duplicated line is one observation.
    events = list({encode(event): event for event in data.events}.values())
    lines = [line for line in data.metrics if line.step > 0 and line.values.get(STEP_TIME, 0.0) > 0]
    sessions: dict[int, int] = {}
    for line in lines:
        sessions.setdefault(line.session, line.step)
    first_steps = set(sessions.values())
    if sum(line.step not in first_steps and line.step <= len(lines) for line in lines) < FEWEST_STEPS - 1:
        steps = counted(len(lines), "timed step")
        what = f"a run of {steps} is too short: the first step of a session warms up, and two others are needed"
        raise UserError(what, where=where, hint=f"train for at least {FEWEST_STEPS} steps, better ten")
    machine = next((event for event in events if event["event"] == "machine"), {})
    worked = any(_work(event) for event in events if event["event"] == DECODE)
    if not worked or sum(line.values.get("samples", 0.0) for line in lines) <= 0:
        what = "the log has no measurements of the engines"
        raise UserError(what, where=where, hint="calibrate a run of `tidemill train` made with this version")
    samples = data.samples(training=True)
    if not any(sample.length for sample in samples):
        what = "has no samples of training, which are needed for completion lengths"
        raise UserError(what, where=str(run.samples), hint="calibrate a run that still has its samples")
    try:
        manifest = msgspec.convert(data.manifest, Manifest)
    except msgspec.ValidationError as error:
        what = f"does not name the machine of the run: {error}"
        raise UserError(what, where=str(run.manifest), hint="calibrate a run with a complete manifest") from error
    return Observed(
        spec=data.spec,
        manifest=manifest,
        machine=machine,
        events=events,
        metrics=lines,
        first_steps=first_steps,
        samples=samples,
        held_out=data.samples(training=False),
    )


def _work(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The work of an engine by octaves of the context; ignores damaged entries."""
    rows = event.get("work")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _table(rows: list[list[float]], columns: int) -> Array:
    return np.array(rows, dtype=np.float64).reshape(-1, columns)
