"""Reward models and the reference in this process: they compute samples during generation, or score batches."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.config.task import RewardConfig
from tidemill.controller.in_flight import TRAIN
from tidemill.core.errors import UserError
from tidemill.core.protocols import Compute, FrozenScorer
from tidemill.core.records import (
    ITEM_BYTES,
    ModelScores,
    NewTokens,
    Reward,
    SampleId,
    TokenBuffer,
    Trajectory,
    count,
    unpack_logprobs,
)
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.model_source import locate
from tidemill.models.reward_model import RewardModel, check_same_vocabulary, load_reward_model, read_description
from tidemill.runtime.compute import ComputeThread, choose_device, choose_precision
from tidemill.scoring.batch_rewards import BatchedReward, RewardInput
from tidemill.scoring.builtin_rewards import QueuedReward
from tidemill.trainer.scoring import ChunkedScorer, LogprobScorer, RewardModelScorer, SampleScorer, reward_scores

T = TypeVar("T")


class TokenCounter:
    """Counts tokens of training samples that were processed before and after the samples finished."""

    def __init__(self) -> None:
        self._ahead = self._late = 0

    def add(self, sample_id: SampleId, scores: ModelScores) -> None:
        if sample_id.purpose == TRAIN:
            self._ahead += scores.tokens_ahead
            self._late += scores.tokens_late

    def take_counts(self) -> tuple[int, int]:
        counts, self._ahead, self._late = (self._ahead, self._late), 0, 0
        return counts


@dataclass(slots=True)
class _PartialSample:
    prompt_tokens: int
    token_ids: bytearray = field(default_factory=bytearray)


class LocalFrozenScorer(TokenCounter):
    """Implements `core.protocols.FrozenScorer`.

    Each chunk is one call on the thread, so other users of the thread get turns in between. Finished samples are scored
    one after another; unfinished ones advance by one chunk each in turn.

    Args:
        thread: where the model computes.
        owned: nothing else uses the thread, and it is closed with the model. Otherwise computing ahead waits until the
            thread is idle.
    """

    def __init__(self, scorer: ChunkedScorer, thread: ComputeThread, *, owned: bool) -> None:
        super().__init__()
        self._scorer, self._thread, self._owned = scorer, thread, owned
        self._partial: dict[SampleId, _PartialSample] = {}
        self._ready: dict[SampleId, None] = {}  # samples that may have another chunk to compute ahead, in order
        self._being_scored = Counter[SampleId]()
        self._forgotten: deque[SampleId] = deque()  # passed to the model at the next call
        self._computing_ahead: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._score_lock = asyncio.Lock()

    def receive(self, new_tokens: Sequence[NewTokens]) -> None:
        for added in new_tokens:
            if added.sample_id in self._being_scored:
                continue  # the sample was restarted; its previous attempt is still being scored under this id
            if added.start == 0:
                self._partial[added.sample_id] = _PartialSample(added.prompt_tokens)
            partial = self._partial.get(added.sample_id)
            if partial is None or len(partial.token_ids) != added.start * ITEM_BYTES:
                self.forget([added.sample_id])  # tokens in between were lost: score it when it is finished
                continue
            partial.token_ids += added.token_ids
            self._ready[added.sample_id] = None
        if self._ready and self._computing_ahead is None and self._failure is None:
            self._computing_ahead = asyncio.create_task(self._compute_ahead(), name="computing ahead")

    async def score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        """Raises what the model raised, now or while computing ahead."""
        self._drop(sample_id)
        self._being_scored[sample_id] += 1
        try:
            async with self._score_lock:
                scores = await self._score(sample_id, token_ids, prompt_tokens)
        finally:
            self._being_scored -= Counter([sample_id])
        self.add(sample_id, scores)
        return scores

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._drop(sample_id)
            self._forgotten.append(sample_id)

    async def close(self) -> None:
        if self._computing_ahead is not None:
            self._computing_ahead.cancel()
            await asyncio.wait({self._computing_ahead})
        if self._owned:
            await self._thread.close()

    def _drop(self, sample_id: SampleId) -> None:
        self._partial.pop(sample_id, None)
        self._ready.pop(sample_id, None)

    async def _score(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> ModelScores:
        if self._failure is not None:
            raise self._failure
        scores: ModelScores | None = None
        try:
            while scores is None:
                scores = await self._call(lambda: self._scorer.score_finished(sample_id, token_ids, prompt_tokens))
        except BaseException:
            self._forgotten.append(sample_id)
            raise
        return scores

    async def _compute_ahead(self) -> None:
        try:
            while self._ready:
                sample_id = next(iter(self._ready))
                del self._ready[sample_id]
                if await self._compute_chunk_ahead(sample_id) and sample_id in self._partial:
                    self._ready[sample_id] = None  # to the end of the queue
        except Exception as error:  # noqa: BLE001 - raised by the next `score`
            self._failure = error
        finally:
            self._computing_ahead = None

    async def _compute_chunk_ahead(self, sample_id: SampleId) -> bool:
        partial = self._partial[sample_id]
        known = bytes(partial.token_ids)

        def compute_chunk() -> bool:
            if sample_id not in self._partial:  # finished or forgotten while this call was queued
                return False
            return self._scorer.compute_ahead(sample_id, known, partial.prompt_tokens)

        return await self._call(compute_chunk, when_idle=not self._owned)

    async def _call(self, function: Callable[[], T], *, when_idle: bool = False) -> T:
        def call() -> T:
            while self._forgotten:
                self._scorer.forget(self._forgotten.popleft())
            return function()

        return await self._thread.run(call, when_idle=when_idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenScorers:
    """The frozen models of a run that score sample by sample. The code that created them closes them."""

    rewards: Mapping[Path, FrozenScorer] = field(default_factory=dict)  # by model folder
    reference: FrozenScorer | None = None

    @property
    def all(self) -> tuple[FrozenScorer, ...]:
        return (*self.rewards.values(), *([self.reference] if self.reference else ()))


def local_reward_model(spec: RunSpec, folder: Path, compute: ComputeThread | None = None) -> LocalFrozenScorer:
    """A reward model that scores samples one by one.

    Args:
        compute: a thread to share; None starts one for this model.

    Raises:
        UserError: the model cannot be loaded.
    """
    device = choose_device(spec.trainer)
    reward = load_reward_model(folder, device=device)
    return _local_frozen_scorer(spec, reward.model, RewardModelScorer(reward.head), device, compute)


def local_reference(spec: RunSpec, model: PreTrainedModel, compute: ComputeThread | None = None) -> LocalFrozenScorer:
    """The reference model: logprobs of completion tokens.

    Args:
        compute: a thread to share; None starts one for this model.
    """
    device = next(model.parameters()).device
    budget = spec.trainer.logits_bytes(on_gpu=device.type == "cuda")
    gauge = LogprobScorer(model, temperature=spec.sampling.temperature, logits_budget_bytes=budget)
    return _local_frozen_scorer(spec, model, gauge, device, compute)


def _local_frozen_scorer(
    spec: RunSpec, model: PreTrainedModel, gauge: SampleScorer, device: torch.device, compute: ComputeThread | None
) -> LocalFrozenScorer:
    scorer = ChunkedScorer(
        model,
        gauge,
        chunk_tokens=spec.reading.chunk_tokens,
        cache_tokens=spec.reading.cache_tokens,
        autocast=choose_precision(spec.trainer, device),
    )
    if compute is None or spec.reading.own_thread:
        return LocalFrozenScorer(scorer, ComputeThread("tidemill-frozen"), owned=True)
    return LocalFrozenScorer(scorer, compute, owned=False)


STAGE = "stage:"
MODEL_COMPONENT = re.compile(r"model(_\d+)?")  # names that `build_rewards` gives to rewards of kind "model"


class FrozenModelReward:
    """Implements `scoring.builtin_rewards.QueuedReward` with a frozen reward model, which it does not close."""

    def __init__(self, model: FrozenScorer) -> None:
        self._model = model

    async def __call__(self, sample: RewardInput) -> float:
        """Raises ScorerLost: the model's process died and cannot be restarted."""
        prompt_tokens = count(sample.prompt.token_ids)
        (score,) = unpack_logprobs((await self._model.score(sample.sample_id, sample.token_ids, prompt_tokens)).values)
        return score

    async def close(self) -> None:
        """Leave the model open."""


class ModelScorer:
    """Implements `scoring.batch_rewards.BatchScorer` with a reward model.

    Args:
        compute: a thread to share; None starts one for this scorer.
        budget: packed tokens of one forward pass.
    """

    def __init__(
        self, reward: RewardModel, *, compute: Compute | None, budget: int, autocast: torch.dtype | None = None
    ) -> None:
        self._own: ComputeThread | None = None
        if compute is None:
            compute = self._own = ComputeThread("tidemill-reward")
        self._compute = compute
        self._reward, self._budget, self._autocast = reward, budget, autocast

    async def score_batch(self, samples: Sequence[RewardInput]) -> Sequence[float | Exception]:
        sequences = [sample.token_ids for sample in samples]
        return await self._compute.run(
            lambda: reward_scores(self._reward, sequences, budget=self._budget, autocast=self._autocast)
        )

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()


def check_reward_models(spec: RunSpec, *, progress: Callable[[str], None], policy_folder: Path | None = None) -> None:
    """Check that every configured reward model is one and has the policy's tokenizer.

    Args:
        policy_folder: a model or checkpoint that replaces the configured one.

    Raises:
        UserError: naming the reward.
    """
    found = []
    for position, reward in enumerate(spec.scoring.rewards):
        if reward.kind == "model":
            where = f"scoring.rewards[{position}].model"
            found.append((where, _model_folder(reward, where)))
    described = [(where, folder, read_description(folder, "reward_model")) for where, folder in found]
    if described:
        policy = load_codec(policy_folder or resolve(spec.model, progress=progress))
        for where, folder, description in described:
            check_same_vocabulary(description, folder, policy, where=where)


def model_rewards(
    spec: RunSpec, compute: Compute | None, frozen: FrozenScorers
) -> Callable[[RewardConfig], QueuedReward]:
    """Factory of the functions behind rewards of kind "model"; a model used by two rewards is loaded once.

    Args:
        compute: where reward models run; None starts a thread (the trainer computes in another process).
        frozen: models that score sample by sample. The others score finished samples in batches.
    """
    loaded: dict[Path, RewardModel] = {}

    def scores(config: RewardConfig) -> QueuedReward:
        folder, device = _model_folder(config, "scoring.rewards"), choose_device(spec.trainer)
        if folder in frozen.rewards:
            return FrozenModelReward(frozen.rewards[folder])
        if folder not in loaded:
            loaded[folder] = load_reward_model(folder, device=device)
        scorer = ModelScorer(
            loaded[folder],
            compute=compute,
            # 1 scores every sample alone: in a packed tree the last bits of a score depend on the other samples.
            budget=1 if spec.engine.batch_invariant else spec.batch.microbatch_budget,
            autocast=choose_precision(spec.trainer, device),
        )
        return BatchedReward(scorer, most=config.batch)

    return scores


def model_scores(samples: Sequence[Trajectory]) -> dict[str, tuple[Reward, ...]]:
    """Rewards of reward models that `evaluation_scoring` includes with weight 0: one per sample, by component name."""
    rewards = [sample.reward or Reward(value=0.0, valid=False) for sample in samples]
    names = dict.fromkeys(name for reward in rewards for name in reward.components if MODEL_COMPONENT.fullmatch(name))
    return {
        name: tuple(
            Reward(value=reward.components.get(name, 0.0), valid=name in reward.components, reason=reward.reason)
            for reward in rewards
        )
        for name in names
    }


def _model_folder(config: RewardConfig, where: str) -> Path:
    if config.model.startswith(STAGE):
        raise UserError(
            f'"{config.model}" names a stage, but this run is not part of a pipeline',
            where=where,
            hint="give the folder of a reward model, or run the whole pipeline",
        )
    folder = locate(config.model).folder
    if folder is None:
        hint = "give the folder or the run directory of a reward model"
        raise UserError(f"there is no folder {config.model}", where=where, hint=hint)
    return folder
