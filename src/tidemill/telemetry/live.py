"""The view for a terminal: a panel that stays in place, and notes scrolling above it."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.core.clock import Clock
from tidemill.telemetry.events import EVALUATION
from tidemill.telemetry.fleet_table import fleet_table
from tidemill.telemetry.metrics import HELD_OUT_LOSS
from tidemill.telemetry.numerals import compact, decimal, duration, percent
from tidemill.telemetry.plain import event_words, length_words, no_signal
from tidemill.telemetry.progress import Progress

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
