from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from rich.console import Console

from tests.fabricated_run import FabricatedRun, FakeClock
from tidemill.core.records import FleetRow
from tidemill.telemetry.progress_views import LiveView, NotebookView, SessionProgress, _cell, sparkline
from tidemill.telemetry.run_data import LoggedEvaluation

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_a_sparkline_spans_its_minimum_and_maximum() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 0, 7, 3.5], 2) == "█▁", "the newest two only"
    assert sparkline([2, 2], 8) == "▁▁"
    assert sparkline([1, float("nan"), 2], 8) == "▁█"
    assert sparkline([], 8) == "" and sparkline([1, 2], 0) == ""


def rendered(view: LiveView, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    view._console = console
    console.print(view.render())
    return console.export_text()


@pytest.fixture
def progress(tmp_path: Path) -> SessionProgress:
    fabricated = FabricatedRun(tmp_path)
    recorder = fabricated.session()
    fabricated.evaluate(recorder, 0)
    for step in range(1, 11):
        fabricated.learn(recorder, step)
    recorder.close()
    recorder.run.close()
    return recorder._progress


@pytest.mark.parametrize(("width", "lines"), [(100, 7), (84, 7), (72, 11), (40, 11)])
def test_the_panel_fits_any_width(progress: SessionProgress, width: int, lines: int) -> None:
    view = LiveView(progress, Terminal(), FakeClock())
    view.close()
    view._closed = False
    progress.phases |= {"rollout": (38, 64), "training": (16, 64)}
    text = rendered(view, width)
    assert len(text.splitlines()) == lines and max(map(len, text.splitlines())) <= width
    for word in ("smollm2-addition", "reward", "held-out", "entropy", "KL", "clipped", "length", "no signal", "tok/s"):
        assert word in text
    assert "step 10/20" in text and "left" in text and "rollout" in text


def test_the_panel_shows_held_out_reward_and_accuracy() -> None:
    progress = SessionProgress(run="r", total_steps=3)
    view = LiveView(progress, Terminal(), FakeClock())
    view.close()
    progress.add_evaluation(LoggedEvaluation(0, 0.25, 0.1, None, 64))
    assert "held-out  0.250  (n 64)" in rendered(view, 100)
    progress.add_evaluation(LoggedEvaluation(2, 0.75, 0.1, 0.5, 64))
    assert "0.250 → 0.750 · 50 % right  (n 64)" in rendered(view, 100)


def test_preemptible_workers_are_shown_in_a_table(progress: SessionProgress) -> None:
    view = LiveView(progress, Terminal(), FakeClock())
    view.close()
    view._closed = False
    local = FleetRow(
        lease_id="l", worker_id="local", kind="reserved", state="serving", version=9, running=3, queued=0,
        tokens_per_s=40.0, price_usd_per_hour=2.0, age_s=7.0,
    )  # fmt: skip
    progress.set_fleet([local])
    assert "worker" not in rendered(view, 100), "the reserved side alone is no fleet"
    progress.set_fleet([local, msgspec.structs.replace(local, worker_id="spot-1", kind="preemptible")])
    assert "spot-1" in rendered(view, 100)
    progress.set_fleet([local])
    text = rendered(view, 100)
    assert "spot-1" not in text and "local" in text, "the table stays when all have been taken"
    assert max(map(len, text.splitlines())) == 100


def test_the_panel_of_a_new_run(progress: SessionProgress) -> None:
    view = LiveView(SessionProgress(run="new", total_steps=3), Terminal(), FakeClock())
    view.close()
    view._closed = False
    text = rendered(view, 80)
    assert "step 0/3" in text and "working" in text and "reward" not in text


def test_closing_the_live_view_restores_the_terminal() -> None:
    terminal = Terminal()
    view = LiveView(SessionProgress(run="r", total_steps=3), terminal, FakeClock())
    assert HIDE_CURSOR in terminal.getvalue()
    view.close()
    view.close()
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)


def test_notes_are_printed_above_the_panel_but_evaluations_are_not() -> None:
    terminal = Terminal()
    view = LiveView(SessionProgress(run="r", total_steps=3), terminal, FakeClock())
    view.event("checkpoint", {"step": 2, "duration_s": 1.25})
    view.event("evaluation", {"step": 2, "reward_mean": 0.123, "greedy_accuracy": 0.123, "n": 64})
    view.event("rollout", {"step": 2, "error": "OSError"})
    view.event("checkpoint", {"step": 3, "error": "CancelledError"})
    view.close()
    shown = terminal.getvalue()
    assert "checkpoint of step 2 written, 1.2 s" in shown and "rollout of step 2 failed: OSError" in shown
    assert "checkpoint of step 3 was interrupted" in shown
    assert "0.123" not in shown


def test_long_figures_shorten_the_sparkline() -> None:
    long = "0/16 groups · 1234 invalid and more"
    row = _cell("no signal", long, "▁▂▃▄▅▆▇█" * 4, "red").plain
    assert f"{long} " in row
    assert row.endswith("▆▇█")
    assert len(row) == len(_cell("no signal", "0/16", "▁▂▃▄▅▆▇█" * 4, "red").plain)


@pytest.mark.parametrize("kind", ["token_accuracy", "pairwise_accuracy"])
def test_a_supervised_run_shows_its_losses(kind: str) -> None:
    progress = SessionProgress(run="small", total_steps=4)
    progress.add_step(1, {"examples": 8.0, "loss": 0.75, kind: 0.5, "learning_rate": 1e-3}, 1.0)
    values = {"examples": 8.0, "loss": 0.25, kind: 0.875, "eval/loss": 0.5, f"eval/{kind}": 0.625, "grad_norm": 2.0}
    progress.add_step(2, values | {"learning_rate": 5e-4}, 2.0)
    view = LiveView(progress, Terminal(), FakeClock())
    view.close()
    text = rendered(view, 100)
    for text_part in ("loss      0.250", "held-out  0.500", "accuracy  0.875", "held-out  0.625", "gradient  2.00"):
        assert text_part in text
    assert "reward" not in text
    assert "█" in text


def test_a_notebook_shows_one_panel_and_redraws_it(progress: SessionProgress, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich displays what a console prints in a notebook, unless it is told not to."""
    shell = type("ZMQInteractiveShell", (), {})  # the name by which rich recognises a notebook
    handle, displayed = Mock(), Mock()
    displayed.return_value = handle
    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    monkeypatch.setattr("IPython.display.display", displayed)
    view = NotebookView(progress, io.StringIO(), FakeClock())
    view.step()
    view.close()
    assert displayed.call_count == 1
    assert handle.update.call_count == 2
    assert "step 10/" in handle.update.call_args.args[0].data
