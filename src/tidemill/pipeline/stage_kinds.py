"""Running a stage: one function for each kind.

An interrupted stage resumes: training kinds from the newest checkpoint, `pairs` and `eval` from the completions in
answers.jsonl, which is deleted when the stage is finished. `demonstrations` and `export` take seconds and start again.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.core.formatting import compact, counted, decimal, interval
from tidemill.pipeline.job import Job, Outcome, RunStage
from tidemill.pipeline.pipeline_result import INTERVAL
from tidemill.pipeline.robot_stages import run_bundle, run_clone, run_control, run_identify, run_optimise, run_twin
from tidemill.telemetry.events import EVALUATION, SESSION_END, SESSION_START, event_line
from tidemill.telemetry.jsonl import JsonlWriter
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.metrics import HELD_OUT_NAME
from tidemill.telemetry.report import write_report
from tidemill.telemetry.run_data import held_out_changes
from tidemill.telemetry.run_dir import RunDirectory, samples_name
from tidemill.telemetry.sample_files import write_samples

DATA = "rows.jsonl"
ANSWERS = "answers.jsonl"


def run_data_generation(job: Job) -> Outcome:
    """Write demonstrations or preference pairs for the task's prompts; outputs the file."""
    from tidemill.jobs.batch_generation import make_demonstrations, make_pairs

    path, config = job.directory / DATA, job.spec.data_generation
    path.unlink(missing_ok=True)  # of a session that was killed before stage.json was written
    if job.kind == "demonstrations":
        found = make_demonstrations(job.spec, path, prompts=config.prompts, split=config.split, progress=job.progress)
    else:
        found = make_pairs(
            job.spec,
            path,
            prompts=config.prompts,
            split=config.split,
            samples_per_prompt=config.samples_per_prompt,
            pairs_per_prompt=config.pairs_per_prompt,
            progress=job.progress,
            answers=job.directory / ANSWERS,
        )
        (job.directory / ANSWERS).unlink(missing_ok=True)
    figures = {name: value for name, value in found.items() if isinstance(value, (int, float))}
    return Outcome(product=path, headline=f"{found['rows']:,} {found['kind']}", figures=figures)


def run_rl(job: Job) -> Outcome:
    """Train or resume with reinforcement learning; outputs the last checkpoint."""
    from tidemill.jobs.train import train
    from tidemill.trainer.checkpoint_store import CheckpointStore

    summary = train(job.spec, callbacks=job.callbacks, stop=job.stop)
    if summary.get("interrupted"):
        return Outcome(interrupted=True)
    newest = CheckpointStore(job.directory / "checkpoints", keep_last=1).latest().checkpoint
    assert newest is not None, "a finished run has a checkpoint"
    measured = summary["eval"]
    headline = counted(summary["steps"], "step")
    if changes := held_out_changes(measured, digits=3):
        headline = f"{changes} (n = {measured['n']}) in {headline}"
    figures = {
        "steps": summary["steps"],
        "greedy_accuracy_before": measured["before"]["greedy_accuracy"],
        "greedy_accuracy": measured["after"]["greedy_accuracy"],
        "reward_mean_before": measured["before"]["reward_mean"],
        "reward_mean": measured["after"]["reward_mean"],
        **{name: measured["after"].get(name) for name in _INTERVALS},
        **{f"{name.removesuffix(INTERVAL)}_before{INTERVAL}": measured["before"].get(name) for name in _INTERVALS},
        "n": measured["n"],
        **{name: summary[name] for name in ("tokens_generated", "tokens_trained", "peak_rss_bytes")},
    }
    return Outcome(product=_merged(newest.path, job), headline=headline, figures=figures, wall_s=summary["wall_s"])


def run_supervised(job: Job) -> Outcome:
    """Train on demonstrations or preference pairs; outputs the best checkpoint if it is kept, else the last."""
    from tidemill.jobs.train_supervised import train_supervised
    from tidemill.trainer.objectives import OBJECTIVES

    kind = next(kind for kind in OBJECTIVES if kind == job.kind)
    summary = train_supervised(job.spec, kind, stop_request=job.stop)
    if summary["interrupted"]:
        return Outcome(interrupted=True)
    held_out = summary["held_out"]
    measured = [f"{name.replace('_', ' ')} {decimal(value)}" for name, value in held_out.items()]
    steps = counted(summary["steps"], "step")
    headline = f"held out: {', '.join(measured)}; {steps}" if measured else steps
    used = {name: summary[name] for name in ("tokens_trained", "peak_rss_bytes")}
    figures = {"steps": summary["steps"], **held_out, **used}
    product = _merged(Path(summary["model"]), job)
    return Outcome(product=product, headline=headline, figures=figures, wall_s=summary["wall_s"])


def run_eval(job: Job) -> Outcome:
    """Evaluate a model on the task's held-out prompts and on `eval.sets`; has no output."""
    from tidemill.jobs.model_evaluation import evaluate

    answers, spec = job.directory / ANSWERS, job.spec
    found = evaluate(spec, compare=spec.eval.compare_with, progress=job.progress, answers=answers)
    figures = write_evaluation(job.directory, spec, found)
    answers.unlink(missing_ok=True)
    return Outcome(headline=evaluation_headline(found), figures=figures)


def run_export(job: Job) -> Outcome:
    """Export a model as a Hugging Face folder; outputs the folder."""
    from tidemill.jobs.export import export_model

    settings = job.spec.export
    target = (settings.path or job.directory / "model").expanduser().absolute()
    # How the model was made: the initial model and each stage's result.
    initial = next((name for result in job.earlier if (name := result.values.get("model.source"))), None)
    history = [f"initial model: {initial}"] if initial else []
    history += [f"{result.name} ({result.kind}): {result.headline}" for result in job.earlier]
    written = export_model(job.spec, to=target, dtype=settings.dtype, digest=job.digest, history=history)
    headline = f"{compact(written.parameters)} parameters in {settings.dtype}, {compact(written.bytes)}B"
    figures = {"bytes": written.bytes, "parameters": written.parameters}
    return Outcome(product=target, headline=headline, figures=figures)


def _merged(checkpoint: Path, job: Job) -> Path:
    """The checkpoint, or, if it is an adapter, a checkpoint with the adapter merged into its base model."""
    from tidemill.models.catalog import resolve
    from tidemill.models.checkpoint_manifest import read_manifest, seal
    from tidemill.models.folder import holds_adapter
    from tidemill.models.saving import export_merged

    if not holds_adapter(checkpoint):
        return checkpoint
    merged = job.directory / "model"
    shutil.rmtree(merged, ignore_errors=True)  # of a session that was killed before stage.json was written
    export_merged(checkpoint, merged, resolve_base=lambda model: resolve(model, progress=job.progress))
    seal(merged, step=read_manifest(checkpoint).step, score=None)
    return merged


RUNNERS: dict[StageKind, RunStage] = {
    "demonstrations": run_data_generation,
    "pairs": run_data_generation,
    "sft": run_supervised,
    "reward_model": run_supervised,
    "dpo": run_supervised,
    "rl": run_rl,
    "eval": run_eval,
    "export": run_export,
    "control": run_control,
    "clone": run_clone,
    "optimise": run_optimise,
    "identify": run_identify,
    "twin": run_twin,
    "bundle": run_bundle,
}


_INTERVALS = (f"greedy_accuracy{INTERVAL}", f"reward_mean{INTERVAL}")


def write_evaluation(directory: Path, spec: RunSpec, found: dict[str, Any]) -> dict[str, Any]:
    """Write the run directory of an evaluation; returns its scalar figures, those of a set as `NAME/FIGURE`.

    Args:
        found: the result of `jobs.model_evaluation.evaluate`.

    Raises:
        UserError: the directory cannot be written, or is locked by another process.
    """
    evaluated = {HELD_OUT_NAME: found, **found.get("sets", {})}
    figures = {name: _scalars(each) for name, each in evaluated.items()}
    with RunDirectory.open(directory) as run:
        earlier, names = run.read_manifest(), {"run": spec.run.name, "model": spec.model.source}
        run.write_manifest(build_manifest(earlier, **names, seed=spec.run.seed, unix_s=time.time()))
        for name, each in evaluated.items():
            purpose = f"eval:{name}"
            lines = [
                {"step": 0, "purpose": purpose, "prompt_id": str(at), **sample, "valid": sample["reward"] is not None}
                for at, sample in enumerate(each["samples"])
            ]
            write_samples(run.samples / samples_name(0, purpose), lines)
        _write_events(run, figures)
        run.write_summary(found)
        write_report(run.path)
    of_sets = {
        f"{name}/{key}": value
        for name, each in figures.items()
        for key, value in each.items()
        if name != HELD_OUT_NAME and key not in ("model", "weights_digest")
    }
    return figures[HELD_OUT_NAME] | of_sets


def _scalars(found: dict[str, Any]) -> dict[str, Any]:
    """The scalar figures of one evaluation, with their intervals."""
    figures = {name: value for name, value in found.items() if isinstance(value, (int, float, str))}
    figures |= {name: found[name] for name in _INTERVALS if name in found}
    for k, share in _pass_at(found).items():
        figures |= _with_interval(f"pass@{k}", share)
    for name, score in found.get("scores", {}).items():
        figures |= _with_interval(f"score_{name}", score)
    for name, pair in _compared(found).items():
        figures |= {**_with_interval(f"{name}_difference", pair["difference"]), f"{name}_p_value": pair["p_value"]}
    return figures


def evaluation_headline(found: dict[str, Any], *, of: str = "held-out") -> str:
    """The main figures with their 95 % intervals, in one line."""
    parts = []
    for name, key in ((f"{of} mean reward", "reward_mean"), (f"{of} greedy accuracy", "greedy_accuracy")):
        if key in found:
            ends = found[f"{key}{INTERVAL}"]
            parts.append(f"{name} {found[key]:.3f} ({'95 %: ' if ends else ''}{interval(ends)}; n = {found['n']})")
    if not parts:
        parts.append(f"no valid reward in {found['n']} {of} completions")
    shares = {f"pass@{k}": share for k, share in list(_pass_at(found).items())[-1:]}  # the largest k
    scores = {f"score of {name}": score for name, score in found.get("scores", {}).items()}
    for name, figure in (shares | scores).items():
        parts.append(f"{name} {decimal(figure['value'])} ({interval([figure['low'], figure['high']])})")
    for name, pair in _compared(found).items():
        if name != "completion_tokens":
            change = f"{pair['difference']['value']:+.3f} (p = {decimal(pair['p_value'])})"
            parts.append(f"{name.replace('_', ' ')} {change} compared with the other model")
    for name, each in found.get("sets", {}).items():
        parts.append(evaluation_headline(each | {"compared_with": {}}, of=name))
    return ", ".join(parts)


def _pass_at(found: dict[str, Any]) -> dict[str, Any]:
    shares: dict[str, Any] = found.get("drawn", {}).get("pass_at", {})
    return shares


def _with_interval(name: str, figure: dict[str, Any]) -> dict[str, Any]:
    ends = None if figure["low"] is None else [figure["low"], figure["high"]]
    return {name: figure["value"], f"{name}{INTERVAL}": ends}


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = found.get("compared_with", {}).get("figures", {})
    return figures


def _write_events(run: RunDirectory, figures: Mapping[str, dict[str, Any]]) -> None:
    """One event for each evaluation, by name, between those of the session."""
    wall_s, session = sum(float(each.get("duration_s") or 0.0) for each in figures.values()), run.past.count + 1
    evaluations = [{"step": 0, **({} if name == HELD_OUT_NAME else {"set": name}), **figures[name]} for name in figures]
    with closing(JsonlWriter(run.events)) as log:
        for name, fields, elapsed_s in (
            (SESSION_START, {"pid": os.getpid(), "host": platform.node()}, 0.0),
            *((EVALUATION, fields, wall_s) for fields in evaluations),
            (SESSION_END, {"outcome": "finished"}, wall_s),
        ):
            log.write(event_line(name, fields, unix_s=time.time(), session=session, elapsed_s=elapsed_s))
