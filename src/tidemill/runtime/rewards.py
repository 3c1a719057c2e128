"""Reward models as rewards of a run: where they compute, and what is checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tidemill.config.schema import RunSpec
from tidemill.config.scoring import RewardConfig
from tidemill.core.buffers import count, unpack_logprobs
from tidemill.core.errors import UserError
from tidemill.core.protocols import Compute, Reader
from tidemill.core.records import Reward, Trajectory
from tidemill.envs.text.batches import Batches
from tidemill.envs.text.rewards import Scores
from tidemill.envs.text.sample import Sample
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.heads import read_description
from tidemill.models.reward_model import RewardModel, check_same_vocabulary, load_reward_model
from tidemill.runtime.compute import ComputeThread
from tidemill.runtime.machine import choose_device, choose_precision
from tidemill.runtime.readers import Readers
from tidemill.trainer.reward_scores import reward_scores

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


class ModelJudge:
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


def model_rewards(spec: RunSpec, compute: Compute | None, readers: Readers) -> Callable[[RewardConfig], Scores]:
    """What makes the function of a reward of kind "model"; a model named twice is loaded once.

    Args:
        compute: where the work runs; None for a thread of its own (the trainer computes in another process).
        readers: those of models that read sample by sample; the others score together what has finished.
    """
    loaded: dict[Path, RewardModel] = {}

    def scores(config: RewardConfig) -> Scores:
        folder, device = _folder(config, "scoring.rewards"), choose_device(spec.trainer)
        if folder in readers.rewards:
            return ReaderScores(readers.rewards[folder])
        if folder not in loaded:
            loaded[folder] = load_reward_model(folder, device=device)
        judge = ModelJudge(
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
            cure="give the folder of a reward model, or run the whole pipeline",
        )
    return Path(config.model).expanduser()
