"""A reward model or the reference in an actor, which is restarted when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch
from ray.exceptions import RayError

from tidemill.config.schema import RunSpec
from tidemill.core.errors import ScorerLost, TidemillError
from tidemill.core.protocols import FrozenScorer
from tidemill.core.records import ModelScores, Record, SampleId, TokenBuffer
from tidemill.models.catalog import resolve
from tidemill.models.loading import load_model
from tidemill.runtime.cluster.ray_calls import (
    ActorResources,
    Remote,
    lost_message,
    placed,
    require_reserved_gpus,
    spec_to_send,
)
from tidemill.runtime.cluster.wire import AsyncActor, asks, invoke, served, serves
from tidemill.runtime.compute import ComputeThread, choose_device
from tidemill.runtime.frozen_scorers import TokenCounter, local_reference, local_reward_model
from tidemill.runtime.vllm_scorers import VllmFrozenScorer, vllm_scorer


class FrozenScorerPlan(Record):
    """Arguments of `FrozenScorerActor.start_frozen_scorer`."""

    spec: str  # a RunSpec as JSON
    threads: int  # inside one operation
    reward_model: str = ""  # its folder; empty for the reference
    prompt_tokens: int = 0  # length of the longest prompt


class FrozenScorerServer(AsyncActor):
    """Base of actors that serve a `RayFrozenScorer`."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen_scorer: FrozenScorer | None = None

    receive = serves(FrozenScorer.receive, "frozen_scorer")
    score = serves(FrozenScorer.score, "frozen_scorer")
    forget = serves(FrozenScorer.forget, "frozen_scorer")


class FrozenScorerActor(FrozenScorerServer):
    """An actor with one frozen model."""

    @served
    async def start_frozen_scorer(self, plan: FrozenScorerPlan) -> None:
        """Load the model.

        Raises:
            UserError: the model or the device cannot be used.
        """
        spec = RunSpec.model_validate_json(plan.spec)
        torch.set_num_threads(plan.threads)
        placement = spec.placement
        require_reserved_gpus(placement.actor_tensor_parallel * placement.actor_gpus, "placement.actor_gpus")
        compute = ComputeThread("tidemill-frozen")

        def load() -> FrozenScorer:
            if placement.scoring_engine == "vllm":
                folder = Path(plan.reward_model) if plan.reward_model else resolve(spec.model, progress=lambda _: None)
                reward, prompt_tokens = bool(plan.reward_model), plan.prompt_tokens
                scorer = vllm_scorer(spec, folder, reward=reward, slots=MAX_CONCURRENT, prompt_tokens=prompt_tokens)
                return VllmFrozenScorer(scorer, compute)
            if plan.reward_model:
                return local_reward_model(spec, Path(plan.reward_model), compute)
            folder = resolve(spec.model, progress=lambda _: None)
            model = load_model(folder, device=choose_device(spec.trainer)).requires_grad_(False)
            return local_reference(spec, model, compute)

        self.frozen_scorer = await compute.run(load)


LOAD_S = 900.0
SCORE_S = 600.0
MAX_CONCURRENT = 8
"""Samples that an actor scores at the same time."""
MAX_RESTARTS = 3
"""Consecutive restarts without a sample being scored."""

Restart = Callable[[ScorerLost], Awaitable[Remote]]
"""Starts a replacement for a lost actor. Raises ScorerLost: it cannot be started."""


class RayFrozenScorer(TokenCounter):
    """Implements `core.protocols.FrozenScorer` with a `FrozenScorerServer`.

    A lost actor is replaced; samples that were being scored are scored again.

    Args:
        restart: None if the actor also trains, so that its end is the end of the run.
        score_s: deadline for scoring `MAX_CONCURRENT` samples; after it the actor counts as lost.
    """

    def __init__(self, remote: Remote, *, restart: Restart | None = None, score_s: float = SCORE_S) -> None:
        super().__init__()
        self._remote, self._restart, self._score_s = remote, restart, score_s
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = 0  # since a sample was scored

    receive = asks(FrozenScorer.receive)
    forget = asks(FrozenScorer.forget)

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        async with self._slots:
            while True:
                remote = self._remote
                try:
                    scores = await invoke(
                        remote, self._score_s, FrozenScorer.score, sample_id, token_ids, prompt_tokens
                    )
                    break
                except ScorerLost as error:
                    await self._replace(remote, error)
        self._restarts = 0
        self.add(sample_id, scores)
        return scores

    async def close(self) -> None:
        """Stop a restart; the code that started the actor ends it."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)

    async def _replace(self, remote: Remote, error: ScorerLost) -> None:
        """Wait for the replacement of `remote`; the first caller starts it.

        Raises:
            ScorerLost: it cannot be started, or too many died in a row.
        """
        if self._remote is remote and self._restarting is None:
            if self._restart is None or self._restarts == MAX_RESTARTS:
                raise error
            self._restarts += 1
            self._restarting = asyncio.create_task(self._start(self._restart, error), name="frozen model restart")
        if self._restarting is not None:
            await asyncio.shield(self._restarting)

    async def _start(self, restart: Restart, error: ScorerLost) -> None:
        self._remote = await restart(error)
        self._restarting = None


class FrozenScorerProcess:
    """Starts the actor of one model, and its replacements.

    Args:
        role: for messages.
        reward_model: folder of the model; None for the reference.
        selector: labels of the nodes it may run on.
        folder: folder of the policy's model.
        prompt_tokens: length of the longest prompt.
        on_restart: called with the role and the cause.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        role: str,
        reward_model: Path | None,
        folder: Path,
        prompt_tokens: int,
        selector: dict[str, str],
        on_restart: Callable[[str, str], None],
    ) -> None:
        self._placement, self._role, self._selector, self._on_restart = spec.placement, role, selector, on_restart
        self._plan = FrozenScorerPlan(
            spec=spec_to_send(spec, folder),
            threads=max(1, int(spec.placement.actor_cpus)),
            reward_model="" if reward_model is None else str(reward_model.resolve()),
            prompt_tokens=prompt_tokens,
        )
        self._actor = AsyncExitStack()

    async def start(self) -> RayFrozenScorer:
        """
        Raises:
            UserError: no node has room for it, or its model cannot be loaded.
            ScorerLost: its process died.
        """
        return RayFrozenScorer(await self._start_actor(), restart=self._replace)

    async def close(self) -> None:
        await self._actor.aclose()

    async def _start_actor(self) -> Remote:
        placement, ranks = self._placement, self._placement.actor_tensor_parallel
        resources = ActorResources(ranks * placement.actor_cpus, ranks * placement.actor_gpus, "placement.actor")
        selector = self._selector
        (handle,) = await self._actor.enter_async_context(placed(FrozenScorerActor, self._role, resources, selector))
        remote = Remote(handle, lost=partial(frozen_scorer_lost, self._role))
        await invoke(remote, LOAD_S, FrozenScorerActor.start_frozen_scorer, self._plan)
        return remote

    async def _replace(self, error: ScorerLost) -> Remote:
        self._on_restart(self._role, str(error).splitlines()[0])
        await self._actor.aclose()
        try:
            return await self._start_actor()
        except (TidemillError, RayError) as second:
            raise ScorerLost(f"{error}\n  and it cannot be restarted: {second}") from second


def frozen_scorer_lost(role: str, cause: str, hint: str) -> ScorerLost:
    return ScorerLost(lost_message(role, cause, hint))
