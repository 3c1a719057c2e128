"""Reward models and the reference in this process, which read samples while they are generated."""

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
from tidemill.envs.text.batch_rewards import Batches, Sample
from tidemill.envs.text.rewards import QueuedReward
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.reward_model import RewardModel, check_same_vocabulary, load_reward_model, read_description
from tidemill.runtime.compute import ComputeThread, choose_device, choose_precision
from tidemill.trainer.scoring import ChunkedReader, Gauge, LogprobGauge, ScoreGauge, reward_scores

T = TypeVar("T")


class Counted:
    """How much of what training samples took was done before they were finished, and how much afterwards."""

    def __init__(self) -> None:
        self._ahead = self._late = 0

    def note(self, sample_id: SampleId, read: Read) -> None:
        if sample_id.purpose == TRAIN:
            self._ahead += read.tokens_ahead
            self._late += read.tokens_late

    def take_counts(self) -> tuple[int, int]:
        counts, self._ahead, self._late = (self._ahead, self._late), 0, 0
        return counts


@dataclass(slots=True)
class _Growing:
    """What is known of a sample under way."""

    prompt_tokens: int
    token_ids: bytearray = field(default_factory=bytearray)


class LocalReader(Counted):
    """Implements `core.protocols.Reader`.

    One chunk is one call, so that whoever computes on the same thread has its turn in between. Finished samples are
    read one after another; chunks ahead by turns, one of each sample.

    Args:
        thread: where the model computes.
        owned: nobody else does; the thread ends with the reader. Otherwise chunks ahead wait until it is idle.
    """

    def __init__(self, reader: ChunkedReader, thread: ComputeThread, *, owned: bool) -> None:
        super().__init__()
        self._reader, self._thread, self._owned = reader, thread, owned
        self._leftover: Compute = thread if owned else thread.leftover
        self._growing: dict[SampleId, _Growing] = {}
        self._ready: dict[SampleId, None] = {}  # samples that may have a chunk to be computed ahead, in order
        self._being_read = Counter[SampleId]()
        self._forgotten: deque[SampleId] = deque()  # the model's side is told at the next call
        self._working: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._turn = asyncio.Lock()

    def grow(self, grown: Sequence[Growth]) -> None:
        for growth in grown:
            if growth.sample_id in self._being_read:
                continue  # what it was before it began again: one chain of chunks under a name is enough
            if growth.start == 0:
                self._growing[growth.sample_id] = _Growing(growth.prompt_tokens)
            growing = self._growing.get(growth.sample_id)
            if growing is None or len(growing.token_ids) != growth.start * ITEM_BYTES:
                self.forget([growth.sample_id])  # something in between was lost: it is read at the end
                continue
            growing.token_ids += growth.token_ids
            self._ready[growth.sample_id] = None
        if self._ready and self._working is None and self._failure is None:
            self._working = asyncio.create_task(self._read_ahead(), name="reading ahead")

    async def read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        """
        Raises:
            Exception: what the model raised, also while it read ahead.
        """
        self._leave(sample_id)
        self._being_read[sample_id] += 1
        try:
            async with self._turn:
                read = await self._read(sample_id, token_ids, prompt_tokens)
        finally:
            self._being_read -= Counter([sample_id])
        self.note(sample_id, read)
        return read

    def forget(self, sample_ids: Sequence[SampleId]) -> None:
        for sample_id in sample_ids:
            self._leave(sample_id)
            self._forgotten.append(sample_id)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        if self._owned:
            await self._thread.close()

    def _leave(self, sample_id: SampleId) -> None:
        self._growing.pop(sample_id, None)
        self._ready.pop(sample_id, None)

    async def _read(self, sample_id: SampleId, token_ids: TokenBuffer, prompt_tokens: int) -> Read:
        if self._failure is not None:
            raise self._failure
        read: Read | None = None
        try:
            while read is None:
                read = await self._call(self._thread, lambda: self._reader.read_on(sample_id, token_ids, prompt_tokens))
        except BaseException:
            self._forgotten.append(sample_id)
            raise
        return read

    async def _read_ahead(self) -> None:
        try:
            while self._ready:
                sample_id = next(iter(self._ready))
                del self._ready[sample_id]
                if await self._chunk_ahead(sample_id) and sample_id in self._growing:
                    self._ready[sample_id] = None  # behind the others
        except Exception as error:  # noqa: BLE001 - whoever reads next gets it
            self._failure = error
        finally:
            self._working = None

    async def _chunk_ahead(self, sample_id: SampleId) -> bool:
        growing = self._growing[sample_id]
        known = bytes(growing.token_ids)

        def chunk() -> bool:
            if sample_id not in self._growing:  # finished or forgotten while this waited for its turn
                return False
            return self._reader.read_ahead(sample_id, known, growing.prompt_tokens)

        return await self._call(self._leftover, chunk)

    async def _call(self, compute: Compute, function: Callable[[], T]) -> T:
        def call() -> T:
            while self._forgotten:
                self._reader.forget(self._forgotten.popleft())
            return function()

        return await compute.run(call)


MEGABYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """By what they are for; whoever made them closes them."""

    rewards: Mapping[Path, Reader] = field(default_factory=dict)  # by the folder of their model
    reference: Reader | None = None

    @property
    def all(self) -> tuple[Reader, ...]:
        return (*self.rewards.values(), *([self.reference] if self.reference else ()))


def reward_reader(spec: RunSpec, folder: Path, compute: ComputeThread | None = None) -> LocalReader:
    """A reward model that scores samples one by one.

    Args:
        compute: a thread to share; None for one of its own.

    Raises:
        UserError: the model cannot be had.
    """
    device = choose_device(spec.trainer)
    reward = load_reward_model(folder, device=device)
    return _reader(spec, reward.model, ScoreGauge(reward.head), device, compute)


def reference_reader(spec: RunSpec, model: PreTrainedModel, compute: ComputeThread | None = None) -> LocalReader:
    """The reference, which says what it thinks of every token after the prompt.

    Args:
        compute: a thread to share; None for one of its own.
    """
    gauge = LogprobGauge(
        model,
        temperature=spec.sampling.temperature,
        logits_budget_bytes=spec.trainer.logits_budget_mb * MEGABYTE,
    )
    return _reader(spec, model, gauge, next(model.parameters()).device, compute)


def _reader(
    spec: RunSpec, model: PreTrainedModel, gauge: Gauge, device: torch.device, compute: ComputeThread | None
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
MODEL_COMPONENT = re.compile(r"model(_\d+)?")  # what `build_rewards` calls rewards of kind "model"


class ReaderScores:
    """Implements `envs.text.rewards.Scores` with a reader of a reward model, which is somebody else's to close."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def __call__(self, sample: Sample) -> float:
        """
        Raises:
            ReaderLost: the model is gone and does not come back.
        """
        prompt_tokens = count(sample.prompt.token_ids)
        (score,) = unpack_logprobs((await self._reader.read(sample.sample_id, sample.token_ids, prompt_tokens)).numbers)
        return score

    async def close(self) -> None:
        """The reader goes on."""


class ModelScorer:
    """Implements `envs.text.batches.Judge` with a reward model.

    Args:
        compute: the thread that computes everything else, too; None starts one for this judge alone.
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

    async def judge(self, samples: Sequence[Sample]) -> Sequence[float | Exception]:
        sequences = [sample.token_ids for sample in samples]
        return await self._compute.run(
            lambda: reward_scores(self._reward, sequences, budget=self._budget, autocast=self._autocast)
        )

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()


def check_reward_models(spec: RunSpec, *, progress: Callable[[str], None], policy_folder: Path | None = None) -> None:
    """Every reward model of a run is one, and reads the policy's token ids as the policy means them.

    Args:
        policy_folder: a model or checkpoint instead of the configured one.

    Raises:
        UserError: naming the reward at fault.
    """
    wanted = [(at, reward) for at, reward in enumerate(spec.scoring.rewards) if reward.kind == "model"]
    if not wanted:
        return
    folders = [(_where(at), _folder(reward, _where(at))) for at, reward in wanted]
    described = [(where, folder, read_description(folder, "reward_model")) for where, folder in folders]
    policy = load_codec(policy_folder or resolve(spec.model, progress=progress))
    for where, folder, description in described:
        check_same_vocabulary(description, folder, policy, where=where)


def model_rewards(spec: RunSpec, compute: Compute | None, readers: Readers) -> Callable[[RewardConfig], QueuedReward]:
    """What makes the function of a reward of kind "model"; a model named twice is loaded once.

    Args:
        compute: where the work runs; None for a thread of its own (the trainer computes in another process).
        readers: those of models that read sample by sample; the others score together what has finished.
    """
    loaded: dict[Path, RewardModel] = {}

    def scores(config: RewardConfig) -> QueuedReward:
        folder, device = _folder(config, "scoring.rewards"), choose_device(spec.trainer)
        if folder in readers.rewards:
            return ReaderScores(readers.rewards[folder])
        if folder not in loaded:
            loaded[folder] = load_reward_model(folder, device=device)
        judge = ModelScorer(
            loaded[folder],
            compute=compute,
            # With 1 every sample is scored alone: in a tree, the last bits of a score depend on the other samples.
            budget=1 if spec.engine.batch_invariant else spec.batch.microbatch_tokens,
            autocast=choose_precision(spec.trainer, device),
        )
        return Batches(judge, most=config.batch)

    return scores


def model_scores(samples: Sequence[Trajectory]) -> dict[str, tuple[Reward, ...]]:
    """What reward models said of samples whose reward counts them with weight 0, as `evaluation_scoring` has it: by
    the name of their component, one a sample."""
    rewards = [sample.reward or Reward(value=0.0, valid=False) for sample in samples]
    names = dict.fromkeys(name for reward in rewards for name in reward.components if MODEL_COMPONENT.fullmatch(name))
    return {
        name: tuple(
            Reward(value=reward.components.get(name, 0.0), valid=name in reward.components, reason=reward.reason)
            for reward in rewards
        )
        for name in names
    }


def _where(position: int) -> str:
    return f"scoring.rewards[{position}].model"


def _folder(config: RewardConfig, where: str) -> Path:
    if config.model.startswith(STAGE):
        raise UserError(
            f'"{config.model}" names a stage, and this run has none',
            where=where,
            hint="give the folder of a reward model, or run the whole pipeline",
        )
    return Path(config.model).expanduser()
