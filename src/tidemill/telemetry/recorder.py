"""The recorder: every word of a run's story goes through it. The run directory first, then the view and the sinks."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TextIO, TypeAlias

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError, describe_error, root_error
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.events import (
    EVALUATION,
    NOT_PART_OF_A_STEP,
    PLAN,
    RESUME,
    REWARD_FAILED,
    SESSION_END,
    SESSION_START,
    SINK_FAILED,
    MonotonicClock,
    event_line,
    read_events,
)
from tidemill.telemetry.fleet_figures import evictions_sentence, recomputed
from tidemill.telemetry.fleet_view import FLEET_EVENTS, FleetLines
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.manifest import peak_rss_bytes
from tidemill.telemetry.metrics import CONTROLLER_CPU, PEAK_RSS, STEP_TIME, TOKENS_RECOMPUTED, metric_line, read_metrics
from tidemill.telemetry.progress_views import LiveView, PlainView, Progress, View
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import Decode, TokenTexts, chosen, sample_line, write_samples
from tidemill.telemetry.sinks import SinkContext, SinkSet, check_sinks
from tidemill.telemetry.summary import build_summary, evaluations, read_evaluation

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
FAULT = re.compile(r"(?:reward ([^:]+): |with their )(\w+)")
"""In the reason of an invalid reward: each reward that failed, and its exception's type or the first word about it."""
SHOWN_TEXT = 120
"""Characters of a prompt and of a response that the report of a fault shows."""
BEGINS_A_STEP = ("rollout", "training")


class Recorder:
    """Implements core.protocols.Telemetry for one session of a run. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        run: RunDirectory,
        spec: RunSpec,
        *,
        decode: Decode | None = None,
        stream: TextIO | None = None,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
        memory: Callable[[], int] = peak_rss_bytes,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """Open the logs and the sinks, write `session_start`, and show the view.

        Args:
            run: opened, that is, locked by this process.
            spec: the run's configuration.
            decode: token ids to text, so that the report can colour single tokens; `use_decoder` sets it later.
            stream: where the view goes; standard error by default. None of its faults reach the run.
            clock: for durations.
            unix_time: seconds since 1970, for time stamps.
            memory: the process's peak memory in bytes.
            processor: seconds that the calling thread has spent on a processor.

        Raises:
            UserError: a sink is not installed or cannot be opened, or the logs cannot be written.
        """
        self.run, self._spec = run, spec
        self._clock, self._unix_time, self._memory = clock or MonotonicClock(), unix_time, memory
        self._processor, self._processor_s = processor, processor()
        self._began_s = self._clock.now()
        self._session = run.past.count + 1
        self._texts = TokenTexts(decode) if decode else None
        self._step_began_s: float | None = None
        self._closed = False
        self._fleet_lines = FleetLines(self._clock)
        self._known_faults: set[tuple[str, str]] = set()
        check_sinks(spec.telemetry.sinks)
        self._sinks = SinkSet(self._sink_failed)
        self._events = JsonlWriter(run.events)
        self._metrics = JsonlWriter(run.metrics)
        self._progress = Progress(
            run=spec.run.name,
            total_steps=spec.trainer.steps,
            groups=spec.batch.prompts,
            earlier_wall_s=run.past.wall_s,
        )
        self._view: View | None = None
        self._start_session()
        self._view = self._make_view(stream or sys.stderr)
        try:
            self._sinks.open(spec.telemetry.sinks, self._sink_context())
        except UserError:
            self.close("failed")
            raise

    def use_decoder(self, decode: Decode) -> None:
        """Give the recorder what turns token ids into text, once the tokenizer is loaded."""
        self._texts = TokenTexts(decode)

    def expect(self, total_steps: int) -> None:
        """The run will take so many steps: where not the configuration but its data decide that."""
        self._progress.total_steps = total_steps
        self.event(PLAN, steps=total_steps)

    def _sink_context(self) -> SinkContext:
        return SinkContext(
            run=self._spec.run.name,
            directory=self.run.path,
            config=self._spec.model_dump(mode="json"),
            run_id=str(self.run.read_manifest().get("run_id", self._spec.run.name)),
            last_step=self._progress.step,
        )

    def _start_session(self) -> None:
        past = self.run.past
        self.event(
            SESSION_START,
            resumed=past.count > 0,
            earlier_wall_s=round(past.wall_s, 3),
            pid=os.getpid(),
            host=platform.node(),
        )
        self._take_history()

    def _take_history(self) -> None:
        lines = read_metrics(self.run.metrics)
        found = evaluations(read_events(self.run.events), lines)
        self._progress.restart(lines, found)

    def _make_view(self, stream: TextIO) -> View:
        if self._spec.telemetry.live and stream.isatty():
            return LiveView(self._progress, stream, self._clock)
        return PlainView(self._progress, stream, self._clock)

    @property
    def elapsed_s(self) -> float:
        """Since this session began."""
        return self._clock.now() - self._began_s

    def resume(self, step: int) -> None:
        """Training goes on after `step`: drop later metrics and samples, and say so in the event log.

        Nothing happens in a run's first session.
        """
        if self.run.past.count == 0:
            return
        dropped = recomputed(line for line in read_metrics(self.run.metrics) if line.step > step)
        self.run.rewind(step)
        self.event(RESUME, step=step, **({TOKENS_RECOMPUTED: dropped} if dropped else {}))
        self._sinks.rewind(step)
        self._step_began_s = None
        self._take_history()

    def event(self, name: str, **fields: Any) -> None:
        """One line in events.jsonl.

        Raises:
            UserError: the disk is full.
        """
        self._events.write(
            event_line(name, fields, unix_s=self._unix_time(), session=self._session, elapsed_s=self.elapsed_s)
        )
        if name in NOT_PART_OF_A_STEP and self._step_began_s is not None:
            self._step_began_s += float(fields.get("duration_s", 0.0))
        if name == EVALUATION:
            self._progress.add_evaluation(read_evaluation(int(fields.get("step", 0)), fields))
        if name in FLEET_EVENTS:
            self._tell(self._fleet_lines.event(name, fields))
        elif self._view:
            self._view.event(name, fields)

    def _tell(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.note(line)

    def step(self, metrics: StepMetrics) -> None:
        """One line in metrics.jsonl, with peak memory and the step's wall time added, then the view and the sinks.

        Raises:
            UserError: the disk is full.
        """
        now_s, elapsed_s = self._clock.now(), self.elapsed_s
        values = dict(metrics.values)
        values.setdefault(PEAK_RSS, float(self._memory()))
        before_s, self._processor_s = self._processor_s, self._processor()
        values.setdefault(CONTROLLER_CPU, round(self._processor_s - before_s, 6))
        if self._step_began_s is not None and metrics.step > 0:
            values.setdefault(STEP_TIME, round(now_s - self._step_began_s, 6))
        self._step_began_s = now_s
        self._metrics.write(
            metric_line(metrics, values, unix_s=self._unix_time(), session=self._session, elapsed_s=elapsed_s)
        )
        self._progress.add_step(metrics.step, values, elapsed_s)
        if self._view:
            self._view.step()
        self._tell(self._fleet_lines.due())
        self._sinks.step(metrics.step, values)

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """One file per step and purpose, whole or absent; a second call for the same ones replaces the first.

        Raises:
            UserError: the disk is full.
        """
        by_purpose: dict[str, list[tuple[Trajectory, Prompt]]] = {}
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            by_purpose.setdefault(trajectory.sample_id.purpose, []).append((trajectory, prompt))
        for purpose, pairs in by_purpose.items():
            kept = [pairs[index] for index in chosen(len(pairs), self._spec.telemetry.samples_per_step)]
            lines = [sample_line(step, trajectory, prompt, self._texts) for trajectory, prompt in kept]
            write_samples(self.run.samples / samples_name(step, purpose), lines)
        self._note_faults(step, trajectories, prompts)

    def _note_faults(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """Report each kind of reward fault once, with its first sample, on the terminal and in the event log."""
        failed = [
            (each, prompt)
            for each, prompt in zip(trajectories, prompts, strict=True)
            if each.reward is not None and not each.reward.valid
        ]
        for trajectory, prompt in failed:
            assert trajectory.reward is not None
            reason = trajectory.reward.reason
            kinds = set(FAULT.findall(reason)) or {("", reason.partition(" (sample ")[0])}
            if kinds <= self._known_faults:
                continue
            self._known_faults |= kinds
            sample = {"prompt": _shortened(prompt.text), "response": _shortened(trajectory.text)}
            self.event(REWARD_FAILED, step=step, reason=reason, **sample)
            self.note(
                f"warning: {len(failed)} of {len(trajectories)} samples of step {step} got no valid reward; {reason}; "
                f"prompt {sample['prompt']!r}, response {sample['response']!r}"
            )

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far the current phase is; nothing of it is written."""
        if self._step_began_s is None and phase in BEGINS_A_STEP:
            self._step_began_s = self._clock.now()
        self._progress.phases[phase] = (done, total)
        if self._view:
            self._view.phase()
        self._tell(self._fleet_lines.due())

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        """The workers there are, for the live view; nothing of it is written."""
        self._progress.set_fleet(rows)

    def note(self, text: str) -> None:
        """One line for the person watching; nothing of it is written."""
        if self._view:
            self._view.note(text)

    def finish(self, outcome: Outcome, *, error: str = "") -> dict[str, Any]:
        """End the session and write summary.json.

        Args:
            error: what a failure was, in words.

        Returns:
            The summary.

        Raises:
            UserError: the disk is full.
        """
        wall_s = self.run.past.wall_s + self.elapsed_s
        self.close(outcome)
        summary = build_summary(
            self.run,
            outcome=outcome,
            total_steps=self._progress.total_steps,
            wall_s=wall_s,
            peak_rss_bytes=self._memory(),
        )
        if error:
            summary["error"] = error
        self.run.write_summary(summary)
        if sentence := evictions_sentence(summary):
            self.note(sentence)
        return summary

    def close(self, outcome: Outcome = "interrupted") -> None:
        """Give the terminal back, close the sinks and the logs. The second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._tell(self._fleet_lines.due(closing=True))
        try:
            self._sinks.close(failed=outcome == "failed")
            self.event(SESSION_END, outcome=outcome, step=self._progress.step)
        except UserError as error:
            self.note(str(error))
        finally:
            if self._view:
                self._view.close()
            self._events.close()
            self._metrics.close()

    def _sink_failed(self, sink: str, error: str) -> None:
        self.event(SINK_FAILED, sink=sink, error=error)
        self.note(f"warning: {sink} failed and gets no more metrics ({error}); the run goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed or error is None:
            self.close()
            return
        try:
            interrupted = isinstance(root_error(error), KeyboardInterrupt)
            self.finish("interrupted" if interrupted else "failed", error="" if interrupted else describe_error(error))
        except Exception as second:  # noqa: BLE001 - a full disk, most likely; the error that ended the run is shown
            self.note(f"no summary written: {second}")
            self.close("failed")


def _shortened(text: str) -> str:
    half = SHOWN_TEXT // 2
    return text if len(text) <= SHOWN_TEXT else f"{text[:half]} … {text[-half:]}"
