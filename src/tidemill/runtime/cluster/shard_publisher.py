"""Publishes the rows of one rank of a sharded trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidemill.core.protocols import Compute
from tidemill.core.records import (
    ITEM_BYTES,
    Completion,
    LogprobBuffer,
    PolicyVersion,
    TensorEntry,
    TokenBuffer,
    WeightManifest,
)
from tidemill.models.lora import adapter_of
from tidemill.models.snapshots import Part, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.runtime.model_bundle import ModelBundle
from tidemill.trainer.policy import MEGABYTE
from tidemill.trainer.scoring import completion_logprobs
from tidemill.weights.snapshot import Blob, allocate
from tidemill.weights.store import WeightStore


class ShardPublisher:
    """Implements `core.protocols.Publisher` for the rows of one rank: its snapshots and deltas are those of a model
    that has only these rows. A worker pulls the same version from every rank.

    Every rank computes the same logprobs of the probe.
    """

    def __init__(self, bundle: ModelBundle, store: WeightStore, *, compute: Compute, probe_ids: TokenBuffer) -> None:
        self._bundle, self._store, self._compute, self._probe_ids = bundle, store, compute, probe_ids
        self._layout = snapshot_layout(bundle.model, bundle.rollout_dtype)
        self._base_due = adapter_of(bundle.model) is not None

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        """Publish this rank's rows. The trainer waits for the copy and the probe only."""
        latest = self._store.latest
        if latest is not None and latest.version == version:
            return latest
        if self._base_due:
            layout = snapshot_layout(self._bundle.model, self._bundle.rollout_dtype, part="base")
            await self._store.publish_base(layout, await self._compute.run(lambda: self._copied(layout, "base")))
            self._base_due = False
        await self._store.make_room()
        snapshot, logprobs = await self._compute.run(lambda: (self._copied(self._layout, "learned"), self._probe()))
        return await self._store.publish(
            version, self._layout, snapshot, probe_ids=self._probe_ids, probe_logprobs=logprobs
        )

    async def close(self) -> None:
        await self._store.close()

    def _copied(self, layout: Sequence[TensorEntry], part: Part) -> Blob:
        snapshot = allocate(snapshot_bytes(layout))
        write_snapshot(self._bundle.model, layout, snapshot, part=part)
        return snapshot

    @torch.no_grad()
    def _probe(self) -> LogprobBuffer:
        completion = Completion(prompt_ids=self._probe_ids[:ITEM_BYTES], token_ids=self._probe_ids[ITEM_BYTES:])
        budget = self._bundle.spec.trainer.logits_budget_mb * MEGABYTE
        (logprobs,) = completion_logprobs(
            self._bundle.forward, [completion], budget=1, temperature=1.0, logits_budget_bytes=budget
        )
        return logprobs
