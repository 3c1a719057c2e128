"""One rank of a sharded trainer, in an actor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidemill.config.schema import RunSpec
from tidemill.extensions.registry import Extension
from tidemill.runtime.backend import TrainerCheckpoints
from tidemill.runtime.cluster.rank_group import RANK_S
from tidemill.runtime.cluster.ray_calls import Remote, decode, served, trainer_lost
from tidemill.runtime.cluster.ray_trainer import Started, TrainerActor, TrainerPlan, checked_spec
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.model_bundle import load_model_bundle, sharded_models
from tidemill.trainer.checkpoint_store import CheckpointStore
from tidemill.trainer.policy import PolicyTrainer
from tidemill.trainer.sharding import GroupRanks, join_ranks


def rank_remotes(handles: Sequence[Any]) -> list[Remote]:
    """Calls on the actors of all ranks, for a `RankGroup`."""
    return [
        Remote(handle, lost=partial(trainer_lost, role=f"trainer's rank {index}"))
        for index, handle in enumerate(handles)
    ]


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


class RankActor(TrainerActor):
    """One rank of a sharded trainer; generates only if the engine is colocated."""

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

        def build() -> PolicyTrainer:
            reference, critic = sharded_models(bundle, ranks)
            return PolicyTrainer(
                bundle.forward,
                spec,
                compute=compute,
                source=bundle.folder,
                reference=reference,
                critic=critic,
                ranks=ranks,
            )

        self.rank, self._trainer = index, (trainer := await compute.run(build))
        store = CheckpointStore(
            Path(planned.checkpoints), keep_last=spec.checkpoint.keep_last, keep_best=spec.checkpoint.keep_best
        )
        self._checkpoints = TrainerCheckpoints(store, trainer, compute, warn=self._warnings.append, ranks=ranks)
        return await self._connected(planned, bundle, trainer, compute, bundle.device_info | {"shards": size})
