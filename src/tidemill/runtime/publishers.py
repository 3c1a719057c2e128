"""Publish the versions of a model in this process: whole, one rank's rows, or for an engine that gets them directly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.protocols import Compute, PromptSource
from tidemill.core.records import (
    ITEM_BYTES,
    Completion,
    LogprobBuffer,
    PolicyVersion,
    TensorEntry,
    TokenBuffer,
    WeightManifest,
    count,
)
from tidemill.models.loading import probe_logprobs
from tidemill.models.lora import adapter_of
from tidemill.models.snapshots import Part, bind_snapshot, copy_on_base, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.runtime.model_bundle import ModelBundle
from tidemill.trainer.policy import MEGABYTE
from tidemill.trainer.scoring import completion_logprobs
from tidemill.weights.snapshot import Blob, allocate
from tidemill.weights.store import WeightStore

PROBE_TOKENS = 64
AUTOCAST_SLACK = 0.4
"""Nats. Other weights differ by several."""


class ModelPublisher:
    """Implements `core.protocols.Publisher` for a model in this process.

    For a model with an adapter a version is the adapter alone.

    Args:
        rollout_model: the model that engines use, in the dtype that workers generate in. The probe is computed with
            weights rounded to that dtype, as workers will do: in bf16 the trainer's own result would differ from
            theirs by more than any limit that still detects a fault.
        compute: the trainer's, so that weights do not change while they are copied.
        sends_base: also publish the base model under the adapter, once, for workers that cannot share it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        *,
        rollout_model: PreTrainedModel,
        compute: Compute,
        probe_ids: TokenBuffer,
        sends_base: bool = False,
    ) -> None:
        self._model, self._store, self._compute = model, store, compute
        self._rollout_model, self._probe_ids = rollout_model, probe_ids
        self._layout = snapshot_layout(model, rollout_model.dtype)
        self._base_due = sends_base and adapter_of(model) is not None

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        """Publish the weights. The trainer waits for the copy and the probe only, not for checksums and deltas."""
        latest = self._store.latest
        if latest is not None and latest.version == version:
            return latest
        if self._base_due:
            await self._publish_base()
        await self._store.make_room()
        snapshot, logprobs = await self._compute.run(self._export)
        return await self._store.publish(
            version, self._layout, snapshot, probe_ids=self._probe_ids, probe_logprobs=logprobs
        )

    async def close(self) -> None:
        await self._store.close()

    async def _publish_base(self) -> None:
        layout = snapshot_layout(self._rollout_model, self._rollout_model.dtype, part="base")

        def export() -> Blob:
            snapshot = snapshot_buffer(snapshot_bytes(layout), self._model.device)
            write_snapshot(self._rollout_model, layout, snapshot, part="base")
            return snapshot

        await self._store.publish_base(layout, await self._compute.run(export))
        self._base_due = False

    def _export(self) -> tuple[Blob, LogprobBuffer]:
        snapshot = snapshot_buffer(snapshot_bytes(self._layout), self._model.device)
        write_snapshot(self._model, self._layout, snapshot)
        model = self._model
        if model.dtype != self._rollout_model.dtype:  # on a GPU this needs a second copy until the probe is computed
            model = copy_on_base(self._rollout_model, self._rollout_model.dtype)
            bind_snapshot(model, self._layout, snapshot)
        return snapshot, probe_logprobs(model, self._probe_ids)


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
        snapshot, logprobs = await self._compute.run(
            lambda: (self._copied(self._layout, "learned"), bundle_probe(self._bundle, self._probe_ids))
        )
        return await self._store.publish(
            version,
            self._layout,
            snapshot,
            probe_ids=self._probe_ids,
            probe_logprobs=logprobs,
            probe_slack=probe_slack(self._bundle),
        )

    async def close(self) -> None:
        await self._store.close()

    def _copied(self, layout: Sequence[TensorEntry], part: Part) -> Blob:
        snapshot = snapshot_buffer(snapshot_bytes(layout), self._bundle.device)
        write_snapshot(self._bundle.model, layout, snapshot, part=part)
        return snapshot


class ProbePublisher:
    """Implements `core.protocols.Publisher` without storing anything: for engines that get the weights directly.

    A manifest has the logprobs of the probe only.
    """

    def __init__(self, bundle: ModelBundle, *, compute: Compute, probe_ids: TokenBuffer) -> None:
        self._bundle, self._compute, self._probe_ids = bundle, compute, probe_ids

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        logprobs = await self._compute.run(lambda: bundle_probe(self._bundle, self._probe_ids))
        return WeightManifest(
            version=version,
            digest=version.digest,
            nbytes=0,
            tensors=(),
            probe_ids=self._probe_ids,
            probe_logprobs=logprobs,
            probe_slack=probe_slack(self._bundle),
        )

    async def close(self) -> None:
        """Nothing to do."""


def snapshot_buffer(nbytes: int, device: torch.device) -> Blob:
    """An aligned, uninitialised buffer; pinned if `device` is a GPU, which then copies into it at full speed."""
    if device.type != "cuda":
        return allocate(nbytes)
    pinned: Blob = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


def probe_slack(bundle: ModelBundle) -> float:
    """By how much an engine's probe may differ because the trainer computes it in autocast, over fp32 weights: 0.04 to
    0.15 nats on SmolLM2."""
    return 0.0 if bundle.autocast is None else AUTOCAST_SLACK


@torch.no_grad()
def bundle_probe(bundle: ModelBundle, probe_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs of the probe in the trainer's precision; every rank computes the same ones."""
    completion = Completion(prompt_ids=probe_ids[:ITEM_BYTES], token_ids=probe_ids[ITEM_BYTES:])
    budget = bundle.spec.trainer.logits_budget_mb * MEGABYTE
    (logprobs,) = completion_logprobs(
        bundle.forward, [completion], budget=1, temperature=1.0, logits_budget_bytes=budget
    )
    return logprobs


def probe_sequence(source: PromptSource) -> TokenBuffer:
    """The tokens that workers verify new weights on: the start of the first prompt, at least two tokens."""
    token_ids = source.train_batch(1)[0][1].token_ids[: PROBE_TOKENS * ITEM_BYTES]
    return token_ids if count(token_ids) > 1 else token_ids * 2


def published_probe(spec: RunSpec, source: PromptSource) -> TokenBuffer:
    """The probe of a run's versions; empty if none is published, because no engine has weights of its own."""
    return probe_sequence(source) if spec.is_elastic or not spec.engine_shares_model else b""
