"""The trainer in an actor: model, optimizer, checkpoints, the reserved engine, and published weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Checkpoints, LoopClock, Publisher, Trainer
from tidemill.core.records import PolicyVersion, Record, StepMetrics, TensorEntry, TokenBuffer
from tidemill.extensions.registry import Extension, provide
from tidemill.hardware.process_memory import Work
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.snapshots import DTYPE_NAMES
from tidemill.runtime.backend import TrainerCheckpoints
from tidemill.runtime.build_trainer import build_trainer
from tidemill.runtime.cluster.lane import LaneSender
from tidemill.runtime.cluster.rank_group import join_group
from tidemill.runtime.cluster.ray_calls import EngineActor, require_reserved_gpus
from tidemill.runtime.cluster.ray_critic import RayCritic
from tidemill.runtime.cluster.ray_frozen_scorer import FrozenScorerServer
from tidemill.runtime.cluster.weight_transports import (
    ObjectStoreTransport,
    PublisherTransport,
    WeightsAddress,
    address_of,
    open_transport,
)
from tidemill.runtime.cluster.wire import Caller, calls, invoke, served, serves
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.extension_checks import identities, refuse_changed, trainer_extensions
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import ModelBundle, load_model_bundle
from tidemill.weights.delta import Threads
from tidemill.weights.store import WeightStore

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


class Restored(Record):
    """Result of `TrainerActor.restore_latest`."""

    step: int  # of the restored checkpoint; 0 for none
    version: PolicyVersion
    warnings: tuple[str, ...]


class RayTrainer:
    """Implements `core.protocols.Trainer`."""

    def __init__(self, remote: Caller, version: PolicyVersion) -> None:
        self._remote, self.version = remote, version

    accumulate = calls(Trainer.accumulate, timeout_s=NO_DEADLINE)
    logprobs = calls(Trainer.logprobs, timeout_s=NO_DEADLINE)

    async def commit(self, step: int) -> StepMetrics:
        metrics = await invoke(self._remote, NO_DEADLINE, Trainer.commit, step)
        self.version = metrics.version
        return metrics


class RayCheckpoints:
    """Implements `core.protocols.Checkpoints`. The folder must be visible to the trainer's process.

    Args:
        warn: gets a message for every damaged checkpoint that was skipped.
    """

    def __init__(self, remote: Caller, trainer: RayTrainer, *, warn: Callable[[str], None]) -> None:
        self._remote, self._trainer, self._warn = remote, trainer, warn

    save = calls(Checkpoints.save, timeout_s=NO_DEADLINE)

    async def restore_latest(self) -> int:
        restored = await invoke(self._remote, NO_DEADLINE, TrainerActor.restore_latest)
        for warning in restored.warnings:
            self._warn(warning)
        self._trainer.version = restored.version
        return restored.step


class RayPublisher:
    """Implements `core.protocols.Publisher`."""

    def __init__(self, remote: Caller) -> None:
        self._remote = remote

    publish = calls(Publisher.publish, timeout_s=NO_DEADLINE)

    async def close(self) -> None:
        """Nothing to do: the objects end with the trainer's process."""


class TrainerActor(EngineActor, FrozenScorerServer):
    """Serves `RayTrainer`, `RayCheckpoints` and `RayPublisher`, a `RayWorker` for its engine, and a `RayFrozenScorer`
    of the reference. One alone is the trainer; several are the ranks of a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None
        self.checkpoints: TrainerCheckpoints | None = None
        self.publisher: Publisher | None = None
        self.lane: LaneSender | None = None
        self._transport: PublisherTransport | None = None
        self._warnings: list[str] = []

    accumulate = serves(Trainer.accumulate, "trainer")
    commit = serves(Trainer.commit, "trainer")
    logprobs = serves(Trainer.logprobs, "trainer")
    save = serves(Checkpoints.save, "checkpoints")
    publish = serves(Publisher.publish, "publisher")
    join_lane = serves(LaneSender.join_lane, "lane")
    send_weights = serves(LaneSender.send_weights, "lane")

    @served
    async def start(self, plan: TrainerPlan, critic: Any = None, functions: Sequence[Extension] = ()) -> Started:
        """Load the models.

        Args:
            critic: handle of a `CriticActor` that has not been started; None for a critic in this process, or none.
            functions: user functions that cannot be imported here.

        Raises:
            UserError: a model or the device cannot be used.
        """
        return await self._start(plan, functions, critic=critic)

    @served
    async def start_rank(
        self, plan: TrainerPlan, index: int, meeting: str, functions: Sequence[Extension] = ()
    ) -> Started:
        """Load the models, and keep this rank's rows.

        Args:
            meeting: path of a new file in a folder that all ranks see.

        Raises:
            UserError: a model or the device cannot be used, or the ranks do not see the folder.
        """
        return await self._start(plan, functions, join=partial(join_group, meeting=Path(meeting), index=index))

    async def _start(
        self,
        plan: TrainerPlan,
        functions: Sequence[Extension],
        *,
        critic: Any = None,
        join: Callable[[ModelBundle], Ranks] = lambda _: ONE_RANK,
    ) -> Started:
        spec, compute = checked_spec(plan, functions), ComputeThread()

        def start() -> Started:
            bundle = load_model_bundle(spec, progress=lambda _: None, generates=spec.engine_shares_model)
            ranks, remote_critic, device_info = join(bundle), None, bundle.device_info
            if ranks.size > 1:
                device_info["shards"] = ranks.size
            if critic is not None:
                remote_critic = RayCritic(critic)
                threads, folder = max(1, int(spec.placement.actor_cpus)), Path(plan.checkpoints)
                device_info["critic_device"] = remote_critic.start(plan.spec, threads=threads, checkpoints=folder)
            parts = build_trainer(
                bundle,
                compute,
                clock=LoopClock(),
                checkpoints=Path(plan.checkpoints),
                prompt_tokens=plan.prompt_tokens,
                probe_ids=plan.probe_ids,
                open_store=lambda: self._open_store(spec),
                sends_base=True,
                warn=self._warnings.append,
                ranks=ranks,
                critic=remote_critic,
            )
            self.trainer, self.checkpoints, self.publisher = parts.trainer, parts.checkpoints, parts.publisher
            self.worker, self.frozen_scorer = parts.engine, parts.frozen_reference
            self.lane = LaneSender(bundle, parts.trainer, compute, sends=ranks.index == 0)
            return Started(
                version=parts.trainer.version,
                device_info=device_info,
                threads=bundle.threads,
                dtype=DTYPE_NAMES[bundle.rollout_dtype],
                layout=self.lane.layout,
            )

        return await compute.run(start)

    @served
    async def restore_latest(self) -> Restored:
        checkpoints: TrainerCheckpoints = self.part("checkpoints")
        step = await checkpoints.restore_latest()
        warnings, self._warnings[:] = tuple(self._warnings), []
        return Restored(step=step, version=self.part("trainer").version, warnings=warnings)

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
