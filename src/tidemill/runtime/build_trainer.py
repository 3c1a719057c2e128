"""The one place that puts a policy trainer and its parts together: in this process, in an actor, or as one of several
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.protocols import Clock, Publisher, Trainer
from tidemill.core.records import TokenBuffer
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.rollout.worker import EngineWorker
from tidemill.runtime.backend import TrainerCheckpoints, checkpoint_store
from tidemill.runtime.colocated import open_colocated
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.frozen_scorers import LocalFrozenScorer, local_reference
from tidemill.runtime.model_bundle import ModelBundle, reference_and_critic
from tidemill.runtime.publishers import ModelPublisher, ProbePublisher, ShardPublisher
from tidemill.trainer.critic import Critic
from tidemill.trainer.policy import PolicyTrainer
from tidemill.weights.store import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """A policy trainer and what shares its process."""

    trainer: Trainer  # what the loop drives: the policy's trainer, or one that takes turns with the engine
    checkpoints: TrainerCheckpoints
    engine: EngineWorker | None  # None: it is in another process
    frozen_reference: LocalFrozenScorer | None  # if it computes samples during generation
    publisher: Publisher | None


def build_trainer(
    bundle: ModelBundle,
    compute: ComputeThread,
    *,
    clock: Clock,
    checkpoints: Path,
    prompt_tokens: int,
    probe_ids: TokenBuffer,
    open_store: Callable[[], WeightStore],
    sends_base: bool,
    progress: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None],
    ranks: Ranks = ONE_RANK,
    critic: Critic | None = None,
) -> TrainerParts:
    """Build a trainer as the configuration says.

    Args:
        bundle: just loaded. With several ranks this rank's rows are loaded here.
        compute: runs the trainer, the engine and the reference, one at a time.
        probe_ids: published with every version; empty if none is published.
        open_store: called if versions are stored for workers to pull.
        sends_base: workers cannot share the base model under an adapter.
        critic: in another process; None builds the one that the algorithm needs.

    Raises:
        UserError: the critic, the engine or the address of the weights cannot be used.
    """
    spec = bundle.spec
    reference, own_critic = reference_and_critic(bundle, ranks, remote=critic is not None, progress=progress)
    policy = PolicyTrainer(
        bundle.forward,
        spec,
        compute=compute,
        source=bundle.folder,
        reference=reference,
        critic=critic or own_critic,
        ranks=ranks,
    )
    trainer: Trainer = policy
    engine: EngineWorker | None = None
    if spec.engine_shares_model:
        shared = bundle.engine(policy.version, prompt_tokens=prompt_tokens)
        engine = EngineWorker(shared, compute, clock=clock, tick_s=spec.engine.tick_s)
    elif spec.placement.engine == "colocated":
        engine, trainer = open_colocated(
            bundle, policy, compute, clock=clock, prompt_tokens=prompt_tokens, probe_ids=probe_ids
        )
    frozen_reference: LocalFrozenScorer | None = None
    if spec.reading.ahead and reference is not None and ranks.size == 1:
        frozen_reference = local_reference(spec, reference.model, compute)
    publisher: Publisher | None = None
    if probe_ids and spec.engine_shares_model:
        publisher = ModelPublisher(
            bundle.model,
            open_store(),
            compute=compute,
            rollout_model=bundle.rollout_model,
            probe_ids=probe_ids,
            sends_base=sends_base,
        )
    elif probe_ids and (spec.is_elastic or (spec.engine_is_apart and spec.weights.lane == "none")):
        publisher = ShardPublisher(bundle, open_store(), compute=compute, probe_ids=probe_ids)  # no second copy
    elif probe_ids:
        publisher = ProbePublisher(bundle, compute=compute, probe_ids=probe_ids)
    return TrainerParts(
        trainer=trainer,
        checkpoints=TrainerCheckpoints(checkpoint_store(spec, checkpoints), policy, compute, warn=warn, ranks=ranks),
        engine=engine,
        frozen_reference=frozen_reference,
        publisher=publisher,
    )
