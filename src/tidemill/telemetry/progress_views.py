"""Views of a run's progress: a live panel for terminals, plain lines for logs."""

from __future__ import annotations

import atexit
import io
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from statistics import median
from typing import Any, TextIO, TypeAlias

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.core.formatting import compact, counted, decimal, duration, natural_sort_key, percent
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow
from tidemill.telemetry import metrics
from tidemill.telemetry.events import (
    CRASH,
    EVALUATION,
    EVICTION,
    LEASE,
    NOUNS,
    QUARANTINE,
    WORKER_HEALTH,
    event_text,
    moved_text,
)
from tidemill.telemetry.metrics import HELD_OUT, METRICS, MetricLine
from tidemill.telemetry.run_data import LoggedEvaluation, read_evaluation

HISTORY = 400
RECENT = 8
HEARTBEAT_S = 30.0


@dataclass
class SessionProgress:
    """State of the session, updated by the recorder and read by the views. Times are seconds since its start."""

    run: str
    total_steps: int
    groups: int = 0  # per batch
    earlier_wall_s: float = 0.0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)  # of the newest step
    history: dict[str, deque[float]] = field(default_factory=dict)
    evaluations: dict[int, LoggedEvaluation] = field(default_factory=dict)  # by step
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) since the newest step, in order
    fleet: tuple[FleetRow, ...] = ()  # as last reported
    preemptible: bool = False  # whether this session has had a preemptible worker
    elapsed_s: float = 0.0  # at the end of the newest step
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add_step(self, step: int, values: dict[str, float], elapsed_s: float) -> None:
        if step > 0:
            # Wall time from step to step, so that evaluations and checkpoints count towards the time left.
            self.step_times.append(
                elapsed_s - self.elapsed_s if self.step_times else values.get(metrics.STEP_TIME, 0.0)
            )
        self.elapsed_s, self.phases = elapsed_s, {}
        self._add_values(step, values)

    def _add_values(self, step: int, values: dict[str, float]) -> None:
        self.step, self.values = step, values
        for name, value in values.items():
            self.history.setdefault(name, deque(maxlen=HISTORY)).append(value)
        self.add_evaluation(read_evaluation(step, values, prefix=HELD_OUT))

    def add_evaluation(self, evaluation: LoggedEvaluation | None) -> None:
        if evaluation is not None:
            self.evaluations[evaluation.step] = evaluation

    def set_fleet(self, rows: Iterable[FleetRow]) -> None:
        self.fleet = tuple(rows)
        self.preemptible |= any(row.kind == "preemptible" for row in self.fleet)

    def restart(self, lines: Iterable[MetricLine], evaluations: Iterable[LoggedEvaluation]) -> None:
        """Load the surviving history of earlier sessions."""
        self.step, self.values, self.history = 0, {}, {}
        self.evaluations = {one.step: one for one in evaluations}
        for line in lines:
            self._add_values(line.step, dict(line.values))

    def current_phases(self) -> list[tuple[str, int, int]]:
        """(name, done, total) of unfinished phases: training may start before the rollout ends."""
        return [(name, done, total) for name, (done, total) in self.phases.copy().items() if done < total]

    def left_s(self) -> float | None:
        """Seconds until the last step, from the median of recent steps; None before the first."""
        if not self.step_times:
            return None
        return max(0, self.total_steps - self.step) * median(self.step_times)

    @property
    def kl(self) -> str:
        """The KL metric of the run: to the reference if it has one, else of the update."""
        return metrics.KL_REF if metrics.KL_REF in self.values else metrics.APPROX_KL

    def figure(self, name: str) -> str:
        """A metric of the newest step, some with a second number: `0.391 ±0.488`, `4.09 max 14 (6.2 % cut)`."""
        values = self.values
        metric = METRICS[name if name in METRICS else name.removeprefix(HELD_OUT)]
        text = metric.write(values[name]) if name in values else "-"
        if name == metrics.REWARD_MEAN and metrics.REWARD_STD in values:
            return f"{text} ±{decimal(values[metrics.REWARD_STD])}"
        if name == metrics.LENGTH_MEAN:
            cut = f" ({percent(values[metrics.TRUNCATED])} cut)" if values.get(metrics.TRUNCATED) else ""
            return f"{compact(values.get(name, 0))} max {compact(values.get(metrics.LENGTH_MAX, 0))}{cut}"
        if name == metrics.NO_SIGNAL:
            return f"{compact(values.get(name, 0))}/{self.groups}" if self.groups else compact(values.get(name, 0))
        return text


STEP_COLUMNS = (
    metrics.RETURN_MEAN, metrics.SUCCESS, metrics.FALLS, metrics.REWARD_MEAN, metrics.HELD_OUT_REWARD,
    metrics.GREEDY_ACCURACY, metrics.ENTROPY, metrics.KL_REF, metrics.CLIP_FRACTION, metrics.LENGTH_MEAN,
    metrics.TURNS_MEAN, metrics.NO_SIGNAL, metrics.SAMPLES_INVALID, metrics.ENV_FAULTS, metrics.UPDATES_SKIPPED,
    metrics.TOKENS_PER_S, metrics.STEPS_PER_CPU_S, metrics.INVALID_WORLDS,
)  # fmt: skip
SUPERVISED_COLUMNS = tuple(
    prefix + name
    for prefix in ("", HELD_OUT)
    for name in (metrics.LOSS, metrics.TOKEN_ACCURACY, metrics.PAIRWISE_ACCURACY)
)
ONLY_IF_ANY = (metrics.INVALID_WORLDS, metrics.SAMPLES_INVALID, metrics.ENV_FAULTS, metrics.UPDATES_SKIPPED)


def label_of(name: str) -> str:
    """A metric's label, `held-out accuracy` for the held-out variant of one."""
    return METRICS[name].label if name in METRICS else f"held-out {METRICS[name.removeprefix(HELD_OUT)].label}"


def step_text(progress: SessionProgress) -> str:
    """One line for the newest step; metrics that were not measured are omitted."""
    values = progress.values
    names = [
        *(() if metrics.REWARD_MEAN in values else SUPERVISED_COLUMNS),
        *(progress.kl if name == metrics.KL_REF else name for name in STEP_COLUMNS),
    ]
    parts = [f"step {progress.step:>{len(str(progress.total_steps))}}/{progress.total_steps}"]
    parts += [
        f"{label_of(name)} {progress.figure(name)}"
        for name in names
        if name in values and (values[name] or name not in ONLY_IF_ANY)
    ]
    if left := progress.left_s():
        parts.append(f"left {duration(left)}")
    return "  ".join(parts)


def write_line(stream: TextIO, text: str) -> None:
    """Write a line, unless the reader is gone: the logs are complete."""
    with suppress(OSError, ValueError):
        stream.write(text + "\n")
        stream.flush()


class PlainView:
    """Complete lines on a stream."""

    def __init__(self, progress: SessionProgress, stream: TextIO, clock: Clock) -> None:
        self._progress, self._stream, self._clock = progress, stream, clock
        self._last_line_s = clock.now()

    def step(self) -> None:
        self.note(step_text(self._progress))

    def event(self, name: str, fields: dict[str, Any]) -> None:
        if text := event_text(name, fields):
            self.note(text)

    def phase(self) -> None:
        if self._clock.now() - self._last_line_s >= HEARTBEAT_S:
            now = self._progress
            phases = ", ".join(f"{name} {done}/{total}" for name, done, total in now.current_phases())
            if now.total_steps:
                self.note(f"step {now.step + 1}/{now.total_steps}: {phases or 'working'}")

    def note(self, text: str) -> None:
        self._last_line_s = self._clock.now()
        write_line(self._stream, text)

    def close(self) -> None:
        pass


BARS = "▁▂▃▄▅▆▇█"
PANEL_WIDTH = 100
TWO_COLUMNS_WIDTH = 84
LABEL_WIDTH, FIGURES_WIDTH = 10, 24
REFRESH_PER_S = 4
ACCENT, QUIET, GOOD, WARN = "cyan", "bright_black", "green", "yellow"
Row = tuple[str, str, str, str]
"""(label, figures, sparkline, style of the sparkline)"""


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as bars between their minimum and maximum."""
    shown = [value for value in tuple(values) if math.isfinite(value)][-width:]
    if not shown or width <= 0:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


class ProgressPanel:
    """Renders the state of a session as a panel."""

    def __init__(self, progress: SessionProgress, console: Console, clock: Clock) -> None:
        self._progress, self._console, self._clock = progress, console, clock
        self._started_s = clock.now()
        self._closed = False

    def render(self) -> RenderableType:
        """The panel, as wide as the terminal up to PANEL_WIDTH."""
        progress = self._progress
        width = min(self._console.width, PANEL_WIDTH)
        wide = width >= TWO_COLUMNS_WIDTH
        spark = (width - 4) // (2 if wide else 1) - LABEL_WIDTH - FIGURES_WIDTH - 2
        table = Table.grid(padding=(0, 1), expand=True)
        cells = [_cell(*row) for row in self._rows(spark)]
        for _ in range(2 if wide else 1):
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for row in zip(cells[::2], cells[1::2], strict=True) if wide else ((cell,) for cell in cells):
            table.add_row(*row)
        parts: list[RenderableType] = [table] if progress.values or progress.evaluations else []
        if not self._closed:
            parts.append(self._phase(width))
            if progress.preemptible:
                parts.append(fleet_table(progress.fleet, width - 4))
        running_s = self._clock.now() - self._started_s
        clocks = [f"step {progress.step}/{progress.total_steps}", duration(progress.earlier_wall_s + running_s)]
        if left := progress.left_s():
            clocks.append(f"{duration(max(0.0, left - (running_s - progress.elapsed_s)))} left")
        title = Text.assemble(("tidemill ", f"bold {ACCENT}"), (progress.run, "bold"))
        return Panel(
            Group(*parts),
            box=ROUNDED,
            title=title,
            title_align="left",
            subtitle=Text(" · ".join(clocks), style=ACCENT),
            subtitle_align="right",
            border_style=QUIET,
            width=width,
            padding=(0, 1),
        )

    def event(self, name: str, fields: dict[str, Any]) -> None:
        # The panel shows all figures of an evaluation of one set without drawn samples.
        in_panel = name == EVALUATION and not fields.keys() & {"error", "set", "drawn_reward_mean"}
        if not in_panel and (text := event_text(name, fields)):
            self.note(text)

    def note(self, text: str) -> None:
        """Show a line outside the panel."""
        raise NotImplementedError

    def _rows(self, spark: int) -> list[Row]:
        """Rows, left and right column alternating."""
        progress, values = self._progress, self._progress.values

        def row(name: str, style: str, *, more: str = "") -> Row:
            label = "held-out" if name.startswith(HELD_OUT) else METRICS[name].label
            return label, progress.figure(name) + more, sparkline(progress.history.get(name, ()), spark), style

        if metrics.EXAMPLES in values or metrics.HELD_OUT_LOSS in values:
            accuracy = metrics.TOKEN_ACCURACY if metrics.TOKEN_ACCURACY in values else metrics.PAIRWISE_ACCURACY
            names = (metrics.LOSS, metrics.HELD_OUT_LOSS, accuracy, HELD_OUT + accuracy)
            rows = [row(name, GOOD if name.endswith(metrics.LOSS) else ACCENT) for name in names]
            return [*rows, row(metrics.GRAD_NORM, ACCENT), row(metrics.LEARNING_RATE, ACCENT)]
        if metrics.STEPS_PER_CPU_S in values:
            shown = (metrics.FALLS, metrics.APPROX_KL, metrics.LEARNING_RATE, metrics.STEPS_PER_CPU_S)
            return [row(metrics.RETURN_MEAN, GOOD), row(metrics.SUCCESS, GOOD), *(row(name, ACCENT) for name in shown)]
        invalid = values.get(metrics.SAMPLES_INVALID, 0)
        return [
            row(metrics.REWARD_MEAN, GOOD),
            self._held_out(spark),
            row(metrics.ENTROPY, ACCENT),
            row(metrics.LENGTH_MEAN, ACCENT),
            row(progress.kl, ACCENT),
            row(metrics.CLIP_FRACTION, ACCENT),
            row(metrics.NO_SIGNAL, WARN, more=" groups" + (f" · {compact(invalid)} invalid" if invalid else "")),
            row(metrics.TOKENS_PER_S, ACCENT),
        ]

    def _held_out(self, spark: int) -> Row:
        found = sorted(self._progress.evaluations.copy().values())  # by step, the first field
        if not found:
            return "held-out", "-", "", GOOD
        last = found[-1]
        change = f"{decimal(found[0].reward_mean)} → " if len(found) > 1 else ""
        right = "" if last.greedy_accuracy is None else f" · {percent(last.greedy_accuracy)} right"
        figures = f"{change}{decimal(last.reward_mean)}{right}  (n {last.n})"
        return "held-out", figures, sparkline([one.reward_mean for one in found], spark), GOOD

    def _phase(self, width: int) -> RenderableType:
        phases = self._progress.current_phases()
        name, done, total = phases[0] if phases else ("working", 0, 1)
        others = "".join(f" · {other} {part}/{whole}" for other, part, whole in phases[1:])
        count = f"{done}/{total}{others}" if phases else ""
        bar = ProgressBar(
            total=total,
            completed=done,
            width=max(10, width - 6 - LABEL_WIDTH - len(count)),
            complete_style=ACCENT,
            finished_style=ACCENT,
            style=QUIET,
        )
        row = Table.grid(padding=(0, 1))
        shown_count = Text(count, style=QUIET, no_wrap=True, overflow="ellipsis")
        row.add_row(Text(f"{name:<{LABEL_WIDTH}}", style="bold"), bar, shown_count)
        return row


class LiveView(ProgressPanel):
    """A panel that redraws itself a few times a second. `close` restores the terminal."""

    def __init__(self, progress: SessionProgress, stream: TextIO, clock: Clock) -> None:
        super().__init__(progress, Console(file=stream), clock)
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            # Prints go above the panel, unless they are redirected to a pipe or file.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        # For processes ended by an uncaught exception.
        atexit.register(self.close)

    def step(self) -> None:
        self._live.refresh()

    def phase(self) -> None:
        pass

    def note(self, text: str) -> None:
        self._console.print(Text(text, style=QUIET))

    def close(self) -> None:
        self._closed = True
        self._live.stop()
        atexit.unregister(self.close)


def _cell(label: str, figures: str, bars: str, style: str) -> Text:
    figures = f"{figures:<{FIGURES_WIDTH - 1}} "
    return Text.assemble(
        (f"{label:<{LABEL_WIDTH}}", QUIET),
        (figures, "bold"),
        (bars[len(figures) - FIGURES_WIDTH :], style),
        no_wrap=True,
    )


class NotebookView(ProgressPanel):
    """A panel in the output of a notebook cell, redrawn at most once a second; lines go below it."""

    def __init__(self, progress: SessionProgress, stream: TextIO, clock: Clock) -> None:
        # rich would display each redrawing as a further output of the cell.
        console = Console(
            file=io.StringIO(), width=PANEL_WIDTH, record=True, color_system="truecolor", force_jupyter=False
        )
        super().__init__(progress, console, clock)
        display = import_module("IPython.display")
        self._html, self._stream = display.HTML, stream
        self._handle = display.display(display.HTML(""), display_id=True)
        self._drawn_s = -math.inf

    def step(self) -> None:
        self._drawn_s = self._clock.now()
        self._console.print(self.render())
        self._handle.update(self._html(self._console.export_html(inline_styles=True, code_format=NOTEBOOK_PANEL)))

    def phase(self) -> None:
        if self._clock.now() - self._drawn_s >= 1.0:
            self.step()

    def note(self, text: str) -> None:
        write_line(self._stream, text)

    def close(self) -> None:
        self._closed = True
        self.step()


NOTEBOOK_PANEL = '<pre style="font-family:monospace;line-height:1.2">{code}</pre>'
View: TypeAlias = PlainView | LiveView | NotebookView


def view_of(stream: TextIO, *, live: bool) -> type[PlainView | LiveView | NotebookView]:
    """The view for an output stream: a panel on a terminal and in a notebook, otherwise lines."""
    if not live:
        return PlainView
    if stream.isatty():
        return LiveView
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return NotebookView if stream is sys.stderr and hasattr(shell, "kernel") else PlainView


FLEET_ROWS = 12
STATE_STYLES = {"starting": QUIET, "loading": "cyan", "serving": "green", "leaving": "yellow"}
COLUMNS: dict[str, Callable[[FleetRow], str]] = {
    "worker": lambda row: row.worker_id,
    "kind": lambda row: row.kind,
    "state": lambda row: row.state,
    "version": lambda row: "-" if row.version is None else str(row.version),
    "running": lambda row: str(row.running),
    "queued": lambda row: str(row.queued),
    "tok/s": lambda row: compact(row.tokens_per_s),
    "$/h": lambda row: f"{row.price_usd_per_hour:.2f}" if row.price_usd_per_hour else "-",
    "age": lambda row: duration(row.age_s),
}
TEXT_COLUMNS = ("worker", "kind", "state")
NEEDED_WIDTH = {"version": 48, "queued": 48, "kind": 72, "$/h": 72, "age": 72}  # narrower tables omit the column


def fleet_table(rows: Sequence[FleetRow], width: int) -> RenderableType:
    """The reserved side and the busiest workers, sorted by name to keep rows in place, and a line for the rest."""
    columns = [name for name in COLUMNS if width >= NEEDED_WIDTH.get(name, 0)]
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style=QUIET)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=True, overflow="ellipsis")

    def load(row: FleetRow) -> tuple[bool, int, float]:
        return row.kind == "reserved", row.running + row.queued, row.tokens_per_s

    shown = sorted(rows, key=load, reverse=True)[:FLEET_ROWS]
    for row in sorted(shown, key=lambda row: (row.kind != "reserved", natural_sort_key(row.worker_id))):
        table.add_row(
            *(Text(COLUMNS[name](row), style=STATE_STYLES[row.state] if name == "state" else "") for name in columns)
        )
    if len(rows) == len(shown):
        return table
    others = sum(row.tokens_per_s for row in rows) - sum(row.tokens_per_s for row in shown)
    more = f"... and {len(rows) - len(shown)} more, {compact(max(0.0, others))} tok/s together"
    return Group(table, Text(more, style=QUIET))


LINES, WINDOW_S = 8, 10.0


class FleetLines:
    """Lines for fleet events, at most `LINES` in `WINDOW_S`; further events are summarised in one line afterwards."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reserved: set[str] = set()  # leases
        self._window_start_s = -math.inf
        self._shown = 0
        self._suppressed: Counter[str] = Counter()
        self._suppressed_moves: Counter[str] = Counter()

    def event(self, name: str, fields: dict[str, Any]) -> list[str]:
        """The lines to show now."""
        lines = self.due()
        if name == LEASE and fields.get("kind") == "reserved":
            self._reserved.add(str(fields.get("lease")))
        ordinary = name != WORKER_HEALTH and str(fields.get("lease")) in self._reserved
        text = "" if ordinary else event_text(name, fields)
        if not text:
            return lines
        if self._clock.now() - self._window_start_s >= WINDOW_S:
            self._window_start_s, self._shown = self._clock.now(), 0
        self._shown += 1
        if self._shown <= LINES or name == QUARANTINE or fields.get("state") == "quarantined":
            return [*lines, text]
        self._suppressed[name] += 1
        if name in (EVICTION, CRASH):
            moves = {key: int(fields.get(key, 0)) for key in ("samples", "tokens_kept", "tokens_lost")}
            self._suppressed_moves.update(moves)
        return lines

    def due(self, *, closing: bool = False) -> list[str]:
        """One line that summarises the suppressed events, once the window is over."""
        if not self._suppressed or not (closing or self._clock.now() - self._window_start_s >= WINDOW_S):
            return []
        counts = ", ".join(
            counted(self._suppressed[name], noun) for name, noun in NOUNS.items() if self._suppressed[name]
        )
        moves = f": {moved_text(self._suppressed_moves)}" if self._suppressed_moves["samples"] else ""
        self._suppressed.clear()
        self._suppressed_moves.clear()
        return [f"also {counts}{moves}"]
