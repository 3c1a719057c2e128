"""An evaluation as a run directory of its own: figures, every completion, and a report."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.pipeline.page import INTERVAL
from tidemill.telemetry.events import EVALUATION, SESSION_END, SESSION_START, event_line
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.numerals import between, decimal
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.samples import write_samples

PURPOSE = "eval:held_out"
_INTERVALS = (f"greedy_accuracy{INTERVAL}", f"reward_mean{INTERVAL}")


def write_measured(directory: Path, spec: RunSpec, found: dict[str, Any]) -> dict[str, Any]:
    """Write what `runtime.evaluate.evaluate` found; returns its scalar figures.

    Raises:
        UserError: the directory cannot be written, or another process works on it.
    """
    figures = {name: value for name, value in found.items() if isinstance(value, (int, float, str))}
    figures |= {name: found[name] for name in _INTERVALS if name in found}
    for k, share in _pass_at(found).items():
        figures |= _with_interval(f"pass@{k}", share)
    for name, score in found.get("scores", {}).items():
        figures |= _with_interval(f"score_{name}", score)
    for name, pair in _compared(found).items():
        figures |= {**_with_interval(f"{name}_difference", pair["difference"]), f"{name}_p_value": pair["p_value"]}
    lines = [
        {
            "step": 0,
            "purpose": PURPOSE,
            "prompt_id": str(number),
            **sample,
            "valid": sample["reward"] is not None,
        }
        for number, sample in enumerate(found["samples"])
    ]
    with RunDirectory.open(directory) as run:
        earlier = run.read_manifest()
        run.write_manifest(
            build_manifest(earlier, run=spec.run.name, model=spec.model.source, seed=spec.run.seed, unix_s=time.time())
        )
        write_samples(run.samples / samples_name(0, PURPOSE), lines)
        _write_events(run, figures)
        run.write_summary(found)
        write_report(run.path)
    return figures


def measured_words(found: dict[str, Any]) -> str:
    """The figures that matter most, in a sentence, with their 95 % intervals."""
    words = []
    for name, key in (("held-out mean reward", "reward_mean"), ("held-out greedy accuracy", "greedy_accuracy")):
        if key in found:
            words.append(f"{name} {found[key]:.3f} (95 %: {between(*found[f'{key}{INTERVAL}'])}; n = {found['n']})")
    if not words:
        words.append(f"no valid reward of {found['n']} held-out completions")
    if shares := _pass_at(found):
        largest = list(shares)[-1]  # the others are figures and in the report
        words.append(_words(f"pass@{largest}", shares[largest]))
    words += [_words(f"score of {name}", score) for name, score in found.get("scores", {}).items()]
    for name, pair in _compared(found).items():
        if name != "completion_tokens":
            change = f"{pair['difference']['value']:+.3f} (p = {decimal(pair['p_value'])})"
            words.append(f"{name.replace('_', ' ')} against the other model {change}")
    return ", ".join(words)


def _pass_at(found: dict[str, Any]) -> dict[str, Any]:
    shares: dict[str, Any] = found.get("drawn", {}).get("pass_at", {})
    return shares


def _with_interval(name: str, figure: dict[str, float]) -> dict[str, Any]:
    return {name: figure["value"], f"{name}{INTERVAL}": [figure["low"], figure["high"]]}


def _words(name: str, figure: dict[str, float]) -> str:
    return f"{name} {decimal(figure['value'])} ({between(figure['low'], figure['high'])})"


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = found.get("compared_with", {}).get("figures", {})
    return figures


def _write_events(run: RunDirectory, figures: dict[str, Any]) -> None:
    took_s = float(figures.get("duration_s") or 0.0)
    turns: list[tuple[str, dict[str, Any], float]] = [
        (SESSION_START, {"pid": os.getpid(), "host": platform.node()}, 0.0),
        (EVALUATION, {"step": 0, **figures}, took_s),
        (SESSION_END, {"outcome": "finished"}, took_s),
    ]
    log = JsonlWriter(run.events)
    try:
        for name, fields, elapsed_s in turns:
            session = run.past.count + 1
            log.write(event_line(name, fields, unix_s=time.time(), session=session, elapsed_s=elapsed_s))
    finally:
        log.close()
