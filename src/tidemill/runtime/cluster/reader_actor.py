"""The process of a reward model or of the reference, and what the trainer's process shares with it."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TidemillError
from tidemill.core.protocols import Reader
from tidemill.core.records import Growth, Read, SampleId
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model
from tidemill.runtime.cluster.plan import ReaderPlan
from tidemill.runtime.cluster.serving import Asked, asked
from tidemill.runtime.cluster.wire import decode
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.local_reader import LocalReader
from tidemill.runtime.machine import choose_device, require_reserved_gpus
from tidemill.runtime.readers import reference_reader, reward_reader


class ReadingActor(Asked):
    """Base of the actors behind `reader.RayReader`."""

    def __init__(self) -> None:
        super().__init__()
        self.reader: Reader | None = None

    @asked
    async def grow(self, grown: bytes) -> None:
        self._reading().grow(decode(grown, list[Growth]))

    @asked
    async def read(self, sample_id: bytes, token_ids: bytes, prompt_tokens: int) -> Read:
        return await self._reading().read(decode(sample_id, SampleId), token_ids, prompt_tokens)

    @asked
    async def forget(self, sample_ids: bytes) -> None:
        self._reading().forget(decode(sample_ids, list[SampleId]))

    def _reading(self) -> Reader:
        if self.reader is None:
            raise TidemillError("this actor reads nothing")
        return self.reader


class ReaderActor(ReadingActor):
    """One model; it is killed, and another one started where it is lost."""

    @asked
    async def start_reader(self, plan: bytes) -> None:
        """Load the model.

        Raises:
            UserError: the model or the device cannot be had here.
        """
        planned = decode(plan, ReaderPlan)
        spec = RunSpec.model_validate_json(planned.spec)
        torch.set_num_threads(planned.threads)
        require_reserved_gpus(spec.placement.actor_gpus, "placement.actor_gpus")
        compute = ComputeThread("tidemill-reader")
        self.reader = await compute.run(lambda: _reader(spec, planned.reward_model, compute))


def _reader(spec: RunSpec, reward_model: str, compute: ComputeThread) -> LocalReader:
    if reward_model:
        return reward_reader(spec, Path(reward_model), compute)
    folder = resolve(spec.model, progress=lambda _: None)
    model = load_model(folder, device=choose_device(spec.trainer)).requires_grad_(False)
    return reference_reader(spec, model, compute)
