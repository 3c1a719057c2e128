"""Supervised stages: SFT, reward models and DPO."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.folders import another_directory
from tidemill.core.protocols import Telemetry
from tidemill.data.examples import Examples, load_demonstrations, load_pairs
from tidemill.jobs.callbacks import Callback, CallbackTelemetry, configured_callbacks
from tidemill.jobs.stopping import StopRequest
from tidemill.jobs.train import DATA_DIGEST, record_start, run_session
from tidemill.models.catalog import resolve
from tidemill.models.checkpoint_manifest import read_manifest, seal
from tidemill.models.codec import load_codec
from tidemill.models.folder import holds_adapter
from tidemill.models.reward_model import copy_head
from tidemill.models.saving import export_merged
from tidemill.models.snapshots import stored_context_limit
from tidemill.models.turn_format import turn_format
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.backend import checkpoint_store
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import load_model_bundle
from tidemill.telemetry.control import POLL_S
from tidemill.telemetry.events import DATA, PAUSED, MonotonicClock, span
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import PromptFormat, RunDirectory
from tidemill.telemetry.statistics import few_items
from tidemill.trainer.objectives import OBJECTIVES, SupervisedKind
from tidemill.trainer.supervised_loop import FitContext, FitResult, fit

MERGED = "model"
"""Folder in the run directory that holds the merged model of a stage that trained an adapter."""

LOADERS: dict[SupervisedKind, Callable[..., Examples[Any]]] = {
    "sft": load_demonstrations,
    "reward_model": load_pairs,
    "dpo": load_pairs,
}


def train_supervised(
    spec: RunSpec,
    kind: SupervisedKind,
    *,
    telemetry_stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    stop_request: StopRequest | None = None,
) -> dict[str, Any]:
    """Run or resume a supervised stage in `spec.directory` until it finishes or is asked to stop (Ctrl-C, SIGTERM).

    Args:
        callbacks: see `jobs.callbacks`; those of the configuration are called, too.
        stop_request: another way to stop it.

    Returns:
        The summary. `model` is the folder of the trained model (and head), merged if an adapter was trained, or None
        for a stage that was stopped; `held_out` holds the metrics on held-out examples.

    Raises:
        UserError: the input, the run directory or the disk is at fault; checkpointed steps are kept.
    """
    stop, stop_request = threading.Event(), stop_request or StopRequest()
    callbacks, remarks = [*callbacks, *configured_callbacks(spec)], list[str]()
    check_memory(spec, "supervised", note=remarks.append)
    opened = run_session(
        spec,
        telemetry_stream,
        planned_steps=lambda planned: 0 if planned.supervised.epochs else planned.trainer.steps,
        kind=kind,
    )
    with stop_request.after_hours(spec.trainer.hours), opened as (resumed, run, recorder):
        recorder.control.attach(stop_request.request, between_steps=spec.trainer.shards == 1)
        for remark in remarks:
            recorder.note(remark)
        with stop_request.on_signals(stop.set), stop_request.bound(lambda _: stop.set()):
            telemetry = CallbackTelemetry(recorder, callbacks, lambda _: stop.set())
            result = _train(resumed, kind, run, recorder, telemetry, stop)
            if result.already_finished:
                recorder.note(f"this stage has already finished its {result.steps} steps")
            if result.interrupted:
                recorder.note(f"stopped after step {result.steps}, which is checkpointed; the same command resumes it")
            model = None
            if result.model and not result.interrupted:
                model = _merged_model(result.model, run, recorder.note)
            summary = recorder.finish("interrupted" if result.interrupted else "finished")
        summary |= {
            "kind": kind,
            "model": str(model) if model else None,
            "held_out": result.held_out,
            "stopped_early": result.stopped_early,
        }
        run.write_summary(summary)
    return summary | {"run_dir": str(spec.directory), "already_finished": result.already_finished}


def _train(
    spec: RunSpec,
    kind: SupervisedKind,
    run: RunDirectory,
    recorder: Recorder,
    telemetry: Telemetry,
    stop: threading.Event,
) -> FitResult:
    folder = resolve(spec.model, progress=recorder.note)
    codec = load_codec(folder)
    # Read first: a row may be invalid, and loading weights takes longer.
    examples = LOADERS[kind](
        spec.data,
        codec=codec,
        context_limit=stored_context_limit(folder),
        chat_template=spec.model.chat_template,
        turn_formats=cache(lambda chat: turn_format(codec, spec.env, chat_template=chat)),
        progress=recorder.note,
    )

    def started(*, model_digest: str, threads: int, device_info: dict[str, Any]) -> None:
        record_start(
            run,
            model_digest=model_digest,
            data_key=DATA_DIGEST,
            data_digest=examples.digest,
            data_changed=UserError(
                "the examples have changed since this run started",
                where="data.path",
                hint=f"restore the previous file, or {another_directory(run.path)}",
            ),
            threads=threads,
            schedule_steps=spec.optimizer.schedule_steps,
            prompts=PromptFormat(chat=examples.train[0].chat, system_prompt=spec.data.system_prompt),
        )
        few = few_items(len(examples.held_out), "held-out example", "hold out more rows")
        sizes = {"training": len(examples.train), "held_out": len(examples.held_out)}
        recorder.event(DATA, **sizes, left_out=dict(examples.left_out), **({"few": [few]} if few else {}))
        recorder.event("machine", **device_info)

    if spec.trainer.shards > 1:
        from tidemill.runtime.cluster.ray_supervised import fit_on_ranks

        return fit_on_ranks(
            spec,
            kind,
            examples,
            folder=folder,
            directory=run.path,
            telemetry=telemetry,
            recorder=recorder,
            started=started,
            stop=stop.is_set,
        )
    bundle = load_model_bundle(spec, progress=recorder.note, work="supervised")
    started(model_digest=weights_digest(bundle.model), threads=bundle.threads, device_info=bundle.device_info)
    context = FitContext(
        forward=bundle.forward,
        source=bundle.folder,
        directory=run.path,
        checkpoints=checkpoint_store(spec, run.checkpoints),
        telemetry=telemetry,
        stop=stop.is_set,
        between_steps=partial(_obey, recorder=recorder, stop=stop),
        set_total_steps=recorder.expect,
        warn=recorder.note,
    )
    return fit(spec, OBJECTIVES[kind](spec, context), train=examples.train, held_out=examples.held_out, context=context)


def _obey(step: int, checkpoint: Callable[[], None], *, recorder: Recorder, stop: threading.Event) -> None:
    """Write the checkpoint that somebody asked for; pause if somebody asked for that, until somebody resumes or stops
    the run."""
    control = recorder.control
    if control.poll():
        checkpoint()
        if control.take_waiting():
            with span(recorder, MonotonicClock(), PAUSED, step=step):
                while control.paused and not stop.wait(POLL_S):  # no deadline: a person or trainer.hours ends it
                    recorder.beat()
                    control.poll()


def _merged_model(checkpoint: Path, run: RunDirectory, progress: Callable[[str], None]) -> Path:
    """The checkpoint itself, or for an adapter the merged model in `MERGED`, which appears whole or not at all."""
    if not holds_adapter(checkpoint):
        return checkpoint
    target, partial = run.path / MERGED, run.path / f".{MERGED}.partial"
    for leftover in (target, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    export_merged(checkpoint, partial, resolve_base=lambda model: resolve(model, progress=progress))
    copy_head(checkpoint, partial)
    seal(partial, step=read_manifest(checkpoint).step, score=None)
    return partial.rename(target)
