"""Training control policies: PPO on chunks of simulation.

```
 publish weights ─▶ request the chunks of all shards ─▶ answers ─▶ update ─▶ metrics ─▶ checkpoint (if due)
        ▲                                                                                    │
        └────────────────────────────────────────────────────────────────────────────────────┘
```
Iteration k uses version k; with control.max_policy_lag = 1 always version k - 1, so that its chunks are computed while
iteration k - 1 is trained on, and results do not depend on timing. A checkpoint holds the state of every shard: a
killed run computes the chunks in flight again, with the same bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import msgspec
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from tidemill.config.pipeline import StageKind
from tidemill.config.schema import RunSpec
from tidemill.core.chunks import ChunkAnswer, ChunkKey, ChunkRequest, Chunks
from tidemill.core.errors import GuardStop, UserError
from tidemill.core.folders import another_directory
from tidemill.core.formatting import percent
from tidemill.core.guards import UpdateGuard
from tidemill.core.protocols import LoopClock, Telemetry
from tidemill.core.records import PolicyVersion, StepMetrics
from tidemill.jobs.callbacks import Callback, CallbackTelemetry, configured_callbacks
from tidemill.jobs.stopping import StopRequest
from tidemill.jobs.train import TASK_DIGEST, keep_live, record_start, run_session
from tidemill.models.actor import arrays_of, load_arrays
from tidemill.robots.engine import check_model, model_digest
from tidemill.robots.episodes import PlayedEpisodes, ended_episodes, play_episodes
from tidemill.robots.playback import record_episodes
from tidemill.robots.policy_arrays import Weights, pack, unpack
from tidemill.robots.policy_folder import ACTORS, PolicyDescription, write_policy
from tidemill.robots.setup import SimulationSetup, describe, setup_of, task_of, undisturbed
from tidemill.robots.simulation import State
from tidemill.robots.tasks import open_task
from tidemill.robots.training_episodes import TrainingEpisodes
from tidemill.runtime.backend import checkpoint_store
from tidemill.runtime.compute import ComputeThread, set_threads
from tidemill.runtime.extension_checks import identities, run_extensions
from tidemill.runtime.simulators import open_chunks
from tidemill.telemetry import metrics
from tidemill.telemetry.control import POLL_S
from tidemill.telemetry.events import (
    ALREADY_FINISHED,
    CHECKPOINT,
    MACHINE,
    PAUSED,
    ROBOT_EVALUATION,
    ROLLOUT,
    TRAINING,
    read_events,
    span,
)
from tidemill.telemetry.recorder import Recorder
from tidemill.telemetry.run_dir import RunDirectory
from tidemill.telemetry.statistics import wilson_interval
from tidemill.trainer.checkpoint import restore_state, save_state, state_bytes
from tidemill.trainer.control import ControlLearner, ControlNetworks, Learner

CRITICS, SHARDS, OLDER = "critics.safetensors", "shards.safetensors", "older_policy.safetensors"
"""Files of a checkpoint: critics, the states of all shards, and at lag 1 the actors of the version before."""
INVALID_LIMIT = 0.01
"""Share of worlds whose physics may become non-finite in one iteration or evaluation."""
UNDISTURBED = 1
"""Number of the simulation without randomisation; 0 is the one that trains."""


def train_control(
    spec: RunSpec,
    *,
    telemetry_stream: TextIO | None = None,
    callbacks: Sequence[Callback] = (),
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train a control policy in `spec.directory` until it finishes or is asked to stop (Ctrl-C, SIGTERM, a callback).

    Returns:
        The summary. `policy` is the folder of the trained policy, `headline` and `figures` what it achieves.

    Raises:
        UserError: the input, the run directory or the disk is at fault; checkpointed iterations are kept.
        GuardStop: physics or gradients are not finite.
        DeadlineError: a wait timed out.
    """

    async def prepared(session: Session) -> Method:
        learner = ControlLearner(session.networks, session.spec.control, session.description, seed=spec.run.seed)
        return Method(learner=learner, setup=setup_of(session.spec))

    return train_policy(spec, "control", prepared, telemetry_stream=telemetry_stream, callbacks=callbacks, stop=stop)


Simulated: TypeAlias = tuple[list[ChunkAnswer], float]
"""Answers of all shards, in order, and the wall time of their computation in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a method of training starts from."""

    spec: RunSpec
    description: PolicyDescription
    networks: ControlNetworks
    run: RunDirectory
    recorder: Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How the stages `control` and `clone` differ."""

    learner: Learner
    setup: SimulationSetup  # in which the policy acts
    simulates: bool = True  # False: the learner has its own data
    deterministic: bool = False  # the policy acts with its mean


def train_policy(
    spec: RunSpec,
    kind: StageKind,
    prepare: Callable[[Session], Awaitable[Method]],
    *,
    telemetry_stream: TextIO | None,
    callbacks: Sequence[Callback],
    stop: StopRequest | None,
) -> dict[str, Any]:
    """The session of every stage that trains a policy; see `train_control`."""
    stop = stop or StopRequest()
    callbacks = [*callbacks, *configured_callbacks(spec)]
    opened = run_session(spec, telemetry_stream, planned_steps=lambda planned: planned.trainer.steps, kind=kind)
    with stop.after_hours(spec.trainer.hours), opened as (resumed, run, recorder):
        recorder.control.attach(stop.request)
        training = asyncio.run(_train(resumed, run, recorder, callbacks, stop, prepare))
        if training.already_finished:
            recorder.note(f"the run has already finished its {training.step} iterations; raise trainer.steps")
        interrupted = training.step < spec.trainer.steps
        summary = recorder.finish("interrupted" if interrupted else "finished")
        newest = training.checkpoints.latest().checkpoint
        summary |= {"kind": kind, "policy": str(newest.path) if newest else None}
        summary |= {"headline": headline(training.before, training.after, training.step), "figures": training.figures()}
        run.write_summary(summary)
    ended = {"already_finished": training.already_finished, "time_is_up": stop.time_is_up}
    return summary | {"run_dir": str(spec.directory)} | ended


async def _train(
    spec: RunSpec,
    run: RunDirectory,
    recorder: Recorder,
    callbacks: Sequence[Callback],
    stop_request: StopRequest,
    prepare: Callable[[Session], Awaitable[Method]],
) -> ControlTraining:
    """Everything started here is stopped in reverse order when the loop ends or fails."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    description = describe(spec)
    threads = set_threads(spec.trainer, torch.device("cpu"))
    networks = ControlNetworks(description, spec.control, seed=spec.run.seed)
    record_start(
        run,
        model_digest=digest_of(arrays_of(networks.actors)),
        data_key=TASK_DIGEST,
        data_digest=task_digest(spec),
        data_changed=UserError(
            "the task's model has changed since this run started",
            where="robot.task",
            hint=f"restore the previous file, or {another_directory(run.path)}",
        ),
        threads=threads,
        schedule_steps=0,
        own_code=identities(run_extensions(spec)),
    )
    remarks = getattr(task_of(spec.robot), "remarks", [])
    recorder.event(MACHINE, device="cpu", threads=threads, **({"remarks": remarks} if remarks else {}))
    for remark in remarks:
        recorder.note(remark)

    def request_stop(reason: str = "again to stop at once") -> None:
        recorder.note(f"stopping: the last finished iteration is being checkpointed ({reason})")
        stop.set()

    async with AsyncExitStack() as stack:
        stack.callback(asyncio.create_task(keep_live(recorder), name="live.json").cancel)
        compute = ComputeThread()
        stack.push_async_callback(compute.close)
        session = Session(spec=spec, description=description, networks=networks, run=run, recorder=recorder)
        method = await prepare(session)
        setups = [method.setup, undisturbed(method.setup)]
        chunks = await stack.enter_async_context(
            open_chunks(spec, setups, run=run, recorder=recorder, clock=LoopClock())
        )
        telemetry = CallbackTelemetry(recorder, callbacks, request_stop)
        training = ControlTraining(session, method, chunks=chunks, telemetry=telemetry, compute=compute, stop=stop)
        with (
            stop_request.on_signals(lambda: loop.call_soon_threadsafe(request_stop)),
            stop_request.bound(lambda reason: loop.call_soon_threadsafe(request_stop, reason)),
        ):
            await training.train()
        return training


class ControlTraining:
    """The state of a run.

    Args:
        chunks: computes those of the method's setup, and `UNDISTURBED`.
        stop: set to end the run after a checkpoint.
    """

    def __init__(
        self,
        session: Session,
        method: Method,
        *,
        chunks: Chunks,
        telemetry: Telemetry,
        compute: ComputeThread,
        stop: asyncio.Event,
    ) -> None:
        self.spec, self.run, self.recorder = session.spec, session.run, session.recorder
        self.description = session.description
        self.method, self.learner = method, method.learner
        self.chunks, self.telemetry, self.compute, self.stop = chunks, telemetry, compute, stop
        self.checkpoints, self.clock = checkpoint_store(session.spec, session.run.checkpoints), LoopClock()
        self.step = self.saved_step = 0  # iterations done, and the number of the present version
        self.already_finished = False
        self.shards: list[State] = []  # states after the iterations done; empty: they start
        self.weights: Weights = {}  # of the present version's actors
        self.older: Weights = {}  # of the version before
        self.in_flight: asyncio.Task[Simulated] | None = None  # chunks of the next iteration
        self.episodes = TrainingEpisodes(session.run.path)
        self.score: float | None = None  # mean training return of the newest iteration
        self.before: dict[str, Any] = {}  # fields of the evaluation before training
        self.after: dict[str, Any] = {}

    async def train(self) -> None:
        """Train until all iterations are done or a stop is requested; resumes from the newest checkpoint."""
        total, lag = self.spec.trainer.steps, self.spec.control.max_policy_lag
        await self._start()
        guard = UpdateGuard(total)
        stopping = asyncio.create_task(self.stop.wait())
        try:
            while self.step < total:
                await self._obey_requests()
                simulated = self.in_flight or self._request(self.step)
                await asyncio.wait({simulated, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self.stop.is_set():
                    break
                (answers, rollout_s), self.in_flight = await simulated, None
                self.shards = [unpack(answer.state) for answer in answers]
                if lag and self.step + 1 < total:
                    self.in_flight = self._request(self.step + 1)
                learned = await self._learn(answers, rollout_s)
                self.older, self.weights = self.weights, arrays_of(self.learner.networks.actors)
                self.step += 1
                await self._publish(self.step, self.weights)
                self.score = learned.get(metrics.RETURN_MEAN, self.score)
                taken = self.learner.steps_per_update - int(learned[metrics.UPDATES_SKIPPED])
                guard.check(self._log(learned, optimizer_steps=taken))
                every = self.spec.checkpoint.every_steps
                if every and self.step % every == 0 and self.step < total:
                    await self._checkpoint()
            if self.step == total:
                self.after = self._logged("after") or await self._evaluate("after")
            if self.saved_step < self.step:
                await self._checkpoint()
        finally:
            self.episodes.close()
            stopping.cancel()
            if self.in_flight:
                self.in_flight.cancel()

    async def _start(self) -> None:
        """Restore the newest checkpoint, publish its weights, and evaluate a new policy."""
        for finding in self.checkpoints.recover():
            self.recorder.note(finding)
        latest = self.checkpoints.latest()
        for name, reason in latest.skipped.items():
            self.recorder.note(f"skipped checkpoint {name}: {reason}")
        if latest.checkpoint is not None:
            self._restore(latest.checkpoint.path)
        self.telemetry.resume(self.step)
        self.episodes.resume(self.step)
        self.weights = arrays_of(self.learner.networks.actors)
        if self.older:
            await self._publish(self.step - 1, self.older)
        await self._publish(self.step, self.weights)
        self.already_finished = self.step >= self.spec.trainer.steps
        if self.already_finished:
            self.telemetry.event(ALREADY_FINISHED, steps=self.step)
        self.before = self._logged("before") or ({} if self.step else await self._evaluate("before"))
        if not self.step:
            self._log({}, optimizer_steps=0)

    # One iteration.

    def _request(self, iteration: int) -> asyncio.Task[Simulated]:
        """Request the chunks of an iteration, which start at the present states of the shards."""
        version = max(iteration - self.spec.control.max_policy_lag, 0)
        shards = self.spec.robot.shards if self.method.simulates else 0
        states = [pack(state) for state in self.shards] or [{}] * shards
        requests = [
            ChunkRequest(
                key=ChunkKey(seed=self.spec.run.seed, purpose="train", shard=shard, iteration=iteration),
                steps=self.spec.control.num_steps_per_env,
                state=state,
                deterministic=self.method.deterministic,
            )
            for shard, state in enumerate(states)
        ]

        async def simulated() -> Simulated:
            self.telemetry.progress(ROLLOUT, 0, len(requests))
            with span(self.telemetry, self.clock, ROLLOUT, step=iteration + 1) as fields:
                answers = await self.chunks.run(version, requests) if requests else []
            return answers, fields["duration_s"]

        return asyncio.create_task(simulated(), name=f"chunks of iteration {iteration + 1}")

    async def _learn(self, answers: Sequence[ChunkAnswer], rollout_s: float) -> dict[str, float]:
        """Update the networks; returns the metrics of the iteration."""
        lag = min(self.step, self.spec.control.max_policy_lag)
        experience = [unpack(answer.experience) for answer in answers]
        _check_physics(experience, f"iteration {self.step + 1}")

        def update() -> dict[str, float]:
            started_s = time.thread_time()
            values = self.learner.update(experience, self.step, lag=lag)
            return values | {metrics.TRAIN_CPU: time.thread_time() - started_s}

        with span(self.telemetry, self.clock, TRAINING, step=self.step + 1) as fields:
            values = await self.compute.run(update)
        values[metrics.TRAIN_TIME] = fields["duration_s"]
        if not answers:
            return values
        self.episodes.write(self.step + 1, experience)
        cpu_s = sum(answer.cpu_s for answer in answers)
        steps = self.spec.robot.worlds * self.spec.control.num_steps_per_env
        values |= {metrics.ROLLOUT_TIME: rollout_s, metrics.SIMULATION_CPU: cpu_s}
        values[metrics.STEPS_PER_CPU_S] = steps / max(cpu_s, 1e-9)
        return values | episode_values(experience) | self.chunks.take_figures()

    async def _publish(self, version: int, weights: Weights) -> None:
        await self.chunks.publish(PolicyVersion(number=version, digest=digest_of(weights)), pack(weights))

    def _log(self, values: dict[str, float], *, optimizer_steps: int) -> StepMetrics:
        version = PolicyVersion(number=self.step, digest=digest_of(self.weights))
        line = StepMetrics(step=self.step, version=version, optimizer_steps=optimizer_steps, values=values)
        self.telemetry.step(line)
        return line

    async def _obey_requests(self) -> None:
        """Write the checkpoint that somebody asked for; pause if somebody asked for that, until somebody resumes or
        stops the run."""
        control = self.recorder.control
        if control.poll():
            if self.saved_step < self.step:
                await self._checkpoint()
            if control.take_waiting():
                with span(self.recorder, self.clock, PAUSED, step=self.step):
                    while control.paused and not self.stop.is_set():  # no deadline: a person or trainer.hours ends it
                        control.poll()
                        await asyncio.sleep(POLL_S)

    # Evaluation.

    async def _evaluate(self, when: str) -> dict[str, Any]:
        """Play episodes with the present weights, without exploration and randomisation; returns their figures."""
        if not self.spec.control.eval_episodes:
            return {}
        with span(self.telemetry, self.clock, ROBOT_EVALUATION, when=when, step=self.step) as fields:
            played = await play_episodes(
                self.chunks,
                self.step,
                purpose="evaluation",
                seed=self.spec.run.seed,
                episodes=self.spec.control.eval_episodes,
                steps=task_of(self.spec.robot).steps_per_episode(),
                setup=UNDISTURBED,
                record=True,
            )
            fields |= evaluation_fields(played)
            _check_physics(played.chunks, f"the evaluation {when} training")
            if not self.spec.robot.environment:
                model = check_model(open_task(self.spec.robot.task), self.spec.robot.parameters)
                record_episodes(self.run.path, when, model, played, control_s=self.description.control_s)
        return fields

    def _logged(self, when: str) -> dict[str, Any]:
        """The evaluation of the present step in the event log, or that before training; empty if there is none."""
        found = [
            event
            for event in read_events(self.run.events)
            if event["event"] == ROBOT_EVALUATION and event["when"] == when and "error" not in event
        ]
        return found[-1] if found and (when == "before" or found[-1]["step"] == self.step) else {}

    def figures(self) -> dict[str, Any]:
        """What the policy achieves; empty without an evaluation."""
        if not self.after:
            return {}
        names = ("return_mean", "success", "falls")
        figures = {name: self.after[name] for name in names if name in self.after} | {"n": self.after["episodes"]}
        figures |= {f"{name}_before": self.before[name] for name in names if name in self.before}
        return figures | dict(self.after["figures"])

    # Checkpoints.

    async def _checkpoint(self) -> None:
        with span(self.telemetry, self.clock, CHECKPOINT, step=self.step):
            needed = state_bytes(None, self.learner.optimizer, head=self.learner.networks)
            needed += sum(each.nbytes for state in self.shards for each in state.values())
            write, step = self._write, self.step
            await self.compute.run(lambda: self.checkpoints.write(step, write, score=self.score, expected_bytes=needed))
        self.saved_step = self.step

    def _write(self, folder: Path) -> None:
        learner = self.learner
        returns = self.after.get("return_mean")
        write_policy(folder, msgspec.structs.replace(self.description, returns=returns), self.weights)
        save_file(arrays_of(learner.networks.critics), folder / CRITICS)
        flat = {f"{shard}/{name}": each for shard, state in enumerate(self.shards) for name, each in state.items()}
        save_file({name: np.ascontiguousarray(each) for name, each in flat.items()}, folder / SHARDS)
        if self.spec.control.max_policy_lag:
            save_file(dict(self.older), folder / OLDER)
        counters = {"step": self.step, "learning_rate": learner.learning_rate}
        save_state(folder, model=None, optimizer=learner.optimizer, head=learner.networks, counters=counters)

    def _restore(self, folder: Path) -> None:
        learner = self.learner
        load_arrays(learner.networks.actors, load_file(folder / ACTORS))
        load_arrays(learner.networks.critics, load_file(folder / CRITICS))
        counters = restore_state(folder, model=None, optimizer=learner.optimizer, head=learner.networks)
        learner.learning_rate = float(counters["learning_rate"])
        self.step = self.saved_step = int(counters["step"])
        self.shards = [{} for _ in range(self.spec.robot.shards if self.method.simulates else 0)]
        for name, each in load_file(folder / SHARDS).items():
            shard, _, key = name.partition("/")
            self.shards[int(shard)][key] = each
        if self.spec.control.max_policy_lag:
            self.older = load_file(folder / OLDER)


def _check_physics(chunks: Sequence[State], name: str) -> None:
    """Raises GuardStop: the physics of too many worlds was not finite."""
    invalid, worlds = sum(int(chunk["invalid"]) for chunk in chunks), sum(len(chunk["rewards"]) for chunk in chunks)
    if invalid > INVALID_LIMIT * worlds:
        share = f"{invalid} of {worlds} worlds ({percent(invalid / worlds)})"
        raise GuardStop(
            f"{name} had to reset {share}, whose physics was not finite\n"
            "  lower the timestep or the gains of the model, and train in another run directory"
        )


def evaluation_fields(played: PlayedEpisodes) -> dict[str, Any]:
    """Fields of the event `robot_evaluation`."""
    episodes = len(played)
    means = {name: played.mean(name) for name in played.figures}
    found: dict[str, Any] = {"episodes": episodes, "return_mean": means["return"], "falls": means["fell"]}
    if "success" in means:
        interval = wilson_interval(means["success"], episodes)
        found |= {"success": means["success"], "success_interval": list(interval)}
    if invalid := sum(int(chunk["invalid"]) for chunk in played.chunks):
        found["invalid"] = invalid

    def below(prefix: str) -> dict[str, float]:
        return {name.removeprefix(prefix): each for name, each in means.items() if name.startswith(prefix)}

    return found | {"figures": below("figure/"), "terms": below("term/")}


def episode_values(experience: Sequence[State]) -> dict[str, float]:
    """Metrics of the episodes that ended in an iteration, and of the physics."""
    columns = defaultdict[str, list[Any]](list)
    for chunk in experience:
        for name, values in chunk.items():
            columns[name].append(values)
    ended = ended_episodes(experience)
    found = {"robot/episodes": float(len(ended.get("return", ())))}
    # An environment also counts the episodes that restarted.
    found |= {f"robot/{name}": float(np.sum(columns[name])) for name in ("invalid", "restarted") if name in columns}
    logged = {name: np.concatenate(each) for name, each in columns.items() if name.startswith("log/")}
    found |= {f"robot/{name}": float(np.mean(values)) for name, values in logged.items()}
    names = {"return": "return_mean", "length": "length_mean", "success": "success", "fell": "falls"}
    names |= {name: name for name in ended if name.startswith(("term/", "figure/"))}
    return found | {f"robot/{metric}": float(np.mean(ended[name])) for name, metric in names.items() if name in ended}


def headline(before: Mapping[str, Any], after: Mapping[str, Any], iterations: int) -> str:
    """success 0.02 -> 0.98 (n = 64), return 1.2 -> 9.8 in 60 iterations; without success, falls."""
    if not after:
        return f"{iterations} iterations"
    first = before or after
    name = "success" if "success" in first and "success" in after else "falls"
    share = f"{name} {first[name]:.2f} -> {after[name]:.2f} (n = {after['episodes']})"
    return f"{share}, return {first['return_mean']:.3g} -> {after['return_mean']:.3g} in {iterations} iterations"


def digest_of(weights: Weights) -> str:
    """32 hex digits over names and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, each in weights.items():
        digest.update(name.encode() + b"\0" + each.tobytes())
    return digest.hexdigest()


def task_digest(spec: RunSpec) -> str:
    """Digest of the compiled model, or of what makes the environment."""
    if spec.robot.environment:
        return hashlib.blake2b(spec.robot.model_dump_json().encode(), digest_size=16).hexdigest()
    return model_digest(check_model(open_task(spec.robot.task), spec.robot.parameters))
