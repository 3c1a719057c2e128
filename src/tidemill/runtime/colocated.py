"""Trainer and engine in one process take turns on its device: the engine sleeps while the trainer computes a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidemill.core.errors import UserError, WeightsError
from tidemill.core.protocols import Clock, Compute, Engine, Trainer
from tidemill.core.records import Completion, Group, LogprobBuffer, PolicyVersion, StepMetrics, TokenBuffer
from tidemill.models.lora import adapter_of
from tidemill.models.snapshots import DTYPE_NAMES, Part
from tidemill.models.weight_stream import WeightStream, streamed_weights
from tidemill.rollout.weight_sources import StreamedWeights
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.model_bundle import ModelBundle
from tidemill.runtime.open_engine import open_engine


class AlternatingTrainer:
    """Implements `core.protocols.Trainer`. Groups wait until their batch is complete; then the engine sleeps until it
    loads the next version.

    Args:
        compute: runs the engine's calls and the trainer's, one at a time.
    """

    def __init__(self, trainer: Trainer, engine: Engine, weights: StreamedWeights, compute: Compute) -> None:
        self._trainer, self._engine, self._weights, self._compute = trainer, engine, weights, compute
        self._groups: list[Group] = []

    @property
    def version(self) -> PolicyVersion:
        return self._trainer.version

    async def accumulate(self, group: Group) -> None:
        self._groups.append(group)

    async def commit(self, step: int) -> StepMetrics:
        """Raises RuntimeError: a sample is running."""
        await self._compute.run(self._put_to_sleep)
        groups, self._groups = self._groups, []
        for group in groups:
            await self._trainer.accumulate(group)
        return await self._trainer.commit(step)

    async def logprobs(self, completions: Sequence[Completion]) -> Sequence[LogprobBuffer]:
        return await self._trainer.logprobs(completions)

    def _put_to_sleep(self) -> None:
        if running := self._engine.status().running:
            raise RuntimeError(f"the engine cannot sleep: {running} samples are running")
        self._weights.sleep()


def open_colocated(
    bundle: ModelBundle,
    trainer: Trainer,
    compute: Compute,
    *,
    clock: Clock,
    prompt_tokens: int,
    probe_ids: TokenBuffer,
) -> tuple[EngineWorker, AlternatingTrainer]:
    """The engine of `engine.kind` in this process, and the trainer that takes turns with it.

    Args:
        bundle: the trainer's; every rank of a sharded one opens an engine, and all load a version at the same time.

    Raises:
        UserError: this machine cannot run the engine, or it runs on another device than the trainer.
    """
    spec, dtype = bundle.spec, bundle.rollout_dtype
    engine, user = open_engine(spec, bundle.folder, prompt_tokens=prompt_tokens, dtype=DTYPE_NAMES[dtype])
    if user.device_type != bundle.device.type:
        raise UserError(
            f"the engine computes on {user.device_type}, and the trainer on {bundle.device.type}",
            where="placement.engine",
            hint='a colocated engine shares the trainer\'s device: change trainer.device, or set it to "own"',
        )
    parts: tuple[Part, ...] = ("learned",) if adapter_of(bundle.model) is None else ("base", "learned")

    def streams(version: PolicyVersion) -> Iterator[tuple[Part, WeightStream]]:
        if version != trainer.version:
            raise WeightsError(f"the trainer has version {trainer.version.number}, not {version.number}")
        for part in parts:
            yield part, streamed_weights(bundle.model, dtype, part=part)

    weights = StreamedWeights(user, streams, probe_ids=probe_ids)
    worker = EngineWorker(engine, compute, clock=clock, tick_s=spec.engine.tick_s, source=weights)
    return worker, AlternatingTrainer(trainer, engine, weights, compute)
