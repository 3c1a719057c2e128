"""How each kind of stage runs: one function for each kind.

A stage that was stopped or killed goes on when it is run again: one that learns from its newest checkpoint, `pairs` and
`eval` from the prompts answered so far (answers.jsonl, gone when they have finished). `demonstrations` and `export` are
done anew: that takes seconds.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.core.formatting import between, compact, counted, decimal
from tidemill.pipeline.pipeline_page import INTERVAL
from tidemill.pipeline.stage_plan import StageResult
from tidemill.telemetry.events import EVALUATION, SESSION_END, SESSION_START, event_line
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_data import held_out_changes
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import write_samples

DATA = "rows.jsonl"
ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A stage whose turn it is."""

    name: str
    kind: StageKind
    digest: str
    spec: RunSpec  # every `stage:NAME` replaced by a path; run.dir is the stage's own folder
    earlier: Sequence[StageResult]  # the finished stages it is built on, nearest last
    say: Callable[[str], None]

    @property
    def directory(self) -> Path:
        return self.spec.directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What running a stage came to."""

    product: Path | None = None  # what it gives to later stages
    headline: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False  # by the user: not finished, and the same command goes on with it
    wall_s: float | None = None  # where the stage itself knows it over several sessions


RunStage: TypeAlias = Callable[[Job], Outcome]


def run_making(job: Job) -> Outcome:
    """Write rows to learn from, or to be measured on, of the task's prompts: its own answers, or a model's right ones
    against wrong ones; gives that file."""
    from tidemill.runtime.batch_generation import make_demonstrations, make_pairs

    path, data_generation = job.directory / DATA, job.spec.data_generation
    path.unlink(missing_ok=True)  # of a session that was killed before it could say that it had finished
    if job.kind == "demonstrations":
        found = make_demonstrations(
            job.spec, path, prompts=data_generation.prompts, split=data_generation.split, progress=job.say
        )
    else:
        found = make_pairs(
            job.spec,
            path,
            prompts=data_generation.prompts,
            split=data_generation.split,
            samples_per_prompt=data_generation.samples_per_prompt,
            pairs_per_prompt=data_generation.pairs_per_prompt,
            progress=job.say,
            answers=job.directory / ANSWERS,
        )
        (job.directory / ANSWERS).unlink(missing_ok=True)
    figures = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    return Outcome(product=path, headline=f"{found['rows']:,} {found['kind']}", figures=figures)


def run_rl(job: Job) -> Outcome:
    """Reinforcement learning, or going on with it; gives its last checkpoint."""
    from tidemill.runtime.train import train
    from tidemill.trainer.checkpoint_store import CheckpointStore

    summary = train(job.spec)
    if summary.get("interrupted"):
        return Outcome(interrupted=True)
    newest = CheckpointStore(job.directory / "checkpoints", keep_last=1).latest().checkpoint
    assert newest is not None, "a finished run has a checkpoint of its last step"
    measured = summary["eval"]
    steps = counted(summary["steps"], "step")
    headline = steps
    if changes := held_out_changes(measured, digits=3):
        headline = f"{changes} (n = {measured['n']}) in {steps}"
    figures = {
        "steps": summary["steps"],
        "greedy_accuracy_before": measured["before"]["greedy_accuracy"],
        "greedy_accuracy": measured["after"]["greedy_accuracy"],
        "reward_mean_before": measured["before"]["reward_mean"],
        "reward_mean": measured["after"]["reward_mean"],
        "n": measured["n"],
        "tokens_generated": summary["tokens_generated"],
        "tokens_trained": summary["tokens_trained"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
    }
    return Outcome(product=_plain(newest.path, job), headline=headline, figures=figures, wall_s=summary["wall_s"])


def run_supervised(job: Job) -> Outcome:
    """Learning from demonstrations or preference pairs; gives the best checkpoint where that is kept, else the last."""
    from tidemill.runtime.train_supervised import OBJECTIVES, train_supervised

    summary = train_supervised(job.spec, next(kind for kind in OBJECTIVES if kind == job.kind))
    if summary["interrupted"]:
        return Outcome(interrupted=True)
    held_out = summary["held_out"]
    told = [f"{name.replace('_', ' ')} {decimal(value)}" for name, value in held_out.items()]
    steps = counted(summary["steps"], "step")
    headline = f"held out: {', '.join(told)}; {steps}" if told else steps
    figures = {
        "steps": summary["steps"],
        **held_out,
        "tokens_trained": summary["tokens_trained"],
        "peak_rss_bytes": summary["peak_rss_bytes"],
    }
    return Outcome(
        product=_plain(Path(summary["model"]), job), headline=headline, figures=figures, wall_s=summary["wall_s"]
    )


def run_eval(job: Job) -> Outcome:
    """Measure a model on the task's held-out prompts; gives figures and every completion."""
    from tidemill.runtime.model_evaluation import evaluate

    found = evaluate(job.spec, compare=job.spec.eval.compare_with, progress=job.say, answers=job.directory / ANSWERS)
    figures = write_measured(job.directory, job.spec, found)
    (job.directory / ANSWERS).unlink(missing_ok=True)
    return Outcome(headline=measured_words(found), figures=figures)


def run_export(job: Job) -> Outcome:
    """Write a model as a plain Hugging Face folder; gives that folder."""
    from tidemill.runtime.export import export_model

    settings = job.spec.export
    target = (settings.path or job.directory / "model").expanduser().absolute()
    written = export_model(job.spec, to=target, dtype=settings.dtype, digest=job.digest, history=_history(job))
    headline = f"{compact(written.parameters)} parameters in {settings.dtype}, {compact(written.bytes)}B"
    return Outcome(
        product=target, headline=headline, figures={"bytes": written.bytes, "parameters": written.parameters}
    )


def _plain(checkpoint: Path, job: Job) -> Path:
    """What later stages take: the checkpoint itself, or, of one that holds an adapter, the adapter merged into its
    base."""
    from tidemill.models.catalog import resolve
    from tidemill.models.checkpoint_manifest import read_manifest, seal
    from tidemill.models.folder import holds_adapter
    from tidemill.models.saving import export_merged

    if not holds_adapter(checkpoint):
        return checkpoint
    merged = job.directory / "model"
    shutil.rmtree(merged, ignore_errors=True)  # of a session that was killed before it could say that it had finished
    export_merged(checkpoint, merged, resolve_base=lambda model: resolve(model, progress=job.say))
    seal(merged, step=read_manifest(checkpoint).step, score=None)
    return merged


def _history(job: Job) -> list[str]:
    """How the model of this job came to be: what it began as, then what each stage made of it."""
    began = next((name for mark in job.earlier if (name := mark.values.get("model.source"))), None)
    stages = [f"{mark.name} ({mark.kind}): {mark.headline}" for mark in job.earlier]
    return [f"began as {began}", *stages] if began else stages


RUNNERS: dict[StageKind, RunStage] = {
    "demonstrations": run_making,
    "pairs": run_making,
    "sft": run_supervised,
    "reward_model": run_supervised,
    "dpo": run_supervised,
    "rl": run_rl,
    "eval": run_eval,
    "export": run_export,
}


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
