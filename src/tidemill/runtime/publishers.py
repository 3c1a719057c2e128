"""Publish the versions of a model in this process: whole, one rank's rows, or for an engine that gets them directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

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
from tidemill.trainer.scoring import completion_logprobs
from tidemill.weights.snapshot import Blob, allocate
from tidemill.weights.store import WeightStore

PROBE_TOKENS = 64
AUTOCAST_SLACK = 0.4
"""Nats. Other weights differ by several."""


@dataclass(eq=False)
class ModelPublisher:
    """Implements `core.protocols.Publisher` for a model in this process.

    For a model with an adapter a version is the adapter alone. The probe is computed with weights rounded to the dtype
    of `rollout_model`, as workers will do: in bf16 the trainer's own result would differ from theirs by more than any
    limit that still detects a fault.
    """

    model: PreTrainedModel
    store: WeightStore
    _: KW_ONLY
    rollout_model: PreTrainedModel  # the model that engines use, in the dtype that workers generate in
    compute: Compute  # the trainer's, so that weights do not change while they are copied
    probe_ids: TokenBuffer
    probe_slack: float = 0.0
    sends_base: bool = False  # also publish the base under the adapter, once, for workers that cannot share it
    dtype: torch.dtype | None = None  # of the published weights; None: that of `rollout_model`

    def __post_init__(self) -> None:
        self._dtype = self.dtype or self.rollout_model.dtype
        self._layout = snapshot_layout(self.model, self._dtype)
        self._base_due = self.sends_base and adapter_of(self.model) is not None

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        """Publish the weights. The trainer waits for the copy and the probe only, not for checksums and deltas."""
        latest = self.store.latest
        if latest is not None and latest.version == version:
            return latest
        if self._base_due:
            layout = snapshot_layout(self.rollout_model, self._dtype, part="base")
            base = await self.compute.run(lambda: _snapshot(self.rollout_model, layout, "base"))
            await self.store.publish_base(layout, base)
            self._base_due = False
        await self.store.make_room()
        snapshot, logprobs = await self.compute.run(self._export)
        return await self.store.publish(
            version,
            self._layout,
            snapshot,
            probe_ids=self.probe_ids,
            probe_logprobs=logprobs,
            probe_slack=self.probe_slack,
        )

    async def close(self) -> None:
        await self.store.close()

    def _export(self) -> tuple[Blob, LogprobBuffer]:
        snapshot = _snapshot(self.model, self._layout, "learned")
        return snapshot, self._probe(snapshot)

    def _probe(self, snapshot: Blob) -> LogprobBuffer:
        model = self.model
        if model.dtype != self._dtype:  # on a GPU this needs a second copy until the probe is computed
            model = copy_on_base(self.rollout_model, self._dtype)
            bind_snapshot(model, self._layout, snapshot)
        return probe_logprobs(model, self.probe_ids)


class ShardPublisher(ModelPublisher):
    """Publishes the rows of one rank: its snapshots and deltas are those of a model that has only these rows. A worker
    pulls the same version from every rank. Every rank computes the same logprobs of the probe.
    """

    def __init__(self, bundle: ModelBundle, store: WeightStore, *, compute: Compute, probe_ids: TokenBuffer) -> None:
        dtype, model = bundle.rollout_dtype, bundle.model
        super().__init__(
            model, store, rollout_model=model, compute=compute, probe_ids=probe_ids, sends_base=True, dtype=dtype
        )
        self.bundle, self.probe_slack = bundle, probe_slack(bundle)

    def _probe(self, snapshot: Blob) -> LogprobBuffer:
        return bundle_probe(self.bundle, self.probe_ids)


@dataclass(frozen=True, slots=True)
class ProbePublisher:
    """Implements `core.protocols.Publisher` without storing anything: for engines that get the weights directly.

    A manifest has the logprobs of the probe only.
    """

    bundle: ModelBundle
    _: KW_ONLY
    compute: Compute
    probe_ids: TokenBuffer

    async def publish(self, version: PolicyVersion) -> WeightManifest:
        logprobs = await self.compute.run(lambda: bundle_probe(self.bundle, self.probe_ids))
        return WeightManifest(
            version=version,
            digest=version.digest,
            nbytes=0,
            tensors=(),
            probe_ids=self.probe_ids,
            probe_logprobs=logprobs,
            probe_slack=probe_slack(self.bundle),
        )

    async def close(self) -> None:
        """Nothing to do."""


def _snapshot(model: PreTrainedModel, layout: Sequence[TensorEntry], part: Part) -> Blob:
    """A copy of a part of the weights, in pinned memory if they are on a GPU, which then copies at full speed."""
    nbytes = snapshot_bytes(layout)
    pinned = model.device.type == "cuda"
    snapshot: Blob = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy() if pinned else allocate(nbytes)
    write_snapshot(model, layout, snapshot, part=part)
    return snapshot


def probe_slack(bundle: ModelBundle) -> float:
    """By how much an engine's probe may differ because the trainer computes it in autocast, over fp32 weights: 0.04 to
    0.15 nats on SmolLM2."""
    return 0.0 if bundle.autocast is None else AUTOCAST_SLACK


@torch.no_grad()
def bundle_probe(bundle: ModelBundle, probe_ids: TokenBuffer) -> LogprobBuffer:
    """Logprobs of the probe in the trainer's precision; every rank computes the same ones."""
    completion = Completion(prompt_ids=probe_ids[:ITEM_BYTES], token_ids=probe_ids[ITEM_BYTES:])
    budget = bundle.spec.trainer.logits_bytes(on_gpu=bundle.device.type == "cuda")
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
