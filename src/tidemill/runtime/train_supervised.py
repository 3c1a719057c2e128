"""Supervised stages in one process: the run directory, the model, the examples, and the loop of `trainer.fitting`."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.core.errors import UserError
from tidemill.envs.text.examples import Examples, load_demonstrations, load_pairs
from tidemill.models.catalog import resolve
from tidemill.models.checkpoint_manifest import read_manifest, seal
from tidemill.models.folder import holds_adapter
from tidemill.models.loading import context_limit, weights_digest
from tidemill.models.reward_model import copy_head
from tidemill.models.saving import export_merged
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.runtime.train import DATA_DIGEST, THREADS, check_same_model, check_same_run, with_threads
from tidemill.telemetry.manifest import build_manifest
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.report import report_at_the_end
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.objectives import PreferenceObjective, RewardObjective, SupervisedObjective
from tidemill.trainer.supervised_loop import FitContext, FitResult, Objective, fit

SupervisedKind: TypeAlias = Literal["sft", "reward_model", "dpo"]

MERGED = "model"  # in the run directory: what an adapter and its base amount to

LOADERS: dict[SupervisedKind, Callable[..., Examples[Any]]] = {
    "sft": load_demonstrations,
    "reward_model": load_pairs,
    "dpo": load_pairs,
}
OBJECTIVES: dict[SupervisedKind, Callable[[RunSpec, FitContext], Objective[Any]]] = {
    "sft": SupervisedObjective,
    "reward_model": RewardObjective,
    "dpo": PreferenceObjective,
}


def train_supervised(spec: RunSpec, kind: SupervisedKind, *, telemetry_stream: TextIO | None = None) -> dict[str, Any]:
    """Run or resume a supervised stage in `spec.directory`, until done or asked to stop (Ctrl-C, SIGTERM).

    Returns:
        The summary; `model` is the folder that came of it, a plain model (and head) even where an adapter was trained
        (None of a stage that was stopped), and `held_out` its figures on held-out examples.

    Raises:
        UserError: a fault of the input, the run directory or the disk; nothing checkpointed is lost.
    """
    with RunDirectory.open(spec.directory) as run:
        check_same_run(run, spec)
        run.write_config(to_toml(spec))
        manifest = build_manifest(
            run.read_manifest(), run=spec.run.name, model=spec.model.source, seed=spec.run.seed, unix_s=time.time()
        )
        run.write_manifest(manifest)
        with report_at_the_end(run.path):
            with Recorder(run, spec, stream=telemetry_stream) as recorder, _stop_on_signals() as stop:
                result = _train(with_threads(spec, manifest), kind, run, recorder, stop)
                if result.already_finished:
                    recorder.note(f"this stage had already finished its {result.steps} steps")
                if result.interrupted:
                    recorder.note(
                        f"stopped after step {result.steps}, which is checkpointed; the same command resumes it"
                    )
                model = _plain(result.model, run, recorder.note) if result.model and not result.interrupted else None
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
    spec: RunSpec, kind: SupervisedKind, run: RunDirectory, recorder: Recorder, stop: threading.Event
) -> FitResult:
    bundle = load_model_bundle(spec, progress=recorder.note)
    examples = LOADERS[kind](
        spec.data,
        codec=bundle.codec,
        context_limit=context_limit(bundle.model),
        chat_template=spec.model.chat_template,
    )
    _check_same_beginning(run, bundle, examples)
    recorder.event("machine", device=str(bundle.device), threads=bundle.threads, autocast=str(bundle.autocast))
    recorder.note(f"{len(examples.train)} examples to learn from, {len(examples.held_out)} held out")
    context = FitContext(
        model=bundle.model,
        source=bundle.folder,
        directory=run.path,
        checkpoints=CheckpointStore(
            run.checkpoints, keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        ),
        telemetry=recorder,
        autocast=bundle.autocast,
        stop=stop.is_set,
        expect=recorder.expect,
        warn=recorder.note,
    )
    return fit(spec, OBJECTIVES[kind](spec, context), train=examples.train, held_out=examples.held_out, context=context)


def _plain(checkpoint: Path, run: RunDirectory, progress: Callable[[str], None]) -> Path:
    """The folder itself, or where it holds an adapter a merged one beside the checkpoints, whole or absent."""
    if not holds_adapter(checkpoint):
        return checkpoint
    target, partial = run.path / MERGED, run.path / f".{MERGED}.partial"
    for leftover in (target, partial):
        shutil.rmtree(leftover, ignore_errors=True)
    export_merged(checkpoint, partial, resolve_base=lambda model: resolve(model, progress=progress))
    copy_head(checkpoint, partial)
    seal(partial, step=read_manifest(checkpoint).step, score=None)
    return partial.rename(target)


def _check_same_beginning(run: RunDirectory, bundle: ModelBundle, examples: Examples[Any]) -> None:
    """A resumed stage goes on with the weights and the examples it began with."""
    manifest = run.read_manifest()
    check_same_model(manifest, weights_digest(bundle.model))
    if manifest.setdefault(DATA_DIGEST, examples.digest) != examples.digest:
        raise UserError(
            "the examples have changed since this run began",
            where="data.path",
            hint="put the former file back, or choose another --run.dir",
        )
    manifest.setdefault(THREADS, bundle.threads)
    run.write_manifest(manifest)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM asks to end after the step that is running; a second one ends the process at once."""
    stop = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)} if main else {}

    def ask(number: int, frame: object) -> None:
        stop.set()  # nothing is told from here: the signal may have come in the middle of a line
        for one, handler in before.items():
            signal.signal(one, handler)

    for one in before:
        signal.signal(one, ask)
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
