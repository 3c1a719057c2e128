"""RL training on the chosen runtime, and the run directory that it shares with supervised training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, contextmanager, suppress
from typing import Any, TextIO, TypeAlias

from tidemill.agents.run_agent import agent_limits, open_environments
from tidemill.config.issues import (
    default_task_remark,
    refuse_untrainable,
    refuse_without_task,
    shown_value,
    without_effect,
)
from tidemill.config.keys import belongs_to, differ_in_resumable_keys, resumable_keys
from tidemill.config.load import differences, from_toml
from tidemill.config.pipeline import StageKind, subject
from tidemill.config.schema import RunSpec
from tidemill.config.telemetry import TelemetryConfig
from tidemill.config.toml import to_toml
from tidemill.controller.fleet import Fleet
from tidemill.controller.frozen_scoring import FrozenScoring
from tidemill.controller.ledger import Ledger
from tidemill.controller.live_view import under_way
from tidemill.controller.loop import LoopResult, train_loop
from tidemill.controller.rollout_context import RolloutContext
from tidemill.controller.run import TrainingRun
from tidemill.controller.samples import TokenObserver
from tidemill.core.errors import GuardStop, RollBack, UserError, describe_error, root_error
from tidemill.core.folders import another_directory
from tidemill.core.packages import install_command
from tidemill.core.protocols import Environments, LoopClock, PromptSource
from tidemill.core.records import Trajectory
from tidemill.data.curriculum import Curriculum
from tidemill.data.prompts import Task
from tidemill.gateway.sessions import Sessions
from tidemill.jobs.callbacks import Callback, CallbackTelemetry, configured_callbacks
from tidemill.jobs.guarding import open_guard
from tidemill.jobs.journal import SqliteJournal
from tidemill.jobs.placed_run import placed_run
from tidemill.jobs.rollback import amended, amendments, check_amendment, roll_back
from tidemill.jobs.sandbox_check import check_needed_sandbox
from tidemill.jobs.stopping import StopRequest
from tidemill.models.model_source import exact_models, locate
from tidemill.runtime.backend import OpenBackend, RuntimeBackend, fleet_of
from tidemill.runtime.extension_checks import identities, refuse_changed, run_extensions
from tidemill.runtime.memory_check import check_memory, known_models
from tidemill.runtime.runtimes import runtime_of
from tidemill.scoring.row_report import report_rows
from tidemill.telemetry.events import DATA, ENVIRONMENT_WARNING
from tidemill.telemetry.jsonl import read_lines
from tidemill.telemetry.live_state import MIN_INTERVAL_S
from tidemill.telemetry.manifest import Forecast, build_manifest, write_forecast
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.report import report_at_the_end
from tidemill.telemetry.run_dir import CURRICULUM, PROMPTS, PromptFormat, RunDirectory

SHOWN_CHANGES = 6
MODEL_DIGEST, TASK_DIGEST, DATA_DIGEST, THREADS = "model_digest", "task_digest", "data_digest", "threads"
EXTENSIONS, EVAL_DIGESTS, SCHEDULE_STEPS, KIND = "extensions", "eval_digests", "schedule_steps", "kind"
MICROBATCH_TOKENS = "microbatch_tokens"
"""Keys of the manifest: initial weights, prompts or examples, threads, the identities of user functions, the prompts of
evaluation sets, the length of the learning-rate schedule, and the tokens of a microbatch, stored just before a run's
first step; and the kind of stage, from the start."""
STARTED_WITH = (
    *(MODEL_DIGEST, TASK_DIGEST, DATA_DIGEST, THREADS, EXTENSIONS, EVAL_DIGESTS, SCHEDULE_STEPS, MICROBATCH_TOKENS),
)
RESTARTS = "restarts"
"""Key of the manifest: the next session starts from the first step, with whatever is correct by then."""

ForecastRun: TypeAlias = Callable[[RunSpec], Forecast | None]
"""Predicts duration and cost of a run; None when no profile fits it."""


def train(
    spec: RunSpec,
    *,
    telemetry_stream: TextIO | None = None,
    open_backend: OpenBackend | None = None,
    forecast_run: ForecastRun | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
    refuse_default_task: bool = False,
) -> dict[str, Any]:
    """Run or resume RL training until it finishes or is asked to stop (Ctrl-C, SIGTERM, a callback).

    Args:
        stop: another way to stop the run.
        refuse_default_task: there was no recipe, so that the default task would be a surprise.
        callbacks: see `jobs.callbacks`.
        open_backend: replaces the backend of `spec.runtime`.
        forecast_run: called once for a new run; the forecast is stored in the run directory. An error is only logged.

    Returns:
        The contents of summary.json, plus `run_dir`, `already_finished`, and `time_is_up` (of trainer.hours).

    Raises:
        UserError: the input, the run directory or the disk is at fault; no finished work is lost.
        DeadlineError: a wait timed out.
    """
    if refuse_default_task:
        refuse_without_task(spec, "tidemill train")
    refuse_untrainable(spec)
    remarks = list[str]()
    check_memory(spec, "rl", note=remarks.append)
    spec, placed = placed_run(spec, known_models(spec, None, fetch=True))
    remarks += placed
    runtime = runtime_of(spec)
    runtime.check(spec)
    check_needed_sandbox(spec)
    check_amendment(spec)
    own_code, stop = identities(run_extensions(spec)), stop or StopRequest()
    opened = run_session(spec, telemetry_stream, planned_steps=lambda planned: planned.policy_steps)
    with stop.after_hours(spec.trainer.hours), opened as (resumed, run, recorder):
        recorder.control.attach(stop.request)
        schedule_remark = resumed.optimizer.schedule_remark(spec.policy_steps)
        for remark in (default_task_remark(spec), *remarks, *without_effect(spec), schedule_remark):
            if remark:
                recorder.note(remark)
        if forecast_run is not None and run.past.count == 0:
            _write_forecast(spec, run, recorder, forecast_run)
        while True:
            made = amendments(run)
            life = _train(
                amended(resumed, made[-1]) if made else resumed,
                run,
                recorder,
                open_backend or runtime.open,
                own_code=own_code,
                callbacks=callbacks,
                stop_request=stop,
                rollbacks=len(made),
            )
            try:
                result = asyncio.run(life)
                break
            except (RollBack, ExceptionGroup) as error:
                if not isinstance(root := root_error(error), RollBack):
                    raise
                ahead = spec.prompts_ahead_of(root.step)
                roll_back(run, recorder, target=root.step, amend=spec.guard.amend, ahead=ahead)
        if result.already_finished:
            recorder.note(f"the run has already finished its {result.steps} steps; raise trainer.steps to continue it")
        summary = recorder.finish("interrupted" if result.interrupted else "finished")
    ended = {"already_finished": result.already_finished, "time_is_up": stop.time_is_up}
    return summary | {"run_dir": str(spec.directory)} | ended


@contextmanager
def run_session(
    spec: RunSpec, stream: TextIO | None, *, planned_steps: Callable[[RunSpec], int], kind: StageKind = "rl"
) -> Iterator[tuple[RunSpec, RunDirectory, Recorder]]:
    """Open the run directory and start a session in it; write the report when the block ends, even on an error.

    Args:
        planned_steps: optimizer steps that a configuration plans; 0 if they also depend on the data.
        kind: of training.

    Yields:
        The configuration with the thread count, the microbatches and the learning-rate schedule of the run's first
        session and the checkpoints of the runs that it names, the run directory, the recorder.

    Raises:
        UserError: the directory holds a run with another configuration or of another kind, is locked, or cannot be
            written.
    """
    with RunDirectory.open(spec.directory) as run:
        refuse_other_kind(run, kind)
        if RESTARTS in run.read_manifest():
            run.clear()
            run.write_manifest({key: value for key, value in run.read_manifest().items() if key != RESTARTS})
        spec = exact_models(spec, run.read_settings())
        earlier = check_same_config(run, spec)
        run.write_config(to_toml(spec))
        manifest = build_manifest(
            run.read_manifest(), run=spec.run.name, model=subject(kind, spec), seed=spec.run.seed, unix_s=time.time()
        )
        run.write_manifest(manifest | {KIND: kind})
        # Another thread count may round sums differently, so a resumed run keeps the one it measured first.
        trainer = spec.trainer.model_copy(update={"threads": spec.trainer.threads or int(manifest.get(THREADS, 0))})
        # So may another sum of microbatches, whose size the first session may have chosen by its GPU.
        tokens = spec.batch.microbatch_tokens or int(manifest.get(MICROBATCH_TOKENS, 0))
        batch = spec.batch.model_copy(update={"microbatch_tokens": tokens})
        # A run of an older version has not stored its schedule, which was that of its newest session.
        known_steps = spec.optimizer.schedule_steps or int(manifest.get(SCHEDULE_STEPS, 0))
        schedule_steps = known_steps or planned_steps(earlier or spec)
        optimizer = spec.optimizer.model_copy(update={"schedule_steps": schedule_steps})
        with (
            _restartable(run),
            report_at_the_end(run.path),
            Recorder(run, spec, stream=stream) as recorder,
            metrics_endpoint(spec.telemetry, recorder),
        ):
            resumed = {"trainer": trainer, "batch": batch, "optimizer": optimizer}
            yield spec.model_copy(update=resumed), run, recorder


@contextmanager
def metrics_endpoint(config: TelemetryConfig, recorder: Recorder) -> Iterator[None]:
    """Serve the run's newest figures while the block runs, if `telemetry.port` is set. A failure never ends the run."""
    with ExitStack() as stack:
        try:
            if config.port is not None:
                from tidemill.dashboard.serve import BackgroundServer, run_metrics

                server = BackgroundServer(run_metrics(recorder.run.path, config))
                stack.callback(server.close)
                recorder.note(f"metrics for Prometheus: {server.url}")
        except ImportError as error:
            recorder.sink_failed("telemetry.port", f"{error}; {install_command('watch')}")
        except Exception as error:  # noqa: BLE001 - the port is taken, most likely
            recorder.sink_failed("telemetry.port", describe_error(error))
        yield


@contextmanager
def _restartable(run: RunDirectory) -> Iterator[None]:
    """Start the run again after a mistake in the input that left the initial weights unchanged."""
    try:
        yield
    except BaseException as error:
        manifest = run.read_manifest()
        steps = [line for _, line in read_lines(run.metrics) if line.get("step")]
        unchanged = not steps or steps[-1].get("weights_digest") == manifest.get(MODEL_DIGEST)
        if unchanged and isinstance(root_error(error), UserError | GuardStop):
            kept = {key: value for key, value in manifest.items() if key not in STARTED_WITH}
            with suppress(UserError):  # the disk is full
                run.write_manifest(kept | {RESTARTS: True})
        raise


def refuse_other_kind(run: RunDirectory, kind: StageKind) -> None:
    """Refuse a directory in which a stage of another kind has begun. (Older versions did not store the kind.)

    Raises:
        UserError: it has.
    """
    manifest = run.read_manifest()
    if MODEL_DIGEST in manifest and manifest.get(KIND, kind) != kind:
        what = f"this directory holds a run of kind {manifest[KIND]}, and this one is of kind {kind}"
        raise UserError(what, where=str(run.path), hint=another_directory(run.path))


def check_same_config(run: RunDirectory, spec: RunSpec) -> RunSpec | None:
    """Refuse to resume with another configuration. Until a run has begun its configuration may be corrected.

    Returns:
        The configuration of the run's newest session; None before the first step.

    Raises:
        UserError: naming the first keys that differ.
    """
    stored = run.read_config()
    if stored is None or MODEL_DIGEST not in run.read_manifest():
        return None
    earlier = from_toml(stored, source=str(run.config))
    changed = [
        f"{key} = {shown_value(new)}, the run has {shown_value(old)}"
        for key, old, new in differences(earlier, spec)
        if not belongs_to(key, resumable_keys()) and not differ_in_resumable_keys(key, old, new)
    ]
    if changed:
        more = len(changed) - SHOWN_CHANGES
        shown = changed[:SHOWN_CHANGES] + ([f"and {more} more"] if more > 0 else [])
        raise UserError(
            "this run was started with another configuration: " + "; ".join(shown),
            where=str(run.path),
            hint=f"resume with the configuration in its config.toml, or {another_directory(run.path)}",
        )
    return earlier


def record_start(
    run: RunDirectory,
    *,
    model_digest: str,
    data_key: str,
    data_digest: str,
    data_changed: UserError,
    threads: int,
    schedule_steps: int,
    microbatch_tokens: int = 0,
    prompts: PromptFormat | None = None,
    own_code: Mapping[str, str] | None = None,
    eval_sets: Mapping[str, str] | None = None,
) -> None:
    """Store what a new run starts from; refuse to resume a run whose initial model or data has changed.

    Args:
        data_key: `TASK_DIGEST` or `DATA_DIGEST`.
        data_changed: raised when the stored data digest differs.
        schedule_steps: length of the learning-rate schedule; 0 if the data determine it.
        microbatch_tokens: `batch.microbatch_tokens`, or what was chosen for 0; 0 if the run does not use it.
        prompts: how the run formats prompts; None if it has none.
        own_code: identities of the user functions.
        eval_sets: digests of the prompts of `eval.sets`, by name. A resumed run may add sets.

    Raises:
        UserError: the model or an evaluation set has changed, or `data_changed`.
    """
    manifest = run.read_manifest()
    if manifest.setdefault(MODEL_DIGEST, model_digest) != model_digest:
        raise UserError(
            "the model has changed since this run started",
            where="model.source",
            hint=f"restore the previous weights, or {another_directory(run.path)}",
        )
    if manifest.setdefault(data_key, data_digest) != data_digest:
        raise data_changed
    if own_code is not None:
        refuse_changed(manifest.setdefault(EXTENSIONS, dict(own_code)), own_code, where=str(run.path))
    for name, digest in (eval_sets or {}).items():
        if manifest.setdefault(EVAL_DIGESTS, {}).setdefault(name, digest) != digest:
            raise UserError(
                "the prompts of this set have changed since the run first evaluated it",
                where=f"eval.sets, {name}",
                hint="restore the previous data, or give the set another name",
            )
    manifest.setdefault(THREADS, threads)
    if microbatch_tokens:
        manifest.setdefault(MICROBATCH_TOKENS, microbatch_tokens)
    if prompts is not None:
        manifest[PROMPTS] = prompts
    if schedule_steps:
        manifest[SCHEDULE_STEPS] = schedule_steps
    run.write_manifest(manifest)


def _prompt_format(spec: RunSpec, task: Task) -> PromptFormat:
    """Rows of messages use the chat template whatever the configuration says; an agent's prompts do not."""
    of_messages = not spec.env.enabled and any(prompt.messages for prompt in task.source.held_out(1))
    chat = spec.model.chat_template or of_messages
    return PromptFormat(chat=chat, system_prompt=str(getattr(spec.task, "system_prompt", "")))


async def keep_live(recorder: Recorder) -> None:
    """Keep live.json fresh while the loop waits: for the trainer, rewards, machines, an evaluation, a person."""
    while True:
        with suppress(UserError):  # the disk is full: the loop raises it, too
            recorder.beat()
        await asyncio.sleep(MIN_INTERVAL_S / 2)


def _write_forecast(spec: RunSpec, run: RunDirectory, recorder: Recorder, forecast_run: ForecastRun) -> None:
    try:
        forecast = forecast_run(spec)
        if forecast is not None:
            write_forecast(run.path, forecast)
            for line in filter(None, (forecast.sentence, forecast.caveats)):
                recorder.note(line)
    except Exception as error:  # noqa: BLE001 - a run does not depend on its forecast
        recorder.note(f"no forecast: {describe_error(error)}")


def open_sessions(
    spec: RunSpec, backend: RuntimeBackend, run: RunDirectory, recorder: Recorder, fleet: Fleet
) -> AbstractAsyncContextManager[tuple[Sessions, TokenObserver]]:
    """The sessions of clients. Raises UserError: the extra `gateway` is not installed."""
    try:
        from tidemill.jobs.gateway import training_sessions
    except ImportError as error:
        what = f"sessions need starlette and uvicorn ({error})"
        raise UserError(what, where="gateway.sessions", hint=install_command("gateway")) from error
    return training_sessions(spec, backend, run, recorder, fleet)


async def _train(
    spec: RunSpec,
    run: RunDirectory,
    recorder: Recorder,
    open_backend: OpenBackend,
    *,
    own_code: dict[str, str],
    callbacks: Sequence[Callback],
    stop_request: StopRequest,
    rollbacks: int,
) -> LoopResult:
    """Everything started here is stopped in reverse order when the loop ends or fails."""
    clock = LoopClock()
    async with AsyncExitStack() as stack:
        stack.callback(asyncio.create_task(keep_live(recorder), name="live.json").cancel)
        backend = await stack.enter_async_context(open_backend(spec, run, recorder, clock))
        recorder.use_decoder(backend.codec.decode)
        prompts = _prompt_format(spec, backend.task)
        if locate(spec.model.source).prompts.chat and not prompts.chat:
            recorder.note(
                "warning: the model was trained with its chat template, and the prompts of this run are plain text; "
                "with model.chat_template = true they are messages"
            )
        journal = await SqliteJournal.open(run.ledger)
        stack.push_async_callback(journal.close)
        record_start(
            run,
            model_digest=backend.trainer.version.digest,
            data_key=TASK_DIGEST,
            data_digest=backend.task.digest,
            data_changed=UserError(
                "the task's prompts have changed since this run started",
                where="task",
                hint="restore the previous data (some reasoning-gym generators need a fixed PYTHONHASHSEED), "
                f"or {another_directory(run.path)}",
            ),
            threads=backend.threads,
            schedule_steps=spec.optimizer.schedule_steps,
            microbatch_tokens=backend.device_info.get(MICROBATCH_TOKENS, 0),
            prompts=prompts,
            own_code=own_code,
            eval_sets={name: found.digest for name, found in backend.task.eval_sets.items()},
        )
        if rows := report_rows(spec, backend.task):
            recorder.event(DATA, **rows)
        recorder.event("machine", **backend.device_info)
        fleet = fleet_of(spec, backend, recorder, clock, needs_logprobs=spec.algorithm.needs_rollout_logprobs)
        await stack.enter_async_context(fleet)
        frozen = backend.frozen
        frozen_scoring: FrozenScoring | None = None
        if frozen.all:
            frozen_scoring = FrozenScoring(
                frozen.all,
                reference=frozen.reference,
                chunk_tokens=spec.reading.chunk_tokens,
                ahead=spec.reading.ahead,
            )
        environments: Environments | None
        sessions: Sessions | None = None
        observers: tuple[TokenObserver, ...] = ()
        if spec.gateway.sessions:
            sessions, feed = await stack.enter_async_context(open_sessions(spec, backend, run, recorder, fleet))
            environments = sessions
            observers = (feed,)
        else:
            environments = await stack.enter_async_context(
                open_environments(
                    spec,
                    backend.codec,
                    backend.task,
                    run_id=run.read_manifest()["run_id"],
                    report=lambda reason: recorder.event(ENVIRONMENT_WARNING, reason=reason),
                )
            )
        guard = await stack.enter_async_context(open_guard(spec, backend, run, recorder, rollbacks=rollbacks))
        source: PromptSource = backend.task.source
        observe: Callable[[int, Sequence[Trajectory]], None] | None = None
        if spec.batch.sampler:
            source = curriculum = Curriculum(
                backend.task.source,
                spec.batch.sampler,
                count=spec.batch.prompts,
                seed=spec.run.seed,
                lag=spec.prompts_ahead,
                store=run.path / CURRICULUM,
            )
            stack.callback(curriculum.close)
            observe = curriculum.observe
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def request_stop(reason: str = "again to stop at once") -> None:
            recorder.note(f"stopping: the last finished step is being checkpointed ({reason})")
            stop.set()

        signalled = stop_request.on_signals(lambda: loop.call_soon_threadsafe(request_stop))
        with signalled, stop_request.bound(lambda reason: loop.call_soon_threadsafe(request_stop, reason)):
            rollout = RolloutContext(
                fleet=fleet,
                ledger=Ledger(journal, round_size=spec.round_groups),
                scorer=backend.scorer,
                codec=backend.codec,
                telemetry=CallbackTelemetry(recorder, [*callbacks, *configured_callbacks(spec)], request_stop, observe),
                clock=clock,
                stop=stop,
                truncated=spec.scoring.truncated,
                frozen_scoring=frozen_scoring,
                observers=observers,
                environments=environments,
                agent=agent_limits(spec, backend.context_tokens),
            )
            training = TrainingRun(
                spec=spec,
                rollout=rollout,
                source=source,
                trainer=backend.trainer,
                eval_scorer=backend.eval_scorer,
                checkpoints=backend.checkpoints,
                eval_sets=backend.task.eval_prompts,
                stop_strings=backend.task.default_stop_strings,
                guard=guard,
                rollbacks=rollbacks,
                control=recorder.control,
            )
            recorder.under_way = lambda: under_way(training)
            result = await train_loop(training)
        if sessions is not None and not result.interrupted:
            sessions.finish()
        return result
