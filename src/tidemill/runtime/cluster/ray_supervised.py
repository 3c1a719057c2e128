"""Supervised stages on several ranks: an actor for each runs the whole loop, and the first one's telemetry is shown."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TrainerLost
from tidemill.core.protocols import Telemetry
from tidemill.core.records import Demonstration, PreferencePair, Record, StepMetrics
from tidemill.data.examples import Examples
from tidemill.extensions.registry import Extension
from tidemill.models.folder import weight_files
from tidemill.models.forward_check import check_layers
from tidemill.models.snapshots import check_shardable
from tidemill.models.weights_digest import weights_digest
from tidemill.runtime.backend import checkpoint_store
from tidemill.runtime.cluster.connection import connected, reserved_selector, selector_of
from tidemill.runtime.cluster.rank_group import RANK_S, RankGroup, join_group, rank_remotes
from tidemill.runtime.cluster.ray_calls import ActorResources, placed, require_reserved_gpus, spec_to_send
from tidemill.runtime.cluster.ray_trainer import NO_DEADLINE
from tidemill.runtime.cluster.wire import AsyncActor, decode, encode, invoke, served
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import load_model_bundle
from tidemill.telemetry.recorder import NullTelemetry, Recorder
from tidemill.trainer.objectives import OBJECTIVES, SupervisedKind
from tidemill.trainer.sharding import load_shards
from tidemill.trainer.supervised_loop import FitContext, FitResult, fit

POLL_S = 0.5
EXAMPLES: dict[SupervisedKind, type[Demonstration | PreferencePair]] = {
    "sft": Demonstration,
    "reward_model": PreferencePair,
    "dpo": PreferencePair,
}


class SupervisedPlan(Record):
    """Arguments of `SupervisedRank.start`."""

    spec: str  # a RunSpec as JSON
    directory: str  # of the run


class SupervisedStarted(Record):
    """Result of `SupervisedRank.start`."""

    model_digest: str  # of the initial weights
    threads: int
    device_info: dict[str, Any]


class Line(Record):
    """A call of one of a telemetry's methods, or of the recorder's."""

    method: str
    arguments: tuple[Any, ...] = ()
    fields: dict[str, Any] = {}
    metrics: StepMetrics | None = None  # of `step`, which has no other argument


class LineQueue(NullTelemetry):
    """A telemetry whose calls are taken as lines by another thread."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[Line] = deque()

    def add(self, method: str, /, *arguments: Any, **fields: Any) -> None:
        self._lines.append(Line(method=method, arguments=arguments, fields=fields))

    def take(self) -> list[Line]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def resume(self, step: int) -> None:
        self.add("resume", step)

    def event(self, name: str, **fields: Any) -> None:
        self.add("event", name, **fields)

    def step(self, metrics: StepMetrics) -> None:
        self._lines.append(Line(method="step", metrics=metrics))

    def progress(self, phase: str, done: int, total: int) -> None:
        self.add("progress", phase, done, total)


def relay(lines: Sequence[Line], telemetry: Telemetry, recorder: Recorder) -> None:
    """Repeat the calls of a `LineQueue`."""
    for line in lines:
        if line.metrics is not None:
            telemetry.step(line.metrics)
            continue
        target = recorder if line.method in ("note", "expect") else telemetry
        getattr(target, line.method)(*line.arguments, **line.fields)


class SupervisedRank(AsyncActor):
    """One rank of a supervised stage."""

    def __init__(self) -> None:
        super().__init__()
        self._compute = ComputeThread()
        self._stop = threading.Event()
        self._lines = LineQueue()
        self.loaded: tuple[RunSpec, FitContext] | None = None

    @served
    async def start(
        self, plan: SupervisedPlan, index: int, meeting: str, functions: Sequence[Extension] = ()
    ) -> SupervisedStarted:
        """Load this rank's rows of the model. Raises UserError: it or the device cannot be used."""
        spec = RunSpec.model_validate_json(plan.spec)
        require_reserved_gpus(spec.ray.trainer_gpus, "ray.trainer_gpus")
        check_memory(spec, "supervised", note=lambda _: None, alone=False)

        def start() -> SupervisedStarted:
            bundle = load_model_bundle(spec, progress=lambda _: None, generates=False, work="supervised")
            ranks = join_group(bundle.spec, bundle.device, meeting=Path(meeting), index=index)
            load_shards(bundle.forward, bundle.folder, ranks, offload=spec.trainer.offload == "optimizer")
            directory = Path(plan.directory)
            context = FitContext(
                forward=bundle.forward,
                source=bundle.folder,
                directory=directory,
                checkpoints=checkpoint_store(spec, directory / "checkpoints"),
                telemetry=self._lines if ranks.index == 0 else NullTelemetry(),
                ranks=ranks,
                stop=self._stop.is_set,
                set_total_steps=partial(self._lines.add, "expect"),
                warn=partial(self._lines.add, "note"),
            )
            self.loaded = bundle.spec, context
            return SupervisedStarted(
                model_digest=weights_digest(bundle.model, ranks),
                threads=bundle.threads,
                device_info=bundle.device_info | {"shards": ranks.size},
            )

        return await self._compute.run(start)

    @served
    async def fit(self, kind: SupervisedKind, train: bytes, held_out: bytes) -> tuple[FitResult, str]:
        """Train until the end, or until `stop`.

        Returns:
            The result without its model, and the model's folder (paths do not cross processes); empty for none.
        """
        return await self._compute.run(lambda: self._fit(kind, train, held_out))

    def _fit(self, kind: SupervisedKind, train: bytes, held_out: bytes) -> tuple[FitResult, str]:
        spec, context = self.part("loaded")
        rows = list[EXAMPLES[kind]]  # type: ignore[valid-type]
        objective = OBJECTIVES[kind](spec, context)
        result = fit(spec, objective, train=decode(train, rows), held_out=decode(held_out, rows), context=context)
        return msgspec.structs.replace(result, model=None), str(result.model or "")

    @served
    async def take_lines(self) -> list[Line]:
        return self._lines.take()

    @served
    async def stop(self) -> None:
        """End the loop with a checkpoint before its next step."""
        self._stop.set()


def fit_on_ranks(
    spec: RunSpec,
    kind: SupervisedKind,
    examples: Examples[Any],
    *,
    folder: Path,
    directory: Path,
    telemetry: Telemetry,
    recorder: Recorder,
    started: Callable[..., None],
    stop: Callable[[], bool],
) -> FitResult:
    """Train on `trainer.shards` ranks.

    Args:
        recorder: what `telemetry` ends in; gets remarks and the number of steps.
        started: called with the fields of `SupervisedStarted` when the ranks have loaded the model.
        stop: called repeatedly; True ends the stage with a checkpoint.

    Raises:
        UserError: the cluster, the model or the examples cannot be used.
        TrainerLost: a rank died or was late.
    """
    check_shardable(folder)
    check_layers(folder)
    plan = SupervisedPlan(spec=spec_to_send(spec, folder), directory=str(directory.resolve()))

    async def run() -> FitResult:
        async with AsyncExitStack() as stack:
            nbytes = sum(file.stat().st_size for file in weight_files(folder))
            await stack.enter_async_context(connected(spec, model_bytes=nbytes, log=recorder.note))
            reserved = reserved_selector(spec.ray, selector_of(spec.pool))
            resources = ActorResources(spec.ray.trainer_cpus, spec.ray.trainer_gpus, "ray.trainer")
            size = spec.trainer.shards
            handles = await stack.enter_async_context(placed(SupervisedRank, "trainer", resources, reserved, size=size))
            remotes = rank_remotes(handles)
            group = RankGroup(remotes)
            loaded = await group.start(SupervisedRank.start, plan, directory / "checkpoints")
            started(**msgspec.structs.asdict(loaded))
            rows = [ray.put(encode(list(each))) for each in (examples.train, examples.held_out)]
            fitting = asyncio.create_task(invoke(group, NO_DEADLINE, SupervisedRank.fit, kind, *rows))
            stopping = False
            try:
                while not fitting.done():
                    await asyncio.wait({fitting}, timeout=POLL_S)
                    if stop() and not stopping and not fitting.done():
                        stopping = True
                        await invoke(group, RANK_S, SupervisedRank.stop)
                    if not fitting.done() or not isinstance(fitting.exception(), TrainerLost):
                        lines = await invoke(remotes[0], RANK_S, SupervisedRank.take_lines)
                        relay(lines, telemetry, recorder)
                result, model = fitting.result()
            finally:
                fitting.cancel()
            return msgspec.structs.replace(result, model=Path(model) if model else None)

    return asyncio.run(run())
