"""The view for logs and pipes: one line per step, and one now and then while a phase is long."""

from __future__ import annotations

from typing import Any, Protocol, TextIO

from tidemill.core.clock import Clock
from tidemill.telemetry.events import ALREADY_FINISHED, CHECKPOINT, EVALUATION, GIVEN_UP, REPLAY, RESUME, WAITING
from tidemill.telemetry.metrics import GREEDY_ACCURACY, HELD_OUT_REWARD
from tidemill.telemetry.numerals import compact, decimal, duration, percent
from tidemill.telemetry.progress import Progress

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
