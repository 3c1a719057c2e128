"""Views of a run's progress: a live panel for terminals, plain lines for logs, nothing."""

from __future__ import annotations

import atexit
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.core.formatting import compact, decimal, duration, percent
from tidemill.core.protocols import Clock
from tidemill.core.records import FleetRow, Prompt, StepMetrics, Trajectory
from tidemill.telemetry.events import ALREADY_FINISHED, CHECKPOINT, EVALUATION, GIVEN_UP, REPLAY, RESUME, WAITING
from tidemill.telemetry.fleet_view import fleet_table
from tidemill.telemetry.metrics import GREEDY_ACCURACY, HELD_OUT, HELD_OUT_LOSS, HELD_OUT_REWARD, STEP_TIME, MetricLine
from tidemill.telemetry.summary import Evaluation, read_evaluation

HISTORY = 400
RECENT = 8


@dataclass
class Progress:
    """Kept current by the recorder; the views only read it. Times are seconds since this session began."""

    run: str
    total_steps: int
    groups: int = 0  # per batch
    earlier_wall_s: float = 0.0
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)  # of the newest step
    history: dict[str, deque[float]] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by step
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)  # (done, total) since the newest step, in order
    fleet: tuple[FleetRow, ...] = ()  # the workers there are, as last told
    preemptible: bool = False  # whether any worker of this session was
    elapsed_s: float = 0.0  # when the newest step ended
    step_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add_step(self, step: int, values: dict[str, float], elapsed_s: float) -> None:
        if step > 0:
            # Wall time from step to step, so that evaluations and checkpoints count towards the time left.
            self.step_times.append(elapsed_s - self.elapsed_s if self.step_times else values.get(STEP_TIME, 0.0))
        self.elapsed_s, self.phases = elapsed_s, {}
        self._take(step, values)

    def _take(self, step: int, values: dict[str, float]) -> None:
        self.step, self.values = step, values
        for name, value in values.items():
            self.history.setdefault(name, deque(maxlen=HISTORY)).append(value)
        self.add_evaluation(read_evaluation(step, values, prefix=HELD_OUT))

    def add_evaluation(self, evaluation: Evaluation | None) -> None:
        if evaluation is not None:
            self.evaluations[evaluation.step] = evaluation

    def set_fleet(self, rows: Iterable[FleetRow]) -> None:
        self.fleet = tuple(rows)
        self.preemptible |= any(row.kind == "preemptible" for row in self.fleet)

    def restart(self, lines: Iterable[MetricLine], evaluations: Iterable[Evaluation]) -> None:
        """Take over the surviving history of earlier sessions."""
        self.step, self.values, self.history = 0, {}, {}
        self.evaluations = {one.step: one for one in evaluations}
        for line in lines:
            self._take(line.step, line.values)

    def current_phases(self) -> list[tuple[str, int, int]]:
        """(name, done, total) of what is under way: training may begin before the rollout is done."""
        return [(name, done, total) for name, (done, total) in self.phases.copy().items() if done < total]

    def left_s(self) -> float | None:
        """Seconds until the last step, from the median of recent steps; None before the first."""
        if not self.step_times:
            return None
        return max(0, self.total_steps - self.step) * median(self.step_times)


HEARTBEAT_S = 30.0
INTERRUPTIONS = ("CancelledError", "KeyboardInterrupt")  # what a span calls a second Ctrl-C


class View(Protocol):
    """Shows a Progress that the recorder keeps. Never raises for a terminal that went away."""

    def step(self) -> None: ...

    def event(self, name: str, fields: dict[str, Any]) -> None: ...

    def phase(self) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def step_words(progress: Progress) -> str:
    """One step in one line; what was not measured is left out."""
    values = progress.values

    def part(label: str, name: str, shown: str) -> str:
        return f"{label} {shown}" if name in values else ""

    learned = () if "reward_mean" in values else _supervised_parts(values)
    spread = f" ±{decimal(values['reward_std'])}" if "reward_std" in values else ""
    cut = f" ({percent(values['truncated_fraction'])} cut)" if values.get("truncated_fraction") else ""
    kl = "kl_ref" if "kl_ref" in values else "approx_kl"
    left, skipped = progress.left_s(), "optimizer_steps_skipped"
    parts = [
        f"step {progress.step:>{len(str(progress.total_steps))}}/{progress.total_steps}",
        *learned,
        part("reward", "reward_mean", decimal(values.get("reward_mean")) + spread),
        part("held-out reward", HELD_OUT_REWARD, decimal(values.get(HELD_OUT_REWARD))),
        part("held-out accuracy", GREEDY_ACCURACY, decimal(values.get(GREEDY_ACCURACY))),
        part("entropy", "entropy", decimal(values.get("entropy"))),
        part("kl", kl, decimal(values.get(kl))),
        part("clip", "clip_fraction", percent(values.get("clip_fraction"))),
        part("length", "completion_tokens_mean", length_words(values) + cut),
        part("no signal", "groups_without_signal", no_signal(progress)),
        part("invalid", "samples_invalid", compact(values["samples_invalid"])) if values.get("samples_invalid") else "",
        part("updates skipped", skipped, compact(values[skipped])) if values.get(skipped) else "",
        part("tok/s", "tokens_per_s", compact(values.get("tokens_per_s", 0))),
        f"left {duration(left)}" if left else "",
    ]
    return "  ".join(filter(None, parts))


def _supervised_parts(values: dict[str, float]) -> list[str]:
    """Loss and accuracy of a step that learned from examples, and what was measured of the held-out ones."""
    labels = (
        ("loss", "loss"),
        ("accuracy", "token_accuracy"),
        ("pairs right", "pairwise_accuracy"),
        ("held-out loss", "eval/loss"),
        ("held-out accuracy", "eval/token_accuracy"),
        ("held-out pairs right", "eval/pairwise_accuracy"),
    )
    return [f"{label} {decimal(values[name])}" for label, name in labels if name in values]


def length_words(values: dict[str, float]) -> str:
    return f"{compact(values.get('completion_tokens_mean', 0))} max {compact(values.get('completion_tokens_max', 0))}"


def no_signal(progress: Progress) -> str:
    """Groups without signal, of how many."""
    groups = compact(progress.values.get("groups_without_signal", 0))
    return f"{groups}/{progress.groups}" if progress.groups else groups


def event_words(name: str, fields: dict[str, Any]) -> str:
    """The events worth a line of their own; empty for the others."""
    step, error = fields.get("step"), fields.get("error")
    took = f", {duration(fields['duration_s'])}" if "duration_s" in fields else ""
    if error:
        ended = "was interrupted" if error in INTERRUPTIONS else f"failed: {error}"
        return f"{name} of step {step} {ended}" if step is not None else f"{name} {ended}"
    if name == EVALUATION and "reward_mean" in fields:
        n = f" (n {fields['n']}{took})" if "n" in fields else ""
        accuracy = f", accuracy {decimal(fields['greedy_accuracy'])}" if "greedy_accuracy" in fields else ""
        return f"held-out reward after step {step}: {decimal(fields['reward_mean'])}{accuracy}{n}"
    if name == CHECKPOINT and not fields.get("interrupted"):
        return f"checkpoint of step {step} written{took}"
    if name == WAITING:
        return f"still waiting for {fields['awaited']} after {duration(fields['waited_s'])}"
    if name == GIVEN_UP:
        return f"no longer waiting for {fields['awaited']} after {duration(fields['waited_s'])}: {fields['lost']}"
    if name == REPLAY:
        first, last = fields["first_step"], fields["last_step"]
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        return f"{steps} learned from again, without generating"
    if name == ALREADY_FINISHED:
        return f"this run has done all its {fields['steps']} steps"
    if name == RESUME:
        return f"resumed after step {step}"
    return ""


class PlainView:
    """Whole lines on a stream."""

    def __init__(self, progress: Progress, stream: TextIO, clock: Clock) -> None:
        self._progress, self._stream, self._clock = progress, stream, clock
        self._last_line_s = clock.now()

    def step(self) -> None:
        self.note(step_words(self._progress))

    def event(self, name: str, fields: dict[str, Any]) -> None:
        if words := event_words(name, fields):
            self.note(words)

    def phase(self) -> None:
        if self._clock.now() - self._last_line_s >= HEARTBEAT_S:
            now = self._progress
            phases = ", ".join(f"{name} {done}/{total}" for name, done, total in now.current_phases())
            self.note(f"step {now.step + 1}/{now.total_steps}: {phases or 'working'}")

    def note(self, text: str) -> None:
        self._last_line_s = self._clock.now()
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads any more; the logs have it all

    def close(self) -> None:
        pass


BARS = "▁▂▃▄▅▆▇█"
PANEL_WIDTH = 100
TWO_COLUMNS_WIDTH = 84
LABEL_WIDTH, FIGURES_WIDTH = 10, 24
REFRESH_PER_S = 4
ACCENT, QUIET, GOOD, WARN = "cyan", "bright_black", "green", "yellow"


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values as bars between their own extremes; a flat line stays low."""
    shown = [value for value in tuple(values) if math.isfinite(value)][-width:]
    if not shown or width <= 0:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


class LiveView:
    """Redraws itself a few times a second from a Progress; `close` always gives the terminal back."""

    def __init__(self, progress: Progress, stream: TextIO, clock: Clock) -> None:
        self._progress, self._clock = progress, clock
        self._began_s = clock.now()
        self._console = Console(file=stream)
        self._closed = False
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            # What others print goes above the panel, but what they write into a pipe or file stays there.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        # Even where nobody catches the exception that ends the process.
        atexit.register(self.close)

    def step(self) -> None:
        self._live.refresh()

    def event(self, name: str, fields: dict[str, Any]) -> None:
        # The panel shows evaluations itself.
        if (name != EVALUATION or "error" in fields) and (words := event_words(name, fields)):
            self.note(words)

    def phase(self) -> None:
        pass

    def note(self, text: str) -> None:
        self._console.print(Text(text, style=QUIET))

    def close(self) -> None:
        self._closed = True
        self._live.stop()
        atexit.unregister(self.close)

    def render(self) -> RenderableType:
        """The panel, as wide as the terminal up to a width that still reads well."""
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
        title = Text.assemble(("tidemill ", f"bold {ACCENT}"), (progress.run, "bold"))
        return Panel(
            Group(*parts),
            box=ROUNDED,
            title=title,
            title_align="left",
            subtitle=self._clocks(),
            subtitle_align="right",
            border_style=QUIET,
            width=width,
            padding=(0, 1),
        )

    def _clocks(self) -> Text:
        progress = self._progress
        running_s = self._clock.now() - self._began_s
        words = [f"step {progress.step}/{progress.total_steps}", duration(progress.earlier_wall_s + running_s)]
        if left := progress.left_s():
            words.append(f"{duration(max(0.0, left - (running_s - progress.elapsed_s)))} left")
        return Text(" · ".join(words), style=ACCENT)

    def _rows(self, spark: int) -> list[tuple[str, str, str, str]]:
        """(label, figures, sparkline, style of the sparkline), left and right alternating."""
        progress = self._progress
        values = progress.values

        def bars(name: str) -> str:
            return sparkline(progress.history.get(name, ()), spark)

        if "examples" in values or HELD_OUT_LOSS in values:
            return _supervised_rows(values, bars)
        kl = "kl_ref" if "kl_ref" in values else "approx_kl"
        spread = f" ±{decimal(values['reward_std'])}" if "reward_std" in values else ""
        length = length_words(values)
        cut = f" · {percent(values['truncated_fraction'])} cut" if values.get("truncated_fraction") else ""
        invalid = values.get("samples_invalid", 0)
        lost = f" · {compact(invalid)} invalid" if invalid else ""
        speed = f"{compact(values.get('tokens_per_s', 0))} tok/s" if "tokens_per_s" in values else "-"
        return [
            ("reward", decimal(values.get("reward_mean")) + spread, bars("reward_mean"), GOOD),
            ("held-out", *self._held_out(spark), GOOD),
            ("entropy", decimal(values.get("entropy")), bars("entropy"), ACCENT),
            ("length", length + cut, bars("completion_tokens_mean"), ACCENT),
            ("KL", decimal(values.get(kl)), bars(kl), ACCENT),
            ("clipped", percent(values.get("clip_fraction")), bars("clip_fraction"), ACCENT),
            ("no signal", no_signal(progress) + " groups" + lost, bars("groups_without_signal"), WARN),
            ("speed", speed, bars("tokens_per_s"), ACCENT),
        ]

    def _held_out(self, spark: int) -> tuple[str, str]:
        found = sorted(self._progress.evaluations.copy().values())  # step comes first
        if not found:
            return "-", ""
        last = found[-1]
        change = decimal(last.reward_mean)
        if len(found) > 1:
            change = f"{decimal(found[0].reward_mean)} → {change}"
        right = "" if last.greedy_accuracy is None else f" · {percent(last.greedy_accuracy)} right"
        return f"{change}{right}  (n {last.n})", sparkline([one.reward_mean for one in found], spark)

    def _phase(self, width: int) -> RenderableType:
        row = Table.grid(padding=(0, 1))
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
        row.add_row(
            Text(f"{name:<{LABEL_WIDTH}}", style="bold"),
            bar,
            Text(count, style=QUIET, no_wrap=True, overflow="ellipsis"),
        )
        return row


def _supervised_rows(values: dict[str, float], bars: Callable[[str], str]) -> list[tuple[str, str, str, str]]:
    """Of a run that learns from demonstrations or preference pairs; the loss and what it gets right."""
    right, label = ("token_accuracy", "tokens") if "token_accuracy" in values else ("pairwise_accuracy", "pairs")
    held_out = f"eval/{right}" if f"eval/{right}" in values else "eval/pairwise_accuracy"
    rows = [
        ("loss", "loss", GOOD),
        ("held-out", HELD_OUT_LOSS, GOOD),
        (f"{label} ✓", right, ACCENT),
        ("held-out ✓", held_out, ACCENT),
        ("gradient", "grad_norm", ACCENT),
        ("rate", "learning_rate", ACCENT),
    ]
    return [(words, decimal(values.get(name)), bars(name), style) for words, name, style in rows]


def _cell(label: str, figures: str, bars: str, style: str) -> Text:
    figures = f"{figures:<{FIGURES_WIDTH - 1}} "
    return Text.assemble(
        (f"{label:<{LABEL_WIDTH}}", QUIET),
        (figures, "bold"),
        (bars[len(figures) - FIGURES_WIDTH :], style),
        no_wrap=True,
    )


class NullTelemetry:
    """Implements core.protocols.Telemetry."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._told = ""

    def resume(self, step: int) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tenths, each told once."""
        text = f"{phase}: {10 * (10 * done // max(total, 1))} % of {total}"
        if text != self._told:
            self._told = text
            self._tell(text)

    def fleet(self, rows: Sequence[FleetRow]) -> None:
        pass
