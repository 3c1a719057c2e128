"""The trainer in an actor: model, optimizer, checkpoints, the reserved engine, and published weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError, WeightsError
from tidemill.core.protocols import LoopClock, Publisher, Trainer
from tidemill.core.records import (
    Completion,
    Group,
    LogprobBuffer,
    PolicyVersion,
    Record,
    StepMetrics,
    TensorEntry,
    TokenBuffer,
    WeightManifest,
)
from tidemill.extensions.registry import Extension, provide
from tidemill.hardware.process_memory import Work
from tidemill.models.snapshots import dtype_name
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import TrainerCheckpoints
from tidemill.runtime.cluster.lane import LanePlan, LaneSender
from tidemill.runtime.cluster.ray_calls import Caller, EngineActor, decode, encode, require_reserved_gpus, served
from tidemill.runtime.cluster.ray_critic import RayCritic
from tidemill.runtime.cluster.ray_reader import ReadingActor
from tidemill.runtime.cluster.weight_transports import (
    ObjectStoreTransport,
    PublisherTransport,
    WeightsAddress,
    address_of,
    open_transport,
)
from tidemill.runtime.colocated import open_colocated
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.extension_checks import identities, refuse_changed, trainer_extensions
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import ModelBundle, build_critic, load_model_bundle
from tidemill.runtime.publishers import ModelPublisher, ProbePublisher, ShardPublisher
from tidemill.runtime.readers import reference_reader
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.store import WeightStore
from tidemill.weights.threads import Threads

NO_DEADLINE = math.inf
"""The training loop has deadlines for all calls to the trainer, and cancels them."""


class TrainerPlan(Record):
    """Arguments of `TrainerActor.start`."""

    spec: str  # a RunSpec as JSON
    checkpoints: str  # folder
    prompt_tokens: int  # length of the longest prompt
    probe_ids: TokenBuffer  # int32 [N], published with every version; empty without workers
    identities: dict[str, str]  # of user functions, which this process must have too


def checked_spec(plan: TrainerPlan, functions: Sequence[Extension]) -> RunSpec:
    """The configuration of a trainer's actor, with its user functions.

    Raises:
        UserError: a function differs on this machine, torch cannot use the reserved GPU, or the models do not fit.
    """
    spec = RunSpec.model_validate_json(plan.spec)
    provide(functions)
    here = identities(trainer_extensions(spec))
    refuse_changed({name: plan.identities[name] for name in here}, here, where="the trainer's machine")
    require_reserved_gpus(spec.ray.trainer_gpus, "ray.trainer_gpus")
    work: Work = "serve" if spec.task.kind == "served" else "rl"
    check_memory(spec, work, note=lambda _: None, alone=False)
    return spec


class Started(Record):
    """Result of `TrainerActor.start`."""

    version: PolicyVersion
    device_info: dict[str, Any]  # for the event log
    threads: int
    dtype: str  # of published weights
    layout: tuple[TensorEntry, ...]  # of a whole version


class Committed(Record):
    """Result of `TrainerActor.commit`."""

    metrics: StepMetrics
    version: PolicyVersion


class Restored(Record):
    """Result of `TrainerActor.restore_latest`."""

    step: int  # of the restored checkpoint; 0 for none
    version: PolicyVersion
    warnings: tuple[str, ...]


class RayTrainer:
    """Implements `core.protocols.Trainer`."""

    def __init__(self, remote: Caller, version: PolicyVersion) -> None:
        self._remote, self.version = remote, version

    async def accumulate(self, group: Group) -> None:
        await self._remote.call("accumulate", encode(group), kind=type(None), timeout_s=NO_DEADLINE)

    async def commit(self, step: int) -> StepMetrics:
        committed = await self._remote.call("commit", step, kind=Committed, timeout_s=NO_DEADLINE)
        self.version = committed.version
        return committed.metrics

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._remote.call("logprobs", encode(completions), kind=list[LogprobBuffer], timeout_s=NO_DEADLINE)


class RayCheckpoints:
    """Implements `core.protocols.Checkpoints`. The folder must be visible to the trainer's process.

    Args:
        warn: gets a message for every damaged checkpoint that was skipped.
    """

    def __init__(self, remote: Caller, trainer: RayTrainer, *, warn: Callable[[str], None]) -> None:
        self._remote, self._trainer, self._warn = remote, trainer, warn

    async def save(self, step: int, *, score: float | None) -> None:
        await self._remote.call("save", step, score, kind=type(None), timeout_s=NO_DEADLINE)

    async def restore_latest(self) -> int:
        restored = await self._remote.call("restore_latest", kind=Restored, timeout_s=NO_DEADLINE)
        for warning in restored.warnings:
            self._warn(warning)
        self._trainer.version = restored.version
        return restored.step


class RayPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, remote: Caller) -> None:
        self._remote = remote

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        return await self._remote.call("publish", encode(version), kind=WeightManifest, timeout_s=NO_DEADLINE)

    async def close(self) -> None:
        """Nothing to do: the objects end with the trainer's process."""


class TrainerActor(EngineActor, ReadingActor):
    """Serves `RayTrainer`, `RayCheckpoints` and `RayPublisher`, a `RayWorker` for its engine, and a `RayReader` of the
    reference."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Trainer | None = None
        self._lane: LaneSender | None = None
        self._checkpoints: TrainerCheckpoints | None = None
        self._publisher: Publisher | None = None
        self._transport: PublisherTransport | None = None
        self._warnings: list[str] = []

    @served
    async def start(self, plan: bytes, critic: Any = None, functions: Sequence[Extension] = ()) -> Started:
        """Load the models.

        Args:
            functions: user functions that cannot be imported here.
            critic: handle of a `CriticActor` that has not been started; None for a critic in this process, or none.

        Raises:
            UserError: a model or the device cannot be used.
        """
        planned = decode(plan, TrainerPlan)
        compute, spec = ComputeThread(), checked_spec(planned, functions)
        shares = spec.placement.engine == "auto"  # the engine has the trainer's parameters
        bundle = await compute.run(lambda: load_model_bundle(spec, progress=lambda _: None, generates=shares))
        reference = await compute.run(bundle.reference)
        device_info = bundle.device_info
        if critic is None:
            trained_critic = await compute.run(lambda: build_critic(bundle, progress=lambda _: None))
        else:
            trained_critic = remote_critic = RayCritic(critic)
            threads, checkpoints = max(1, int(spec.placement.actor_cpus)), Path(planned.checkpoints)
            device_info["critic_device"] = await compute.run(
                lambda: remote_critic.start(planned.spec, threads=threads, checkpoints=checkpoints)
            )
        trainer = PolicyTrainer(
            bundle.forward,
            spec,
            compute=compute,
            source=bundle.folder,
            reference=bundle.forward_of(reference),
            critic=trained_critic,
        )
        self._trainer = trainer
        if shares:
            engine = bundle.engine(trainer.version, prompt_tokens=planned.prompt_tokens)
            self.worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=spec.engine.tick_s)
        if reference is not None and spec.reading.ahead:
            self.reader = reference_reader(spec, reference, compute)
        store = CheckpointStore(
            Path(planned.checkpoints), keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        self._checkpoints = TrainerCheckpoints(store, trainer, compute, warn=self._warnings.append)
        if planned.probe_ids and shares:
            self._publisher = ModelPublisher(
                bundle.model,
                self._open_store(spec),
                compute=compute,
                rollout_model=bundle.rollout_model,
                probe_ids=planned.probe_ids,
                sends_base=True,
            )
        return await self._connected(planned, bundle, trainer, compute, bundle.device_info | device_info)

    async def _connected(
        self,
        planned: TrainerPlan,
        bundle: ModelBundle,
        trainer: PolicyTrainer,
        compute: ComputeThread,
        device_info: dict[str, Any],
    ) -> Started:
        """Open what an engine with weights of its own needs: itself if it is in this process, and its versions.

        Raises:
            UserError: as `open_colocated`.
        """
        spec = bundle.spec
        if spec.placement.engine == "colocated":
            self.worker, self._trainer = await compute.run(
                lambda: open_colocated(
                    bundle,
                    trainer,
                    compute,
                    clock=LoopClock(),
                    prompt_tokens=planned.prompt_tokens,
                    probe_ids=planned.probe_ids,
                )
            )
        self._lane = LaneSender(bundle, compute, sends=self.rank == 0)
        if self._publisher is None and planned.probe_ids:
            settings: dict[str, Any] = {"compute": compute, "probe_ids": planned.probe_ids}
            stored = spec.is_elastic or (spec.engine_is_apart and spec.weights.lane == "none")
            self._publisher = (
                ShardPublisher(bundle, self._open_store(spec), **settings)
                if stored
                else ProbePublisher(bundle, **settings)
            )
        return Started(
            version=trainer.version,
            device_info=device_info,
            threads=bundle.threads,
            dtype=dtype_name(bundle.rollout_dtype),
            layout=self._lane.layout,
        )

    @served
    async def accumulate(self, group: bytes) -> None:
        await self._started_trainer().accumulate(decode(group, Group))

    @served
    async def commit(self, step: int) -> Committed:
        trainer = self._started_trainer()
        metrics = await trainer.commit(step)
        return Committed(metrics=metrics, version=trainer.version)

    @served
    async def logprobs(self, completions: bytes) -> list[LogprobBuffer]:
        return list(await self._started_trainer().logprobs(decode(completions, list[Completion])))

    @served
    async def save(self, step: int, score: float | None) -> None:
        assert self._checkpoints is not None, "not started"
        await self._checkpoints.save(step, score=score)

    @served
    async def restore_latest(self) -> Restored:
        assert self._checkpoints is not None, "not started"
        step = await self._checkpoints.restore_latest()
        warnings, self._warnings[:] = tuple(self._warnings), []
        return Restored(step=step, version=self._started_trainer().version, warnings=warnings)

    @served
    async def publish(self, version: bytes) -> WeightManifest:
        assert self._publisher is not None, "started without probe_ids"
        return await self._publisher.publish(decode(version, PolicyVersion))

    @served
    async def join_lane(self, plan: bytes) -> None:
        """Meet the reserved engine."""
        assert self._lane is not None, "not started"
        await self._lane.join(decode(plan, LanePlan))

    @served
    async def send_weights(self, version: bytes) -> None:
        """Send the current version to the reserved engine.

        Raises:
            WeightsError: it is another version, or it cannot be sent.
        """
        assert self._lane is not None, "not started"
        wanted, current = decode(version, PolicyVersion), self._started_trainer().version
        if wanted != current:
            raise WeightsError(f"the trainer has version {current.number}, not {wanted.number}")
        await self._lane.send()

    async def blob(self, name: str) -> list[Any]:
        """For `ObjectStoreReader`."""
        return self._transport.refs(name) if isinstance(self._transport, ObjectStoreTransport) else []

    @served
    async def weights_address(self) -> WeightsAddress | None:
        """Where weights are served over HTTP; None: nowhere."""
        return address_of(self._transport)

    def _open_store(self, spec: RunSpec) -> WeightStore:
        """Raises UserError: the address to serve weights on cannot be used."""
        self._transport = open_transport(spec.weights)
        threads = Threads(spec.weights.threads)
        return WeightStore(self._transport, compute=ComputeThread("tidemill-weights"), threads=threads)

    def _started_trainer(self) -> Trainer:
        if self._trainer is None:
            raise TidemillError("this trainer has not been started")
        return self._trainer
