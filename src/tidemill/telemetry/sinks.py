"""Optional sinks for metrics: TensorBoard, Weights & Biases, trackio. A sink that fails is dropped."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from tidemill.core.errors import UserError
from tidemill.core.packages import install_command
from tidemill.core.records import Record


class SinkContext(Record):
    """Facts about the run that a sink gets when it opens."""

    run: str
    directory: Path
    config: dict[str, Any]
    run_id: str  # the same over all sessions of a run
    last_step: int  # the newest step an earlier session sent; 0 for a new run


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


class WandbSink(Sink):
    """Weights & Biases. A resumed run keeps its id; W&B accepts only increasing steps, so none is sent twice."""

    def __init__(self, context: SinkContext) -> None:
        self._last_step = context.last_step
        self._run = importlib.import_module("wandb").init(
            project="tidemill",
            name=context.run,
            id=context.run_id,
            resume="allow",
            config=context.config,
            dir=str(context.directory),
        )

    def step(self, step: int, values: dict[str, float]) -> None:
        if step > self._last_step:
            self._run.log(values, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class TrackioSink(Sink):
    """trackio, a local dashboard. It keeps duplicates of a step, so none is sent twice."""

    def __init__(self, context: SinkContext) -> None:
        self._last_step = context.last_step
        name = f"{context.run}-{context.run_id}"
        # It prints to standard output, which is reserved for the command's JSON.
        with redirect_stdout(sys.stderr):
            self._trackio = importlib.import_module("trackio")
            self._trackio.init(project="tidemill", name=name, resume="allow", config=context.config)

    def step(self, step: int, values: dict[str, float]) -> None:
        if step > self._last_step:
            self._trackio.log(values, step=step)

    def close(self, *, failed: bool) -> None:
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
