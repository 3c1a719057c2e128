"""Reward models and the reference in this process: they read samples during generation, or score batches."""

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
from tidemill.core.protocols import Compute, Reader
from tidemill.core.records import (
    ITEM_BYTES,
    Growth,
    Read,
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
from tidemill.trainer.scoring import ChunkedReader, LogprobScorer, RewardModelScorer, SampleScorer, reward_scores

T = TypeVar("T")


class ReadCounter:
    """Counts tokens of training samples that were processed before and after the samples finished."""

    def __init__(self) -> None:
        self._ahead = self._late = 0

    def add(self, sample_id: SampleId, read: Read) -> None:
        if sample_id.purpose == TRAIN:
            self._ahead += read.tokens_ahead
            self._late += read.tokens_late

    def take_counts(self) -> tuple[int, int]:
        counts, self._ahead, self._late = (self._ahead, self._late), 0, 0
        return counts


@dataclass(slots=True)
class _PartialSample:
    prompt_tokens: int
    token_ids: bytearray = field(default_factory=bytearray)


class LocalReader(ReadCounter):
    """Implements `core.protocols.Reader`.

    Each chunk is one call on the thread, so other users of the thread get turns in between. Finished samples are read
    one after another; unfinished ones advance by one chunk each in turn.

    Args:
        thread: where the model computes.
        owned: nothing else uses the thread, and it is closed with the reader. Otherwise reading ahead waits until the
            thread is idle.
    """

    def __init__(self, reader: ChunkedReader, thread: ComputeThread, *, owned: bool) -> None:
        super().__init__()
        self._reader, self._thread, self._owned = reader, thread, owned
        self._partial: dict[SampleId, _PartialSample] = {}
        self._ready: dict[SampleId, None] = {}  # samples that may have another chunk to read ahead, in order
        self._being_read = Counter[SampleId]()
        self._forgotten: deque[SampleId] = deque()  # passed to the model at the next call
        self._reading_ahead: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._read_lock = asyncio.Lock()

    def receive(self, grown: Sequence[Growth]) -> None:
        for growth in grown:
            if growth.sample_id in self._being_read:
                continue  # the sample was restarted; its previous attempt is still being read under this id
            if growth.start == 0:
                self._partial[growth.sample_id] = _PartialSample(growth.prompt_tokens)
            partial = self._partial.get(growth.sample_id)
            if partial is None or len(partial.token_ids) != growth.start * ITEM_BYTES:
                self.forget([growth.sample_id])  # tokens in between were lost: read it when it is finished
                continue
            partial.token_ids += growth.token_ids
            self._ready[growth.sample_id] = None
        if self._ready and self._reading_ahead is None and self._failure is None:
            self._reading_ahead = asyncio.create_task(self._read_ahead(), name="reading ahead")

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        """Raises what the model raised, now or while reading ahead."""
        self._drop(sample_id)
        self._being_read[sample_id] += 1
        try:
            async with self._read_lock:
                read = await self._read(sample_id, token_ids, prompt_tokens)
        finally:
            self._being_read -= Counter([sample_id])
        self.add(sample_id, read)
        return read

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._drop(sample_id)
            self._forgotten.append(sample_id)

    async def close(self) -> None:
        if self._reading_ahead is not None:
            self._reading_ahead.cancel()
            await asyncio.wait({self._reading_ahead})
        if self._owned:
            await self._thread.close()

    def _drop(self, sample_id: SampleId) -> None:
        self._partial.pop(sample_id, None)
        self._ready.pop(sample_id, None)

    async def _read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        if self._failure is not None:
            raise self._failure
        read: Read | None = None
        try:
            while read is None:
                read = await self._call(lambda: self._reader.read_finished(sample_id, token_ids, prompt_tokens))
        except BaseException:
            self._forgotten.append(sample_id)
            raise
        return read

    async def _read_ahead(self) -> None:
        try:
            while self._ready:
                sample_id = next(iter(self._ready))
                del self._ready[sample_id]
                if await self._read_chunk_ahead(sample_id) and sample_id in self._partial:
                    self._ready[sample_id] = None  # to the end of the queue
        except Exception as error:  # noqa: BLE001 - raised by the next `read`
            self._failure = error
        finally:
            self._reading_ahead = None

    async def _read_chunk_ahead(self, sample_id: SampleId) -> bool:
        partial = self._partial[sample_id]
        known = bytes(partial.token_ids)

        def read_chunk() -> bool:
            if sample_id not in self._partial:  # finished or forgotten while this call was queued
                return False
            return self._reader.read_ahead(sample_id, known, partial.prompt_tokens)

        return await self._call(read_chunk, when_idle=not self._owned)

    async def _call(self, function: Callable[[], T], *, when_idle: bool = False) -> T:
        def call() -> T:
            while self._forgotten:
                self._reader.forget(self._forgotten.popleft())
            return function()

        return await self._thread.run(call, when_idle=when_idle)


MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The readers of a run. The code that created them closes them."""

    rewards: Mapping[Path, Reader] = field(default_factory=dict)  # by model folder
    reference: Reader | None = None

    @property
    def all(self) -> tuple[Reader, ...]:
        return (*self.rewards.values(), *([self.reference] if self.reference else ()))


def reward_reader(spec: RunSpec, folder: Path, compute: ComputeThread | None = None) -> LocalReader:
    """A reward model that scores samples one by one.

    Args:
        compute: a thread to share; None starts one for this reader.

    Raises:
        UserError: the model cannot be loaded.
    """
    device = choose_device(spec.trainer)
    reward = load_reward_model(folder, device=device)
    return _local_reader(spec, reward.model, RewardModelScorer(reward.head), device, compute)


def reference_reader(spec: RunSpec, model: PreTrainedModel, compute: ComputeThread | None = None) -> LocalReader:
    """The reference model: logprobs of completion tokens.

    Args:
        compute: a thread to share; None starts one for this reader.
    """
    gauge = LogprobScorer(
        model,
        temperature=spec.sampling.temperature,
        logits_budget_bytes=spec.trainer.logits_budget_mb * MEGABYTE,
    )
    return _local_reader(spec, model, gauge, next(model.parameters()).device, compute)


def _local_reader(
    spec: RunSpec, model: PreTrainedModel, gauge: SampleScorer, device: torch.device, compute: ComputeThread | None
) -> LocalReader:
    reader = ChunkedReader(
        model,
        gauge,
        chunk_tokens=spec.reading.chunk_tokens,
        cache_tokens=spec.reading.cache_tokens,
        autocast=choose_precision(spec.trainer, device),
    )
    if compute is None or spec.reading.own_thread:
        return LocalReader(reader, ComputeThread("tidemill-reader"), owned=True)
    return LocalReader(reader, compute, owned=False)


STAGE = "stage:"
MODEL_COMPONENT = re.compile(r"model(_\d+)?")  # names that `build_rewards` gives to rewards of kind "model"


class ReaderScores:
    """Implements `scoring.builtin_rewards.QueuedReward` with the reader of a reward model, which it does not close."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def __call__(self, sample: RewardInput) -> float:
        """Raises ReaderLost: the reader's process died and cannot be restarted."""
        prompt_tokens = count(sample.prompt.token_ids)
        (score,) = unpack_logprobs((await self._reader.read(sample.sample_id, sample.token_ids, prompt_tokens)).values)
        return score

    async def close(self) -> None:
        """Leave the reader open."""


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


def model_rewards(spec: RunSpec, compute: Compute | None, readers: Readers) -> Callable[[RewardConfig], QueuedReward]:
    """Factory of the functions behind rewards of kind "model"; a model used by two rewards is loaded once.

    Args:
        compute: where reward models run; None starts a thread (the trainer computes in another process).
        readers: models that read sample by sample. The others score finished samples in batches.
    """
    loaded: dict[Path, RewardModel] = {}

    def scores(config: RewardConfig) -> QueuedReward:
        folder, device = _model_folder(config, "scoring.rewards"), choose_device(spec.trainer)
        if folder in readers.rewards:
            return ReaderScores(readers.rewards[folder])
        if folder not in loaded:
            loaded[folder] = load_reward_model(folder, device=device)
        scorer = ModelScorer(
            loaded[folder],
            compute=compute,
            # 1 scores every sample alone: in a packed tree the last bits of a score depend on the other samples.
            budget=1 if spec.engine.batch_invariant else spec.batch.microbatch_tokens,
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
