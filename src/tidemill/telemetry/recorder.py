"""The recorder writes events, metrics and samples to the run directory, then to the view and the sinks."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self, TextIO, TypeAlias

import msgspec

from tidemill.config.pipeline import KINDS
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError, describe_error, error_line, root_error
from tidemill.core.formatting import duration
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.alerts import Webhook
from tidemill.telemetry.control import ControlFolder, RunControl
from tidemill.telemetry.events import (
    CONTROL,
    DECODE,
    EVALUATION,
    FLEET_EVENTS,
    NOT_PART_OF_A_STEP,
    PLAN,
    RESUME,
    REWARD_FAILED,
    ROLLOUT,
    SESSION_END,
    SESSION_START,
    SINK_FAILED,
    TRAINING,
    MonotonicClock,
    event_line,
    read_events,
)
from tidemill.telemetry.fleet_figures import evictions_sentence, recomputed
from tidemill.telemetry.guard_history import guard_sentences
from tidemill.telemetry.jsonl import JsonlWriter, encode, write_atomically
from tidemill.telemetry.live_state import LIVE, MIN_INTERVAL_S, Activity, LiveState, Phase, UnderWay
from tidemill.telemetry.manifest import peak_rss_bytes
from tidemill.telemetry.metrics import (
    BUDGETS,
    CONTROLLER_CPU,
    EPISODE_ENDS,
    PEAK_RSS,
    STEP_CPU,
    STEP_TIME,
    TOKENS_RECOMPUTED,
    TRAIN_CPU,
    TRUNCATED,
    metric_line,
    read_metrics,
)
from tidemill.telemetry.progress_views import FleetLines, SessionProgress, View, view_of
from tidemill.telemetry.run_data import RunData, evaluations, read_evaluation
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.run_state import process_start
from tidemill.telemetry.sample_files import Decode, TokenTexts, chosen, sample_line, write_samples
from tidemill.telemetry.sinks import SinkContext, SinkSet, check_sinks

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
FAILURE = re.compile(r"(?:reward ([^:]+): |with their )(\w+)")
"""In the reason of an invalid reward: the reward that failed, and its exception's type or first word."""
MANY_CUTS = 0.2
"""Share of samples that a limit ended, above which a warning is given."""
CUTS = ("tokens", "context")
"""Limits that cut a text."""
SHOWN_TEXT = 120
"""Characters of a prompt and of a response in the report of a failed reward."""
FIRST_PHASES = (ROLLOUT, TRAINING)
"""Phases that start a step."""


class Recorder:
    """Implements core.protocols.Telemetry for one session of a run. Use it as a context manager, or call `close`.

    Methods that write raise UserError if the disk is full.
    """

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
        process: Callable[[], float] = time.process_time,
    ) -> None:
        """Open the logs and the sinks, write `session_start`, and show the view.

        Args:
            run: opened, so that this process holds its lock.
            spec: the run's configuration.
            decode: token ids to text, for the report's coloured tokens; `use_decoder` sets it later.
            stream: for the view; standard error by default. Its errors are ignored.
            clock: for durations.
            unix_time: seconds since 1970, for time stamps.
            memory: the process's peak memory in bytes.
            processor: CPU seconds of the calling thread.
            process: CPU seconds of all threads.

        Raises:
            UserError: a sink is not installed or cannot be opened, or the logs cannot be written.
        """
        self.run, self._spec = run, spec
        self._clock, self._unix_time, self._memory = clock or MonotonicClock(), unix_time, memory
        self._processor, self._processor_s = processor, processor()
        self._process, self._process_s = process, process()
        self._workers_s = 0.0  # CPU seconds of workers since the previous line
        self._warned_of: set[str] = set()  # limits of samples
        self._started_s = self._clock.now()
        self._session = run.past.count + 1
        self._texts = TokenTexts(decode) if decode else None
        self._step_started_s: float | None = None
        self._closed = False
        self._fleet_lines = FleetLines(self._clock)
        self._known_failures: set[tuple[str, str]] = set()
        check_sinks(spec.telemetry.sinks)
        self._run_id = run_id = str(run.read_manifest().get("run_id", spec.run.name))
        self._webhooks = [Webhook(config, run=spec.run.name, run_id=run_id) for config in spec.telemetry.alerts]
        self._sinks = SinkSet(self.sink_failed)
        self._events = JsonlWriter(run.events)
        self._metrics = JsonlWriter(run.metrics)
        self._progress = SessionProgress(
            spec.run.name, spec.trainer.steps, groups=spec.batch.prompts, earlier_wall_s=run.past.wall_s
        )
        self._view: View | None = None
        self.event(
            SESSION_START,
            resumed=run.past.count > 0,
            earlier_wall_s=round(run.past.wall_s, 3),
            pid=os.getpid(),
            host=platform.node(),
            inode=run.events.stat().st_ino,
            **({"pid_start": start} if (start := process_start(os.getpid())) else {}),
        )
        self._load_history()
        self._beat, self._beat_s = 0, float("-inf")
        self.control = RunControl(
            ControlFolder(run.path),
            run_id=run_id,
            session=self._session,
            log=lambda **fields: self.event(CONTROL, step=self._progress.step, **fields),
        )
        self.under_way: Callable[[], UnderWay] | None = None  # of an RL run, once it has a fleet
        self.beat(now=True)
        stream = stream or sys.stderr
        self._view = view_of(stream, live=spec.telemetry.live)(self._progress, stream, self._clock)
        try:
            kind = run.read_manifest().get("kind", "rl")
            context = SinkContext(
                run=spec.run.name,
                directory=run.path,
                config=spec.model_dump(mode="json", include=set(KINDS[kind].sections)),
                run_id=run_id,
                last_step=self._progress.step,
                telemetry=spec.telemetry,
            )
            self._sinks.open(spec.telemetry.sinks, context)
        except UserError as error:
            self.close("failed", error=error)
            raise

    def use_decoder(self, decode: Decode) -> None:
        """Set the function from token ids to text, once the tokenizer is loaded."""
        self._texts = TokenTexts(decode)

    def expect(self, total_steps: int) -> None:
        """Set the number of steps, if it follows from the data instead of the configuration."""
        self._progress.total_steps = total_steps
        self.event(PLAN, steps=total_steps)

    def _load_history(self) -> None:
        lines = read_metrics(self.run.metrics)
        self._progress.restart(lines, evaluations(read_events(self.run.events), lines))

    @property
    def elapsed_s(self) -> float:
        """Since this session started."""
        return self._clock.now() - self._started_s

    def resume(self, step: int) -> None:
        """Delete metrics and samples of steps after `step` and log a `resume` event. No effect in a first session."""
        if self.run.past.count == 0:
            return
        dropped = recomputed(line for line in read_metrics(self.run.metrics) if line.step > step)
        self.rewind(step)
        self.event(RESUME, step=step, **({TOKENS_RECOMPUTED: dropped} if dropped else {}))

    def rewind(self, step: int) -> None:
        """Delete metrics and samples of steps after `step`."""
        self.run.rewind(step)
        self._sinks.rewind(step)
        self._step_started_s = None
        self._load_history()

    def event(self, name: str, **fields: Any) -> None:
        """Write one line to events.jsonl."""
        unix_s = self._unix_time()
        self._events.write(event_line(name, fields, unix_s=unix_s, session=self._session, elapsed_s=self.elapsed_s))
        for webhook in self._webhooks:
            webhook.event(name, fields, unix_s)
        if name in NOT_PART_OF_A_STEP and self._step_started_s is not None:
            self._step_started_s += float(fields.get("duration_s", 0.0))
        if name == DECODE:
            self._workers_s += sum(float(part["cpu_s"]) for part in fields.get("work", ()))
        if name == EVALUATION and "set" not in fields:
            self._progress.add_evaluation(read_evaluation(int(fields.get("step", 0)), fields))
        if name in FLEET_EVENTS:
            self._note_all(self._fleet_lines.event(name, fields))
        elif self._view:
            self._view.event(name, fields)

    def _note_all(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.note(line)

    def step(self, metrics: StepMetrics) -> None:
        """Write one line to metrics.jsonl, with peak memory and wall time added, then update the view and the sinks."""
        now_s, elapsed_s = self._clock.now(), self.elapsed_s
        values = dict(metrics.values)
        values.setdefault(PEAK_RSS, float(self._memory()))
        before_s, self._processor_s = self._processor_s, self._processor()
        values.setdefault(CONTROLLER_CPU, round(self._processor_s - before_s, 6))
        process_before_s, self._process_s = self._process_s, self._process()
        step_cpu_s = self._process_s - process_before_s
        if self._spec.runtime != "inprocess":
            step_cpu_s = values[CONTROLLER_CPU] + values.get(TRAIN_CPU, 0.0) + self._workers_s
        self._workers_s = 0.0
        values.setdefault(STEP_CPU, round(step_cpu_s, 6))
        if self._step_started_s is not None and metrics.step > 0:
            values.setdefault(STEP_TIME, round(now_s - self._step_started_s, 6))
        self._step_started_s = now_s
        self._metrics.write(
            metric_line(metrics, values, unix_s=self._unix_time(), session=self._session, elapsed_s=elapsed_s)
        )
        self._progress.add_step(metrics.step, values, elapsed_s)
        if self._view:
            self._view.step()
        self._note_all(self._fleet_lines.due())
        self._warn_of_cuts(metrics.step, values)
        self._report_alerts()
        self._sinks.step(metrics.step, values)
        self.beat()

    def _warn_of_cuts(self, step: int, values: Mapping[str, float]) -> None:
        """Once for each limit: in the first step in which it ended many samples that are trained on."""
        ended = {end: values[name] for end, name in EPISODE_ENDS.items() if end in BUDGETS and name in values}
        of = "episodes" if ended else "completions"
        for end, share in (ended or {"tokens": values.get(TRUNCATED, 0.0)}).items():
            cut = end in CUTS
            if share <= MANY_CUTS or end in self._warned_of or (cut and self._spec.scoring.truncated == "masked"):
                continue
            self._warned_of.add(end)
            section, _, key = BUDGETS[end].partition(".")
            limit = getattr(getattr(self._spec, section), key)
            at = f"{BUDGETS[end]} = {limit}" if limit else f"the model's context ({BUDGETS[end]})"
            what = f"warning: {share:.0%} of the {of} of step {step}"
            if cut:
                hint = 'raise it, or set scoring.truncated = "masked"'
                self.note(f"{what} were cut at {at}, and are trained on without their end; {hint}")
            else:
                self.note(f"{what} ended at {at}, with the rewards of their turns so far; raise it if they need more")

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """Write one file per step and purpose, atomically; a second call for the same step replaces it. Samples with
        details of their tokens are always among the logged ones."""
        by_purpose: dict[str, list[tuple[Trajectory, Prompt]]] = {}
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            by_purpose.setdefault(trajectory.sample_id.purpose, []).append((trajectory, prompt))
        for purpose, pairs in by_purpose.items():
            kept = chosen(len(pairs), self._spec.telemetry.samples_per_step)
            detailed = [at for at, (each, _) in enumerate(pairs) if each.update and each.update.entropies]
            logged = sorted(list(dict.fromkeys([*detailed, *kept]))[: len(kept)])
            lines = [sample_line(step, *pairs[at], self._texts) for at in logged]
            write_samples(self.run.samples / samples_name(step, purpose), lines)
        self._note_failures(step, trajectories, prompts)

    def _note_failures(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        """Report each kind of reward failure once, with its first sample, on the terminal and in the event log."""
        failed = [
            (each.reward.reason, each.text, prompt)
            for each, prompt in zip(trajectories, prompts, strict=True)
            if each.reward is not None and not each.reward.valid and not each.fault
        ]
        for reason, text, prompt in failed:
            kinds = set(FAILURE.findall(reason)) or {("", reason.partition(" (sample ")[0])}
            if kinds <= self._known_failures:
                continue
            self._known_failures |= kinds
            sample = {"prompt": _shortened(prompt.text), "response": _shortened(text)}
            self.event(REWARD_FAILED, step=step, reason=reason, **sample)
            self.note(
                f"warning: {len(failed)} of {len(trajectories)} samples of step {step} got no valid reward; {reason}; "
                f"prompt {sample['prompt']!r}, response {sample['response']!r}"
            )

    def progress(self, phase: str, done: int, total: int) -> None:
        """Progress of a phase, for the view only."""
        if self._step_started_s is None and phase in FIRST_PHASES:
            self._step_started_s = self._clock.now()
        self._progress.phases[phase] = (done, total)
        if self._view:
            self._view.phase()
        self._note_all(self._fleet_lines.due())
        self.beat()

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        """The current workers, for the live view only."""
        self._progress.set_fleet(rows)

    def beat(self, *, now: bool = False) -> None:
        """If a second has passed, or in any case with `now`: take requests, and write live.json. Call it from the
        thread of the loop."""
        if now or (self._clock.now() - self._beat_s >= MIN_INTERVAL_S and not self._closed):
            self._beat, self._beat_s = self._beat + 1, self._clock.now()
            self.control.poll()
            with suppress(UserError):  # the run does not depend on the file
                write_atomically(self.run.path / LIVE, encode(self._live_state()), durable=False)

    def _live_state(self) -> LiveState:
        progress, elapsed_s, pause = self._progress, self.elapsed_s, self.control.paused
        activity: Activity = "ended" if self._closed else "paused" if pause else "working"
        under_way = self.under_way() if self.under_way is not None else UnderWay(fleet=progress.fleet)
        left_s = progress.left_s() if activity == "working" else None
        phases = progress.current_phases() if activity == "working" else []
        return LiveState(
            run_id=self._run_id,
            session=self._session,
            beat=self._beat,
            unix_s=self._unix_time(),
            elapsed_s=elapsed_s,
            step=progress.step,
            total_steps=progress.total_steps,
            activity=activity,
            activity_text=f"Rented machines are kept for {duration(pause.hold_s)}." if pause else "",
            left_s=None if left_s is None else max(0.0, left_s - (elapsed_s - progress.elapsed_s)),
            phases=tuple(Phase(name=name, done=done, total=total) for name, done, total in phases),
            **msgspec.structs.asdict(under_way),
            requests=tuple(request.request_id for request in self.control.waiting.values()),
        )

    def note(self, text: str) -> None:
        """One line for the view only."""
        if self._view:
            self._view.note(text)

    def finish(self, outcome: Outcome, *, error: BaseException | None = None) -> dict[str, Any]:
        """End the session, write summary.json, and return the summary.

        Args:
            error: that ended the run.
        """
        wall_s = self.run.past.wall_s + self.elapsed_s
        self.close(outcome, error=error)
        data = RunData.load(self.run)
        summary = data.summarize(
            outcome=outcome,
            total_steps=self._progress.total_steps,
            wall_s=wall_s,
            peak_rss_bytes=self._memory(),
        )
        if error is not None:
            summary["error"] = describe_error(error)
        self.run.write_summary(summary)
        evictions = evictions_sentence(summary, is_robot=data.is_robot)
        self._note_all([*filter(None, [evictions]), *guard_sentences(summary)])
        return summary

    def close(self, outcome: Outcome = "interrupted", *, error: BaseException | None = None) -> None:
        """Restore the terminal, close the sinks and the logs. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._note_all(self._fleet_lines.due(closing=True))
        self.under_way = None
        try:
            self.control.close()
            self.beat(now=True)
            self._sinks.close(failed=outcome == "failed")
            reason = {} if error is None else {"error": error_line(error)}
            self.event(SESSION_END, outcome=outcome, step=self._progress.step, **reason)
            for webhook in self._webhooks:
                webhook.close()
            self._report_alerts()
        except UserError as error:
            self.note(str(error))
        finally:
            if self._view:
                self._view.close()
            self._events.close()
            self._metrics.close()

    def _report_alerts(self) -> None:
        """Report the first failure of each webhook."""
        for webhook in self._webhooks:
            if webhook.failure and webhook.host not in self._warned_of:
                self._warned_of.add(webhook.host)
                self.note(f"warning: an alert to {webhook.host} failed ({webhook.failure}); the run continues")

    def sink_failed(self, sink: str, error: str) -> None:
        """Report something beside the run that failed."""
        self.event(SINK_FAILED, sink=sink, error=error.replace("\n  ", "; "))

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
            self.finish("interrupted" if interrupted else "failed", error=None if interrupted else error)
        except Exception as second:  # noqa: BLE001 - a full disk, most likely; the first error is the one to raise
            self.note(f"no summary written: {second}")
            self.close("failed", error=error)


class NullTelemetry:
    """Implements core.protocols.Telemetry without writing anything.

    Args:
        show: called with the progress of a phase, in steps of 10 %.
    """

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        self._show = show
        self._last = ""

    def resume(self, step: int) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        text = f"{phase}: {10 * (10 * done // max(total, 1))} % of {total}"
        if text != self._last:
            self._last = text
            self._show(text)

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass


def _shortened(text: str) -> str:
    half = SHOWN_TEXT // 2
    return text if len(text) <= SHOWN_TEXT else f"{text[:half]} … {text[-half:]}"
