"""Frozen models that vLLM computes, as scorers of finished samples."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Sequence
from pathlib import Path

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import ScorerLost
from tidemill.core.records import ModelScores, NewTokens, SampleId, TokenBuffer, count
from tidemill.models.auto import load_config
from tidemill.models.catalog import merged_folder
from tidemill.models.checkpoint_manifest import refuse_damaged
from tidemill.models.reward_model import load_head
from tidemill.models.snapshots import stored_context_limit
from tidemill.rollout.engines.vllm import check_family, check_version
from tidemill.rollout.engines.vllm.engine import VllmSettings
from tidemill.rollout.engines.vllm.scoring import VllmReference, VllmReward, VllmScorer
from tidemill.runtime.compute import ComputeThread, choose_device, choose_precision
from tidemill.runtime.frozen_scorers import TokenCounter
from tidemill.runtime.model_bundle import engine_context


class VllmFrozenScorer(TokenCounter):
    """Implements `core.protocols.FrozenScorer`. Samples that wait at the same time are computed together.

    Args:
        thread: where vLLM was started; it is closed with the model.
    """

    def __init__(self, scorer: VllmScorer, thread: ComputeThread) -> None:
        super().__init__()
        self._scorer, self._thread = scorer, thread
        self._waiting: list[tuple[TokenBuffer, int, Future[bytes]]] = []
        self._inside: dict[str, Future[bytes]] = {}  # by name
        self._stepping: asyncio.Task[None] | None = None

    def receive(self, new_tokens: Sequence[NewTokens]) -> None:
        """Do nothing: vLLM scores finished samples."""

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        """Raises ScorerLost: vLLM failed, for example because one of its ranks ended."""
        scored: Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, prompt_tokens, scored))
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_until_done(), name="vLLM scoring")
        scores = ModelScores(values=await scored, tokens_ahead=0, tokens_late=count(token_ids))
        self.add(sample_id, scores)
        return scores

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        """Do nothing: unfinished samples are not known here."""

    async def close(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})
        await self._thread.run(self._scorer.close)
        await self._thread.close()

    async def _step_until_done(self) -> None:
        try:
            while self._waiting or self._inside:
                for name, values in (await self._thread.run(self._step)).items():
                    scored = self._inside.pop(name)
                    if not scored.done():  # otherwise its caller is gone
                        scored.set_result(values)
        except Exception as error:  # noqa: BLE001 - raised by `score`; vLLM does not recover
            for scored in (*self._inside.values(), *(scored for _, _, scored in self._waiting)):
                if not scored.done():
                    scored.set_exception(ScorerLost(f"vLLM failed: {error}"))
            self._inside.clear()
            self._waiting.clear()
        finally:
            self._stepping = None

    def _step(self) -> dict[str, bytes]:
        while self._waiting:
            token_ids, prompt_tokens, scored = self._waiting[0]
            self._inside[self._scorer.add(token_ids, prompt_tokens)] = scored
            del self._waiting[0]
        return self._scorer.step()


def check_vllm_scoring(spec: RunSpec, policy: Path) -> None:
    """Check the models that vLLM is to score with, before anything starts.

    Args:
        policy: folder of the policy's model, which is also the reference.

    Raises:
        UserError: vLLM is missing on this machine, or was not tested with a model's family.
    """
    placement, key = spec.placement, "placement.scoring_engine"
    models = {}
    if "reference" in placement.on_actors and spec.algorithm.kl_beta:
        models["model.source"] = policy
    if "reward_model" in placement.on_actors:
        models |= {f"scoring.rewards ({folder})": folder for folder in spec.scoring.model_folders}
    if placement.scoring_engine != "vllm" or not models:
        return
    if not spec.ray.address:  # the actors are on this machine
        check_version(key=key)
    for where, folder in models.items():
        config = load_config(merged_folder(folder, progress=lambda _: None))
        check_family(config.model_type, where=where, key=key)


def vllm_scorer(spec: RunSpec, folder: Path, *, reward: bool, slots: int, prompt_tokens: int) -> VllmScorer:
    """Start vLLM with a frozen model, with `placement.actor_tensor_parallel` ranks.

    Args:
        folder: of the reference; or of a reward model, with its head.
        slots: samples computed at the same time.
        prompt_tokens: length of the longest prompt.

    Raises:
        UserError: the model or the head cannot be used.
    """
    model = merged_folder(folder, progress=lambda _: None)
    refuse_damaged(model)
    half = choose_precision(spec.trainer, choose_device(spec.trainer)) is not None
    config = spec.engine.vllm
    settings = VllmSettings(
        model=str(model),
        dtype="bfloat16" if half else "float32",
        slots=slots,
        context=engine_context(spec, limit=stored_context_limit(model), prompt_tokens=prompt_tokens),
        ranks=spec.placement.actor_tensor_parallel,
        prefill_chunk_tokens=spec.engine.prefill_chunk_tokens,
        cache_gb=config.cache_gb,
        memory_fraction=config.memory_fraction,
    )
    if reward:
        head, _ = load_head(folder, "reward_model", device=torch.device("cpu"))
        return VllmReward(settings, head)
    return VllmReference(settings, temperature=spec.sampling.temperature)
