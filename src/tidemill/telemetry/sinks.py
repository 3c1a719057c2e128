"""Optional sinks for metrics: TensorBoard, Weights & Biases, trackio. A sink that fails is dropped."""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tidemill.config.telemetry import TelemetryConfig
from tidemill.core.errors import UserError
from tidemill.core.packages import install_command
from tidemill.core.records import Record
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.metrics import read_metrics
from tidemill.telemetry.run_dir import samples_name

TABLE, COLUMNS = "completions", ("prompt", "completion", "reward")
"""Name and columns of the table of samples."""
TABLE_ROWS, SHOWN = 4, 2000
"""Its rows per step, and the characters of a text."""


class SinkContext(Record):
    """Facts about the run that a sink gets when it opens."""

    run: str
    directory: Path
    config: dict[str, Any]
    run_id: str  # the same over all sessions of a run
    last_step: int  # the newest step of earlier sessions; 0 for a new run
    telemetry: TelemetryConfig = TelemetryConfig()


class Sink(Protocol):
    """Receives the metrics of each step. If it raises, the recorder drops it."""

    def step(self, step: int, values: dict[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Prepare for values of steps after `step` to be sent again; by default nothing."""
        return

    def close(self, *, failed: bool) -> None: ...


class TensorBoardSink:
    """Event files in RUN/tensorboard, written with TensorBoard's event writer; needs neither torch nor TensorFlow."""

    def __init__(self, context: SinkContext) -> None:
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(str(context.directory / "tensorboard"))

    def step(self, step: int, values: dict[str, float]) -> None:
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=scalars)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        # Makes TensorBoard hide later steps of earlier files.
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=log))

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class HistorySink(Sink):
    """A logger with runs of its own, each written from the surviving history: a session that resumes writes it again,
    and after a rollback a new run starts, whose name ends in `-r1`."""

    def __init__(self, context: SinkContext) -> None:
        self._context = context
        self._open, self._last_step = False, -1  # the newest step sent; -1 before the history
        if not context.last_step:  # an error refuses the run; a later session may rewind before its first step
            self._begin()

    def _begin(self) -> None:
        rollbacks = sum(1 for _ in self._context.directory.glob("abandoned/*"))
        self._start(f"-r{rollbacks}" if rollbacks else "")
        self._open = True

    def step(self, step: int, values: dict[str, float]) -> None:
        if not self._open:
            self._begin()
        if self._last_step < 0:
            for line in read_metrics(self._context.directory / "metrics.jsonl"):
                if line.step < step:
                    self._send(line.step, dict(line.values))
            self._replace_earlier()
        self._send(step, values)
        self._last_step = step

    def rewind(self, step: int) -> None:
        if step < self._last_step:
            self._finish(failed=False)
            self._open, self._last_step = False, -1

    def close(self, *, failed: bool) -> None:
        if self._open:
            self._finish(failed=failed)

    def _table(self, step: int, table: Callable[..., object]) -> dict[str, object]:
        """The first samples of a step: only text and numbers. Empty without samples."""
        lines = read_lines(self._context.directory / "samples" / samples_name(step))
        rows = [
            [str(line.get("prompt", ""))[:SHOWN], str(line.get("completion", ""))[:SHOWN], line.get("reward")]
            for _, line in islice(lines, TABLE_ROWS)
        ]
        return {TABLE: table(columns=list(COLUMNS), data=rows)} if rows else {}

    def _start(self, suffix: str) -> None: ...

    def _send(self, step: int, values: dict[str, float]) -> None: ...

    def _replace_earlier(self) -> None:
        """The history was sent: delete what earlier sessions wrote."""

    def _finish(self, *, failed: bool) -> None: ...


class WandbSink(HistorySink):
    """Weights & Biases. Offline, each session writes the run again, and deletes the files of earlier ones. Online, W&B
    accepts only increasing steps: those that it has are not sent again."""

    def _start(self, suffix: str) -> None:
        context, telemetry = self._context, self._context.telemetry
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=telemetry.project,
            group=telemetry.group or None,
            tags=list(telemetry.tags),
            name=context.run + suffix,
            id=context.run_id + suffix,
            resume="allow",
            config=context.config,
            dir=str(context.directory),
        )
        self._first_step = 0 if self._run.offline else self._run.step

    def _send(self, step: int, values: dict[str, float]) -> None:
        if step >= self._first_step:
            self._run.log({**values, **self._table(step, self._wandb.Table)}, step=step)

    def _replace_earlier(self) -> None:
        if self._run.offline:
            for folder in self._context.directory.glob(f"wandb/offline-run-*-{self._run.id}"):
                if folder.name != Path(self._run.sync_dir).name:
                    shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class TrackioSink(HistorySink):
    """trackio, a local dashboard. Each session writes the run again, and deletes what earlier ones wrote."""

    def _start(self, suffix: str) -> None:
        context, name = self._context, f"{self._context.run}-{self._context.run_id}{suffix}"
        # It prints to standard output, which is reserved for the command's JSON.
        with redirect_stdout(sys.stderr):
            self._trackio = importlib.import_module("trackio")
            project, group = context.telemetry.project, context.telemetry.group or None
            self._run = self._trackio.init(project=project, name=name, group=group, config=context.config)

    def _send(self, step: int, values: dict[str, float]) -> None:
        self._trackio.log({**values, **self._table(step, self._trackio.Table)}, step=step)

    def _replace_earlier(self) -> None:
        with suppress(ValueError):  # the project is not stored yet
            for run in list(self._trackio.Api().runs(self._context.telemetry.project)):
                if run.name == self._run.name and run.id != self._run.id:
                    run.delete()

    def _finish(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._trackio.finish()


SINKS: dict[str, Callable[[SinkContext], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Sequence[str]) -> None:
    """Raises UserError: a chosen sink is not installed; the hint has the command."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed", where="telemetry.sinks", hint=install_command(name))


class SinkSet:
    """The chosen sinks. At its first error a sink is dropped and `warn(sink, error)` is called."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._warn = warn
        self._open: dict[str, Sink] = {}

    def open(self, names: Sequence[str], context: SinkContext) -> None:
        """Open every sink.

        Raises:
            UserError: one cannot be opened for a new run. A resumed run continues without it.
        """
        for name in dict.fromkeys(names):
            try:
                self._open[name] = SINKS[name](context)
            except Exception as error:
                if context.last_step == 0:
                    hint = f"set it up, or remove {name} from telemetry.sinks"
                    what = f"{name} cannot be opened: {_short(error)}"
                    raise UserError(what, where="telemetry.sinks", hint=hint) from error
                self._warn(name, _short(error))

    def step(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._each(lambda sink: sink.step(step, finite))

    def rewind(self, step: int) -> None:
        self._each(lambda sink: sink.rewind(step))

    def close(self, *, failed: bool) -> None:
        self._each(lambda sink: sink.close(failed=failed))
        self._open.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - no error of a sink may end the run
                del self._open[name]
                self._warn(name, _short(error))


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
