"""The trainer's weights as published versions."""

from __future__ import annotations

from transformers import PreTrainedModel

from tidemill.core.buffers import ITEM_BYTES, LogprobBuffer, TokenBuffer, count
from tidemill.core.protocols import Compute, PromptSource
from tidemill.core.records import PolicyVersion, WeightManifest
from tidemill.models.lora import adapter_of
from tidemill.models.probe import probe_logprobs
from tidemill.models.snapshots import bind_snapshot, snapshot_bytes, snapshot_layout, twin_on_base, write_snapshot
from tidemill.weights.snapshot import allocate
from tidemill.weights.store import WeightStore
from tidemill.weights.transport import Blob

PROBE_TOKENS = 64


class ModelPublisher:
    """Implements `core.protocols.Publisher` over a model in this process.

    Of a model with an adapter a version is the adapter alone.

    Args:
        rollout_model: what engines compute with, which has the dtype that workers generate in. The probe is computed
            with weights rounded to it, as workers will: in bf16 the trainer's own would differ from them by more than
            any limit that still finds a fault.
        compute: the trainer's: nothing moves the weights while they are copied.
        sends_base: publish what lies under the adapter, too, once: for workers that cannot share it.
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
        """Only the copy and the probe hold the trainer up; checksums and deltas are the store's own."""
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
            snapshot = allocate(snapshot_bytes(layout))
            write_snapshot(self._rollout_model, layout, snapshot, part="base")
            return snapshot

        await self._store.publish_base(layout, await self._compute.run(export))
        self._base_due = False

    def _export(self) -> tuple[Blob, LogprobBuffer]:
        snapshot = allocate(snapshot_bytes(self._layout))
        write_snapshot(self._model, self._layout, snapshot)
        return snapshot, probe_logprobs(self._rounded(snapshot), self._probe_ids)

    def _rounded(self, snapshot: Blob) -> PreTrainedModel:
        """The model as it was written; on a GPU a copy of what was, until the probe is computed."""
        if self._model.dtype == self._rollout_model.dtype:
            return self._model
        twin = twin_on_base(self._rollout_model, self._rollout_model.dtype)
        bind_snapshot(twin, self._layout, snapshot)
        return twin


def probe_sequence(source: PromptSource) -> TokenBuffer:
    """Something the model knows to speak of: the beginning of the run's first prompt, at least two tokens."""
    token_ids = source.train_batch(1)[0][1].token_ids[: PROBE_TOKENS * ITEM_BYTES]
    return token_ids if count(token_ids) > 1 else token_ids * 2
