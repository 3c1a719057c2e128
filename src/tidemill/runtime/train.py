"""`tidemill train`: the run directory, the journal, the fleet and the loop, on the chosen runtime."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TextIO, TypeAlias

from tidemill.config.issues import refuse_untrainable, without_effect
from tidemill.config.load import differences, from_toml
from tidemill.config.schema import RunSpec
from tidemill.config.toml import to_toml
from tidemill.controller.fleet import Fleet
from tidemill.controller.ledger import Ledger
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.reading import Reading
from tidemill.core.errors import UserError, describe_error
from tidemill.core.protocols import LoopClock
from tidemill.runtime.backend import OpenMachinery, RuntimeBackend, scorers
from tidemill.runtime.compute import check_devices
from tidemill.runtime.journal import SqliteJournal
from tidemill.runtime.local import in_process
from tidemill.runtime.model_bundle import check_vocabularies
from tidemill.runtime.readers import check_reward_models
from tidemill.telemetry.manifest import Forecast, build_manifest, write_forecast
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.report import report_at_the_end
from tidemill.telemetry.run_dir import RunDirectory

RESUMABLE = ("run.dir", "run.name", "trainer.steps", "trainer.threads", "engine.tick_s", "checkpoint.", "telemetry.",
             "eval.", "runtime", "pool.", "fleet.", "ray.", "placement.", "reading.", "simulation.",
             "scoring.concurrency", "scoring.timeout_s", "supervised.epochs")  # fmt: skip
"""Keys (or sections) that may differ when a run is resumed: the user's to change. (More steps stretch a falling
learning-rate schedule; other threads, or chunks of other sizes, may round differently.)"""
MODEL_DIGEST, TASK_DIGEST, DATA_DIGEST, THREADS = "model_digest", "task_digest", "data_digest", "threads"
"""In the manifest: the weights, the prompts or examples and the threads the run began with; noted just before its first
step."""


def check_same_run(run: RunDirectory, spec: RunSpec) -> None:
    """A run directory belongs to one configuration, once its run has begun: until then a mistake may be corrected.

    Raises:
        UserError: naming every key that differs.
    """
    stored = run.read_config()
    if stored is None or MODEL_DIGEST not in run.read_manifest():
        return
    changed = [
        f"{key} = {new!r}, the run has {old!r}"
        for key, old, new in differences(from_toml(stored, source=str(run.config)), spec)
        if not key.startswith(RESUMABLE)
    ]
    if changed:
        raise UserError(
            "this run was started with another configuration: " + "; ".join(changed),
            where=str(run.path),
            hint="resume with the configuration in its config.toml, or choose another --run.dir",
        )


def with_threads(spec: RunSpec, manifest: dict[str, Any]) -> RunSpec:
    """A resumed run keeps the number of threads it measured at its beginning: another may round sums differently."""
    threads = spec.trainer.threads or int(manifest.get(THREADS, 0))
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"threads": threads})})


def check_same_model(manifest: dict[str, Any], digest: str) -> None:
    """Raises UserError: the weights are not those the run began with. Notes them when it begins now."""
    if manifest.setdefault(MODEL_DIGEST, digest) != digest:
        raise UserError(
            "the model has changed since this run began",
            where="model.source",
            hint="put the former weights back, or choose another --run.dir",
        )


Foretell: TypeAlias = Callable[[RunSpec], Forecast | None]
"""None where nothing is known of such a run."""


def train(
    spec: RunSpec,
    *,
    telemetry_stream: TextIO | None = None,
    open_backend: OpenMachinery | None = None,
    foretell: Foretell | None = None,
) -> dict[str, Any]:
    """Run or resume, until done or asked to stop (Ctrl-C, SIGTERM); returns the summary.

    Args:
        foretell: what a new run is expected to take, kept in its directory; whatever it raises is only told.
        open_backend: instead of what `spec.runtime` names, for whoever puts something between the bundle.

    Raises:
        UserError: a fault of the input, the run directory or the disk; nothing finished is lost.
        DeadlineError: something awaited did not come.
    """
    refuse_untrainable(spec)
    check_devices(spec)
    check_vocabularies(spec)
    with RunDirectory.open(spec.directory) as run:
        check_same_run(run, spec)
        run.write_config(to_toml(spec))
        manifest = build_manifest(
            run.read_manifest(),
            run=spec.run.name,
            model=spec.model.source,
            seed=spec.run.seed,
            unix_s=time.time(),
        )
        run.write_manifest(manifest)
        with report_at_the_end(run.path), Recorder(run, spec, stream=telemetry_stream) as recorder:
            for idle in without_effect(spec):
                recorder.note(idle)
            check_reward_models(spec, progress=recorder.note)
            if foretell is not None and run.past.count == 0:
                _keep_forecast(spec, run, recorder, foretell)
            result = asyncio.run(_train(with_threads(spec, manifest), run, recorder, open_backend or _runtime(spec)))
            if result.already_finished:
                recorder.note(f"this run had already finished its {result.steps} steps; raise trainer.steps to go on")
            summary = recorder.finish("interrupted" if result.interrupted else "finished")
    return summary | {"run_dir": str(spec.directory), "already_finished": result.already_finished}


def _keep_forecast(spec: RunSpec, run: RunDirectory, recorder: Recorder, foretell: Foretell) -> None:
    try:
        forecast = foretell(spec)
        if forecast is not None:
            write_forecast(run.path, forecast)
            for line in filter(None, (forecast.sentence, forecast.caution)):
                recorder.note(line)
    except Exception as error:  # noqa: BLE001 - a forecast is only a courtesy
        recorder.note(f"no forecast: {describe_error(error)}")


async def _train(spec: RunSpec, run: RunDirectory, recorder: Recorder, open_backend: OpenMachinery) -> LoopResult:
    """Everything started here is stopped here, in reverse order, whatever happens."""
    clock = LoopClock()
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(open_backend(spec, run, recorder, clock))
        recorder.use_decoder(backend.codec.decode)
        journal = await SqliteJournal.open(run.ledger)
        stack.push_async_callback(journal.close)
        scorer, eval_scorer = scorers(spec, backend.task, backend.compute, backend.readers)
        stack.push_async_callback(scorer.close)
        stack.push_async_callback(eval_scorer.close)
        _check_same_beginning(run, backend)  # now the run has begun
        recorder.event("machine", **backend.about)
        fleet = Fleet(
            backend.local,
            slots=spec.engine.slots,
            clock=clock,
            telemetry=recorder,
            config=spec.fleet,
            provider=backend.provider,
            host=backend.host,
            publisher=backend.publisher,
            needs_logprobs=spec.algorithm.needs_rollout_logprobs,
            heartbeat_timeout_s=backend.heartbeat_timeout_s,
        )
        await stack.enter_async_context(fleet)
        with _stop_on_signals(recorder) as stop:
            return await train_loop(
                spec=spec,
                source=backend.task.source,
                fleet=fleet,
                trainer=backend.trainer,
                scorer=scorer,
                eval_scorer=eval_scorer,
                ledger=Ledger(journal, round_size=spec.batch.prompts),
                checkpoints=backend.checkpoints,
                telemetry=recorder,
                codec=backend.codec,
                clock=clock,
                stop=stop,
                stop_strings=backend.task.default_stop_strings,
                reading=_reading(spec, backend),
            )


def _reading(spec: RunSpec, backend: RuntimeBackend) -> Reading | None:
    """None where no model reads sample by sample."""
    readers, config = backend.readers, spec.reading
    if not readers.all:
        return None
    return Reading(readers.all, reference=readers.reference, chunk_tokens=config.chunk_tokens, ahead=config.ahead)


def _runtime(spec: RunSpec) -> OpenMachinery:
    if spec.runtime == "inprocess":
        return in_process
    from tidemill.runtime.cluster.ray_backend import on_ray

    return on_ray


def _check_same_beginning(run: RunDirectory, backend: RuntimeBackend) -> None:
    """A resumed run applies its batches to the weights it began with; its samples answer the prompts it began with."""
    manifest, model, task = run.read_manifest(), backend.trainer.version.digest, backend.task.digest
    check_same_model(manifest, model)
    if manifest.setdefault(TASK_DIGEST, task) != task:
        raise UserError(
            "the task's prompts have changed since this run began",
            where="task",
            hint="put the former data back (some reasoning-gym generators need a fixed PYTHONHASHSEED), "
            "or choose another --run.dir",
        )
    manifest.setdefault(THREADS, backend.threads)
    run.write_manifest(manifest)


@contextmanager
def _stop_on_signals(recorder: Recorder) -> Iterator[asyncio.Event]:
    """The first Ctrl-C or SIGTERM asks the loop to end with a checkpoint; a second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    caught = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def ask() -> None:
        recorder.note("stopping: the last finished step is being checkpointed (again to stop at once)")
        stop.set()
        for one in caught:
            loop.remove_signal_handler(one)

    for one in caught:
        loop.add_signal_handler(one, ask)
    try:
        yield stop
    finally:
        for one in caught:
            loop.remove_signal_handler(one)
