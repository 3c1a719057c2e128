"""The lane: weights broadcast from the trainer to a reserved engine in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.core.errors import WeightsError
from tidemill.core.protocols import Compute, Trainer
from tidemill.core.records import PolicyVersion, Record, TensorEntry, TokenBuffer
from tidemill.models.weight_stream import BroadcastGroup, check_dtypes, stream_layout, streamed_weights
from tidemill.rollout.weight_sources import StreamedWeights, StreamUser
from tidemill.runtime.model_bundle import ModelBundle

LANE_S = 120.0
"""Least deadline of joining the lane, and of every tensor."""
SEND_S = 600.0
TRAINER, ENGINE = 0, 1


class LanePlan(Record):
    """Where trainer and reserved engine meet, and what is sent."""

    meeting: str  # path of a new file in a folder that both see
    layout: tuple[TensorEntry, ...]
    probe_ids: TokenBuffer  # int32 [N]
    one_machine: bool
    engine_s: float  # how long the engine may take to start

    def join(self, index: int, device: torch.device) -> BroadcastGroup:
        """Raises UserError: the other member does not come."""
        return BroadcastGroup(
            Path(self.meeting),
            size=2,
            index=index,
            device=device,
            timeout_s=max(LANE_S, self.engine_s),
            one_machine=self.one_machine,
        )


class LaneSender:
    """The trainer's end.

    Args:
        sends: whether this process broadcasts; the other ranks of a sharded trainer only give their rows.
    """

    def __init__(self, bundle: ModelBundle, trainer: Trainer, compute: Compute, *, sends: bool) -> None:
        self._bundle, self._trainer, self._compute, self._sends = bundle, trainer, compute, sends
        self._group: BroadcastGroup | None = None
        self.layout = stream_layout(bundle.model, bundle.rollout_dtype)

    async def join_lane(self, plan: LanePlan) -> None:
        """Meet the reserved engine. Raises UserError: it does not come."""
        if self._sends:
            self._group = await self._compute.run(lambda: plan.join(TRAINER, self._bundle.device))

    async def send_weights(self, version: PolicyVersion) -> None:
        """Send the current version to the reserved engine.

        Raises:
            WeightsError: it is another version, or the engine is gone or does not take a tensor in time.
        """
        current = self._trainer.version
        if version != current:
            raise WeightsError(f"the trainer has version {current.number}, not {version.number}")

        def send() -> None:
            stream = streamed_weights(self._bundle.model, self._bundle.rollout_dtype)
            if self._group is not None:
                self._group.send(stream)
            else:
                for _ in stream:
                    pass

        await self._compute.run(send)


async def open_lane(plan: LanePlan, user: StreamUser, compute: Compute, *, device: str, dtype: str) -> StreamedWeights:
    """The engine's end.

    Args:
        device: of the engine: "cpu", or "cuda" for the only one that its process sees.
        dtype: of its weights.

    Raises:
        UserError: the trainer does not come, or sends another dtype.
    """
    check_dtypes(plan.layout, dtype)
    group = await compute.run(lambda: plan.join(ENGINE, torch.device("cuda:0" if device == "cuda" else device)))
    return StreamedWeights(user, lambda _: iter([("learned", group.receive(plan.layout))]), probe_ids=plan.probe_ids)
