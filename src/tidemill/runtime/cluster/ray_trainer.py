"""The trainer in an actor: model, optimizer, checkpoints, the reserved engine, and published weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Checkpoints, LoopClock, Publisher, Trainer
from tidemill.core.records import PolicyVersion, Record, StepMetrics, TensorEntry, TokenBuffer
from tidemill.extensions.registry import Extension, provide
from tidemill.hardware.process_memory import Work
from tidemill.models.ranks import ONE_RANK
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
    ServedTransport,
    WeightsAddress,
)
from tidemill.runtime.cluster.wire import Caller, calls, invoke, served, serves
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.extension_checks import identities, refuse_changed, run_extensions
from tidemill.runtime.memory_check import check_memory
from tidemill.runtime.model_bundle import load_model_bundle
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
    """Implements `core.protocols.Trainer`, `Checkpoints` and `Publisher` with one actor, or all ranks of a trainer.

    Args:
        warn: gets a message for every damaged checkpoint that was skipped.
    """

    def __init__(self, remote: Caller, version: PolicyVersion, *, warn: Callable[[str], None]) -> None:
        self._remote, self.version, self._warn = remote, version, warn

    accumulate = calls(Trainer.accumulate, timeout_s=NO_DEADLINE)
    logprobs = calls(Trainer.logprobs, timeout_s=NO_DEADLINE)
    save = calls(Checkpoints.save, timeout_s=NO_DEADLINE)  # into a folder that the trainer's process must see
    steps = calls(Checkpoints.steps, timeout_s=NO_DEADLINE)
    publish = calls(Publisher.publish, timeout_s=NO_DEADLINE)

    async def commit(self, step: int) -> StepMetrics:
        metrics = await invoke(self._remote, NO_DEADLINE, Trainer.commit, step)
        self.version = metrics.version
        return metrics

    async def restore_latest(self) -> int:
        restored = await invoke(self._remote, NO_DEADLINE, TrainerActor.restore_latest)
        for warning in restored.warnings:
            self._warn(warning)
        self.version = restored.version
        return restored.step

    async def close(self) -> None:
        """Nothing to do: the published objects end with the trainer's process."""


class TrainerActor(EngineActor, FrozenScorerServer):
    """Serves a `RayTrainer`, a `RayWorker` for its engine, and a `RayFrozenScorer` of the reference. One alone is the
    trainer; several are the ranks of a sharded one."""

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
    steps = serves(Checkpoints.steps, "checkpoints")
    publish = serves(Publisher.publish, "publisher")
    join_lane = serves(LaneSender.join_lane, "lane")
    send_weights = serves(LaneSender.send_weights, "lane")

    @served
    async def start(
        self,
        plan: TrainerPlan,
        index: int = 0,
        meeting: str = "",
        functions: Sequence[Extension] = (),
        critic: Any = None,
    ) -> Started:
        """Load the models; one of several ranks loads its rows of them.

        Args:
            meeting: path of a new file in a folder that all ranks see; empty for a trainer alone.
            functions: user functions that cannot be imported here.
            critic: handle of a `CriticActor` that has not been started and that no other rank calls; None for a critic
                in this process, or none.

        Raises:
            UserError: a model or the device cannot be used, a function differs on this machine, or the ranks do not see
                the folder.
        """
        spec = RunSpec.model_validate_json(plan.spec)
        provide(functions)
        here = identities(run_extensions(spec, trainer=True))
        refuse_changed({name: plan.identities[name] for name in here}, here, where="the trainer's machine")
        require_reserved_gpus(spec.ray.trainer_gpus, "ray.trainer_gpus")
        work: Work = "serve" if spec.task.kind == "served" else "rl"
        check_memory(spec, work, note=lambda _: None, alone=False)
        compute = ComputeThread()

        def start() -> Started:
            bundle = load_model_bundle(spec, progress=lambda _: None, generates=spec.engine_shares_model, work="rl")
            ranks = join_group(bundle.spec, bundle.device, meeting=Path(meeting), index=index) if meeting else ONE_RANK
            remote_critic, device_info = None, bundle.device_info
            if ranks.size > 1:
                device_info["shards"] = ranks.size
            if critic is not None:
                remote_critic = RayCritic(critic, index=index, meeting=f"{meeting}-critic" if meeting else "")
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
        return self._transport.address if self._transport is not None else None

    def _open_store(self, spec: RunSpec) -> WeightStore:
        """Raises UserError: the address to serve weights on cannot be used."""
        http = spec.weights.transport == "http"
        self._transport = ServedTransport(spec.weights) if http else ObjectStoreTransport()
        threads = Threads(spec.weights.threads)
        return WeightStore(self._transport, compute=ComputeThread("tidemill-weights"), threads=threads)
