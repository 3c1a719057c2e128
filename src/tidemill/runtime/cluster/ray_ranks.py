"""A sharded trainer: one actor for each rank, and the calls that reach all of them.

The ranks make the same decisions from the same groups, so every call goes to all and the first one's answer counts. A
rank that dies or is late ends the others: a collective operation cannot continue without it. The run resumes from its
checkpoint.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import TrainerLost, UserError
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
from tidemill.extensions.registry import Extension, session_functions
from tidemill.models.lora import adapter_of
from tidemill.models.snapshots import Part, snapshot_bytes, snapshot_layout, write_snapshot
from tidemill.runtime.backend import TrainerCheckpoints
from tidemill.runtime.cluster.ray_calls import Remote, decode, served, trainer_lost
from tidemill.runtime.cluster.ray_trainer import Started, TrainerActor, TrainerPlan, checked_spec
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import ModelBundle, build_critic, load_model_bundle
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import MEGABYTE, PolicyTrainer
from tidemill.trainer.scoring import completion_logprobs
from tidemill.trainer.sharding import GroupRanks, join_ranks, shard
from tidemill.weights.snapshot import Blob, allocate
from tidemill.weights.store import WeightStore

T = TypeVar("T")

RANK_S = 600.0
"""Deadline of a collective operation, and of the other ranks once the first has answered."""
START_S = 900.0
CAUSE_S = 5.0
"""After a failure, how long to wait for the answers of other ranks, which may tell its cause."""


class RankGroup:
    """Calls on all ranks; has the interface of `Remote`."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._remotes = [
            Remote(handle, lost=partial(trainer_lost, role=f"trainer's rank {index}"))
            for index, handle in enumerate(handles)
        ]

    @property
    def first(self) -> Remote:
        return self._remotes[0]

    async def start(self, plan: bytes, checkpoints: Path, *, kind: type[T]) -> T:
        """Start all ranks with their `start_rank`; they meet at a file in the folder of the checkpoints."""
        with _meeting_file(checkpoints) as meeting:
            return await self._call_each(
                "start_rank",
                [(plan, index, meeting, session_functions()) for index in range(len(self._remotes))],
                kind=kind,
                timeout_s=START_S,
            )

    async def call(self, method: str, *args: object, kind: type[T], timeout_s: float) -> T:
        """The answer of the first rank, when all have answered.

        Raises:
            TidemillError: what a rank raised, or that it died or was late; all ranks are ended.
        """
        return await self._call_each(method, [args] * len(self._remotes), kind=kind, timeout_s=timeout_s)

    async def _call_each(
        self, method: str, arguments: Sequence[Sequence[object]], *, kind: type[T], timeout_s: float
    ) -> T:
        calls = [
            asyncio.ensure_future(remote.call(method, *args, kind=kind, timeout_s=timeout_s))
            for remote, args in zip(self._remotes, arguments, strict=True)
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(calls, timeout=RANK_S, return_when=asyncio.FIRST_EXCEPTION)
            if all(call.done() and call.exception() is None for call in calls):
                return calls[0].result()
            await asyncio.wait(calls, timeout=CAUSE_S)
            raise self._failure(method, calls)
        except BaseException:
            self.kill()
            raise
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _failure(self, method: str, calls: Sequence[asyncio.Future[T]]) -> BaseException:
        """The error that explains the others: of a user, of a rank that died, any other, or that one is late."""
        raised = [error for call in calls if call.done() and (error := call.exception()) is not None]
        for kind in (UserError, TrainerLost, BaseException):
            for error in raised:
                if isinstance(error, kind):
                    return error
        late = next(index for index, call in enumerate(calls) if not call.done())
        cause = f"no answer to `{method}` within {RANK_S:.0f} s of the others"
        return trainer_lost(cause, "check its machine and its log", role=f"trainer's rank {late}")

    def kill(self) -> None:
        """End all ranks now."""
        for remote in self._remotes:
            remote.kill()


@contextmanager
def _meeting_file(folder: Path) -> Iterator[str]:
    """Path of a new file in a folder, which is created if needed; the file is removed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f".ranks-{uuid.uuid4().hex}"
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def join_group(spec: RunSpec, meeting: Path, *, index: int, device: torch.device) -> GroupRanks:
    """Join the ranks of a run, in the actor of one of them."""
    return join_ranks(
        meeting,
        size=spec.trainer.shards,
        index=index,
        device=device,
        timeout_s=RANK_S,
        one_machine=not spec.ray.address,
    )


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


class RankActor(TrainerActor):
    """One rank of a sharded trainer; generates nothing."""

    @served
    async def start_rank(self, plan: bytes, index: int, meeting: str, functions: Sequence[Extension] = ()) -> Started:
        """Load the models, and keep this rank's rows.

        Args:
            meeting: path of a new file in a folder that all ranks see.

        Raises:
            UserError: a model or the device cannot be used, or the ranks do not see the folder.
        """
        planned = decode(plan, TrainerPlan)
        spec, compute = checked_spec(planned, functions), ComputeThread()
        bundle = await compute.run(lambda: load_model_bundle(spec, progress=lambda _: None, generates=False))
        size = spec.trainer.shards
        ranks = await compute.run(lambda: join_group(spec, Path(meeting), index=index, device=bundle.device))
        offload = spec.trainer.offload == "optimizer"
        reference = bundle.forward_of(await compute.run(bundle.reference))
        critic = await compute.run(lambda: build_critic(bundle, progress=lambda _: None, ranks=ranks))

        def build() -> PolicyTrainer:
            shard(bundle.forward, ranks, offload=offload)
            if reference is not None:
                shard(reference, ranks)
            return PolicyTrainer(
                bundle.forward,
                spec,
                compute=compute,
                source=bundle.folder,
                reference=reference,
                critic=critic,
                ranks=ranks,
            )

        self._trainer = await compute.run(build)
        store = CheckpointStore(
            Path(planned.checkpoints), keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        self._checkpoints = TrainerCheckpoints(store, self._trainer, compute, warn=self._warnings.append, ranks=ranks)
        weights_compute = ComputeThread("tidemill-weights")
        self._publisher = ShardPublisher(
            bundle,
            WeightStore(self._transport, compute=weights_compute),
            compute=compute,
            probe_ids=planned.probe_ids,
        )
        return Started(
            version=self._trainer.version,
            device_info=bundle.device_info | {"shards": size},
            threads=bundle.threads,
            dtype=str(bundle.rollout_dtype).removeprefix("torch."),
        )
