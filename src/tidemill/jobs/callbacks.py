"""Callbacks of a run: methods of the user that are called with metrics, samples, evaluations and checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError, exception_text
from tidemill.core.evidence import GuardDecision
from tidemill.core.records import Prompt, StepMetrics, Trajectory
from tidemill.extensions.registry import resolve
from tidemill.extensions.results import placed, shown
from tidemill.telemetry.events import CHECKPOINT, EVALUATION, GUARD, ROBOT_EVALUATION
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import TRAINING_PURPOSE
from tidemill.telemetry.sample_files import Sample, sample_line


class Callback:
    """Base class of callbacks; override any of the methods. Supervised training has no samples.

    They run in the process that started the run, between two steps: while one runs, no sample is scheduled. An
    exception is reported once per kind and does not end the run. Call `stop` to end the run after a checkpoint.
    """

    stop_reason: str | None = None

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after the current step, with a checkpoint; it can be resumed."""
        self.stop_reason = reason

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every step; see docs/reference/metrics.md for the names."""

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """The scored samples of a step, or of an evaluation."""

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """After every evaluation: `reward_mean`, `greedy_accuracy` and others; `NAME/reward_mean` for a set of
        `eval.sets`. Of supervised training: `loss`, and `token_accuracy` or `pairwise_accuracy`. Of control
        policies: `return_mean`, `success`, `falls`."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint was written."""

    def on_guard(self, decision: GuardDecision) -> None:
        """When the reward guard decided: `step`, `onset`, `action`, `target`, `reason` and others, before it acts."""


METHODS = {
    "on_step": ("step", "metrics"),
    "on_samples": ("step", "samples"),
    "on_evaluate": ("step", "metrics"),
    "on_checkpoint": ("step", "path"),
    "on_guard": ("decision",),
}
"""The methods that a run calls, with their arguments."""
OTHER_NAMES = {
    "on_step_end": "on_step",
    "on_log": "on_step",
    "on_save": "on_checkpoint",
    "on_evaluation": "on_evaluate",
}
"""Methods of other libraries' callbacks, by ours."""
WHERE = "callbacks"


def check_callback(callback: Any) -> Callback:
    """Raises UserError: it is no callback, or one of its methods would never be called or always fail."""
    if not isinstance(callback, Callback):
        hint = "subclass tidemill.Callback and give an instance of it"
        raise UserError(f"{callback!r:.60} is not a tidemill.Callback", where=WHERE, hint=hint)
    owner = type(callback).__name__
    for name in dir(callback):
        if (
            name in METHODS
            or not name.replace("_", "").lower().startswith("on")
            or not callable(getattr(callback, name))
        ):
            continue
        close = OTHER_NAMES.get(name) or next(iter(get_close_matches(name, METHODS, 1, 0.75)), "")
        if name.startswith("on_") or close:
            hint = (
                f"did you mean {close}?" if close else f"methods: {', '.join(METHODS)}; start other names without on_"
            )
            what = f"no run calls the method {name}"
            raise UserError(what, where=placed(f"{WHERE}, {owner}", getattr(callback, name)), hint=hint)
    for name, arguments in METHODS.items():
        _check_method(callback, name, arguments)
    return callback


def _check_method(callback: Callback, name: str, arguments: Sequence[str]) -> None:
    method = getattr(callback, name)
    where, hint = (
        placed(f"{WHERE}, {type(callback).__name__}.{name}", method),
        f"write def {name}(self, {', '.join(arguments)})",
    )
    if inspect.iscoroutinefunction(method):
        raise UserError("is async, and nothing awaits it", where=where, hint=hint)
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise UserError(f"cannot be called with {' and '.join(arguments)}: {error}", where=where, hint=hint) from None
    except ValueError:  # it has no signature
        return


@dataclass(eq=False)
class CallbackTelemetry:
    """Implements `core.protocols.Telemetry`: passes everything to the recorder, then to the callbacks."""

    recorder: Recorder
    callbacks: Sequence[Callback]
    request_stop: Callable[[str], None]  # ends the run; gets the reason
    observe: Callable[[int, Sequence[Trajectory]], None] | None = None  # gets the training samples of every step first

    def __post_init__(self) -> None:
        self.resume = self.recorder.resume
        self.progress = self.recorder.progress
        self.fleet = self.recorder.fleet
        for callback in self.callbacks:
            callback.stop_reason = None
        self._known: set[tuple[str, str]] = set()
        self._stopped = False

    def event(self, name: str, **fields: Any) -> None:
        self.recorder.event(name, **fields)
        step = int(fields.get("step") or 0)
        if name in (EVALUATION, ROBOT_EVALUATION):
            figures = {key: value for key, value in fields.items() if isinstance(value, int | float) and key != "step"}
            prefix = f"{fields['set']}/" if "set" in fields else ""
            self._call("on_evaluate", step, {prefix + key: value for key, value in figures.items()})
        elif name == CHECKPOINT and not fields.get("error"):
            self._call("on_checkpoint", step, self.recorder.run.checkpoints / f"step_{step}")
        elif name == GUARD:
            self._call("on_guard", msgspec.convert(fields, GuardDecision))

    def step(self, metrics: StepMetrics) -> None:
        self.recorder.step(metrics)
        if metrics.step > 0:
            self._call("on_step", metrics.step, dict(metrics.values))

    def samples(self, step: int, trajectories: Sequence[Trajectory], prompts: Sequence[Prompt]) -> None:
        self.recorder.samples(step, trajectories, prompts)
        if self.observe and trajectories and trajectories[0].sample_id.purpose == TRAINING_PURPOSE:
            self.observe(step, trajectories)
        if any(type(each).on_samples is not Callback.on_samples for each in self.callbacks):
            lines = (sample_line(step, *pair, texts=None) for pair in zip(trajectories, prompts, strict=True))
            self._call("on_samples", step, [msgspec.convert(line, Sample) for line in lines])

    def _call(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                returned = getattr(callback, method)(*arguments)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a callback must not end the run
                self._report(name, type(error).__name__, exception_text(error), "raised")
            else:
                if returned is not None:
                    hint = "call self.stop() to end the run"
                    self._report(name, "result", f"{shown(returned)}, which nothing reads ({hint})", "returned")
            if callback.stop_reason is not None and not self._stopped:
                self._stopped = True
                self.request_stop(callback.stop_reason)

    def _report(self, name: str, kind: str, text: str, verb: str) -> None:
        """Report a fault of a callback, once per kind."""
        if (name, kind) not in self._known:
            self._known.add((name, kind))
            self.recorder.event("callback_failed", callback=name, error=text)
            self.recorder.note(f"warning: {name} {verb} {text}; the run continues")


def configured_callbacks(spec: RunSpec) -> list[Callback]:
    """Instances of the classes in `telemetry.callbacks`.

    Raises:
        UserError: a class does not exist, is no callback or cannot be created.
    """
    where = "telemetry.callbacks"
    found = []
    for ref in spec.telemetry.callbacks:
        made = resolve(ref, "callback", where=where).function
        try:
            callback = made() if isinstance(made, type) else made
        except Exception as error:
            raise UserError(
                f"{ref} raised {exception_text(error)}", where=where, hint="correct its __init__"
            ) from error
        if not isinstance(callback, Callback):
            raise UserError(f"{ref} is not a callback", where=where, hint="derive the class from tidemill.Callback")
        found.append(check_callback(callback))
    return found
