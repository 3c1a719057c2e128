"""The trainer in an actor: model, optimizer, checkpoints, published weights, and the reserved engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import LoopClock
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, StepMetrics, WeightManifest
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import ModelPublisher, TrainerCheckpoints
from tidemill.runtime.cluster.actors import Serving, asked
from tidemill.runtime.cluster.ray_calls import Remote
from tidemill.runtime.cluster.ray_critic import RayCritic
from tidemill.runtime.cluster.ray_reader import ReadingActor
from tidemill.runtime.cluster.wire import (
    Committed,
    ObjectStoreTransport,
    Restored,
    Started,
    TrainerPlan,
    decode,
    encode,
)
from tidemill.runtime.compute import ComputeThread, require_reserved_gpus
from tidemill.runtime.model_bundle import ModelBundle, build_critic, load_model_bundle
from tidemill.runtime.readers import reference_reader
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.critic import Critic
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.store import WeightStore

UNTIL_GIVEN_UP = math.inf
"""The loop has deadlines of its own for what the trainer does, and cancels."""


class RayTrainer:
    """Implements `core.protocols.Trainer`."""

    def __init__(self, remote: Remote, started: Started) -> None:
        self._remote, self._version = remote, started.version

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def accumulate(self, group: Group) -> None:
        await self._remote.call("accumulate", encode(group), kind=type(None), timeout_s=UNTIL_GIVEN_UP)

    async def commit(self, step: int) -> StepMetrics:
        committed = await self._remote.call("commit", step, kind=Committed, timeout_s=UNTIL_GIVEN_UP)
        self._version = committed.version
        return committed.metrics

    async def logprobs(self, completions: Sequence[Completion]) -> list[LogprobBuffer]:
        return await self._remote.call(
            "logprobs", encode(completions), kind=list[LogprobBuffer], timeout_s=UNTIL_GIVEN_UP
        )

    def restored(self, version: PolicyVersion) -> None:
        self._version = version


class RayCheckpoints:
    """Implements `core.protocols.Checkpoints` for the trainer's process; the folder must be one that it sees.

    Args:
        warn: told of a damaged checkpoint that was passed over.
    """

    def __init__(self, remote: Remote, trainer: RayTrainer, *, warn: Callable[[str], None]) -> None:
        self._remote, self._trainer, self._warn = remote, trainer, warn

    async def save(self, step: int, *, score: float | None) -> None:
        await self._remote.call("save", step, score, kind=type(None), timeout_s=UNTIL_GIVEN_UP)

    async def restore_latest(self) -> int:
        restored = await self._remote.call("restore_latest", kind=Restored, timeout_s=UNTIL_GIVEN_UP)
        for warning in restored.warnings:
            self._warn(warning)
        self._trainer.restored(restored.version)
        return restored.step


class RayPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        return await self._remote.call("publish", encode(version), kind=WeightManifest, timeout_s=UNTIL_GIVEN_UP)

    async def close(self) -> None:
        """The objects end with the trainer's process."""


class TrainerActor(Serving, ReadingActor):
    """Behind `trainer.RayTrainer`, `RayCheckpoints` and `RayPublisher`, a `RayWorker` for its engine, and a `RayReader`
    of the reference."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: PolicyTrainer | None = None
        self._checkpoints: TrainerCheckpoints | None = None
        self._publisher: ModelPublisher | None = None
        self._transport = ObjectStoreTransport()
        self._warnings: list[str] = []

    @asked
    async def start(self, plan: bytes, critic: Any = None) -> Started:
        """Load the model.

        Args:
            critic: a `CriticActor` that nobody has started; None where the critic, if any, is in this process.

        Raises:
            UserError: the model or the device cannot be had here.
        """
        planned = decode(plan, TrainerPlan)
        compute = ComputeThread()
        spec = RunSpec.model_validate_json(planned.spec)
        require_reserved_gpus(spec.ray.trainer_gpus, "ray.trainer_gpus")
        bundle = await compute.run(lambda: load_model_bundle(spec, progress=lambda _: None))
        reference = await compute.run(bundle.reference)
        learns_values, critic_device = await compute.run(lambda: _critic(bundle, planned, critic))
        trainer = PolicyTrainer(
            bundle.model,
            spec,
            compute=compute,
            source=bundle.folder,
            reference=reference,
            critic=learns_values,
            autocast=bundle.autocast,
        )
        engine = bundle.engine(trainer.version, prompt_tokens=planned.prompt_tokens)
        self.worker = EngineWorker(engine, compute, clock=LoopClock(), tick_s=spec.engine.tick_s)
        if reference is not None and spec.reading.ahead:
            self.reader = reference_reader(spec, reference, compute)
        store = CheckpointStore(
            Path(planned.checkpoints), keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        self._trainer = trainer
        self._checkpoints = TrainerCheckpoints(store, trainer, compute, warn=self._warnings.append)
        if planned.probe_ids:
            weights_compute = ComputeThread("tidemill-weights")
            self._publisher = ModelPublisher(
                bundle.model,
                WeightStore(self._transport, compute=weights_compute),
                compute=compute,
                rollout_model=bundle.rollout_model,
                probe_ids=planned.probe_ids,
                sends_base=True,
            )
        return Started(
            version=trainer.version,
            device=str(bundle.device),
            threads=bundle.threads,
            autocast=str(bundle.autocast),
            dtype=str(bundle.rollout_dtype).removeprefix("torch."),
            critic_device=critic_device,
        )

    @asked
    async def accumulate(self, group: bytes) -> None:
        await self._ready().accumulate(decode(group, Group))

    @asked
    async def commit(self, step: int) -> Committed:
        trainer = self._ready()
        metrics = await trainer.commit(step)
        return Committed(metrics=metrics, version=trainer.version)

    @asked
    async def logprobs(self, completions: bytes) -> list[LogprobBuffer]:
        return await self._ready().logprobs(decode(completions, list[Completion]))

    @asked
    async def save(self, step: int, score: float | None) -> None:
        assert self._checkpoints is not None, "not started"
        await self._checkpoints.save(step, score=score)

    @asked
    async def restore_latest(self) -> Restored:
        assert self._checkpoints is not None, "not started"
        step = await self._checkpoints.restore_latest()
        warnings, self._warnings[:] = tuple(self._warnings), []
        return Restored(step=step, version=self._ready().version, warnings=warnings)

    @asked
    async def publish(self, version: bytes) -> WeightManifest:
        assert self._publisher is not None, "nobody was to pull weights"
        return await self._publisher.publish(decode(version, PolicyVersion))

    async def blob(self, name: str) -> list[Any]:
        """For `ObjectStoreReader`."""
        return self._transport.refs(name)

    def _ready(self) -> PolicyTrainer:
        if self._trainer is None:
            raise TidemillError("this trainer has not been started")
        return self._trainer


def _critic(bundle: ModelBundle, plan: TrainerPlan, handle: Any) -> tuple[Critic | None, str]:
    """What the algorithm needs, here or behind `handle`; and the device of the latter."""
    if handle is None:
        return build_critic(bundle, progress=lambda _: None), ""
    critic, cpus = RayCritic(handle), bundle.spec.placement.actor_cpus
    return critic, critic.start(plan.spec, threads=max(1, int(cpus)), checkpoints=Path(plan.checkpoints))
