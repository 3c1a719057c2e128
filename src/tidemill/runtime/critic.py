"""The critic a run's configuration asks for, beside the policy it belongs to or in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.models.catalog import asked_for_by, resolve
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import holds_reward_model
from tidemill.models.heads import ScalarHead, load_head
from tidemill.models.loading import load_model
from tidemill.models.reward_model import check_head_fits, hidden_size
from tidemill.runtime.frozen import FrozenModels
from tidemill.runtime.parts import Parts
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic


def build_critic(parts: Parts, *, progress: Callable[[str], None]) -> Critic | None:
    """None where the algorithm needs none. A new value head says 0 of everything.

    Args:
        parts: of the policy; a shared critic reads its hidden states, one of its own begins as the same weights
            unless `critic.source` says otherwise. Where the policy learns in an adapter, so does the critic, in one of
            its own, and what lies under both is in memory once.
        progress: told, in words, what takes long.

    Raises:
        UserError: the critic's model cannot be had, or has another tokenizer than the policy.
    """
    algorithm, config = parts.spec.algorithm, parts.spec.critic
    if not algorithm.needs_critic:
        return None
    if config.kind == "own":
        return build_model_critic(
            parts.spec,
            policy_folder=parts.folder,
            frozen=parts.frozen,
            device=parts.device,
            autocast=parts.autocast,
            progress=progress,
        )
    return TrunkCritic(
        parts.model,
        ScalarHead(hidden_size(parts.model)).to(parts.device),
        config,
        value_coefficient=algorithm.value_coefficient,
        value_clip=algorithm.value_clip,
        autocast=parts.autocast,
    )


def build_model_critic(
    spec: RunSpec,
    *,
    policy_folder: Path,
    frozen: FrozenModels,
    device: torch.device,
    autocast: torch.dtype | None,
    progress: Callable[[str], None],
) -> ModelCritic:
    """A critic of its own, wherever the policy is.

    Args:
        policy_folder: the Hugging Face folder that the policy came from.

    Raises:
        UserError: as `build_critic`.
    """
    source = spec.critic.source
    folder = policy_folder if source is None else _other_folder(spec, source, policy_folder, progress)
    model = _model(spec, folder, policy_folder, frozen, device)
    head = ScalarHead(hidden_size(model)).to(device)
    if source is not None and holds_reward_model(given := Path(source).expanduser()):
        head, _ = load_head(given, "reward_model", device=device)
        check_head_fits(model, head, given)
        progress(f"the critic begins as the whole reward model {source}, head included")
    if spec.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    return ModelCritic(
        model,
        head,
        spec.critic,
        source=folder,
        value_clip=spec.algorithm.value_clip,
        autocast=autocast,
    )


def own_source(spec: RunSpec) -> str | None:
    """What a critic of its own begins as, where that is not the policy; None where there is no such critic."""
    return spec.critic.source if spec.algorithm.needs_critic and spec.critic.kind == "own" else None


def check_critic_vocabulary(source: str, critic: TextCodec, policy: TextCodec) -> None:
    """Raises UserError: the critic would read the policy's token ids as other words."""
    if critic.vocabulary_digest != policy.vocabulary_digest:
        raise UserError(
            f"the critic ({source}) has another tokenizer than the policy: it would read other words than were written",
            where="critic.source",
            cure="give a model made from the policy's own, or leave critic.source out",
        )


def _model(
    spec: RunSpec, folder: Path, policy_folder: Path, frozen: FrozenModels, device: torch.device
) -> PreTrainedModel:
    """To be learned as a whole, or in an adapter like the policy's."""
    if not spec.model.lora.enabled:
        return load_model(folder, device=device)
    source = spec.model.source if folder == policy_folder else str(folder)
    return frozen.with_adapter(folder, spec.model.model_copy(update={"source": source}))


def _other_folder(spec: RunSpec, source: str, policy_folder: Path, progress: Callable[[str], None]) -> Path:
    with asked_for_by("critic.source"):
        folder = resolve(ModelConfig(source=source, char=spec.model.char), progress=progress)
    check_critic_vocabulary(source, load_codec(folder), load_codec(policy_folder))
    return folder
