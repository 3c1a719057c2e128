"""The critic a run's configuration asks for, beside the policy it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.core.errors import UserError
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.heads import ScalarHead
from tidemill.models.loading import load_model
from tidemill.models.reward_model import hidden_size
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
    head = ScalarHead(hidden_size(parts.model)).to(parts.device)
    if config.kind == "shared":
        return TrunkCritic(
            parts.model,
            head,
            config,
            value_coefficient=algorithm.value_coefficient,
            value_clip=algorithm.value_clip,
            autocast=parts.autocast,
        )
    folder = parts.folder if config.source is None else _other_folder(parts, config.source, progress)
    model = _model(parts, folder)
    if parts.spec.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    return ModelCritic(
        model,
        ScalarHead(hidden_size(model)).to(parts.device),
        config,
        source=folder,
        value_clip=algorithm.value_clip,
        autocast=parts.autocast,
    )


def _model(parts: Parts, folder: Path) -> PreTrainedModel:
    """To be learned as a whole, or in an adapter like the policy's."""
    if not parts.spec.model.lora.enabled:
        return load_model(folder, device=parts.device)
    source = parts.spec.model.source if folder == parts.folder else str(folder)
    made_from = parts.spec.model.model_copy(update={"source": source})
    return parts.frozen.with_adapter(folder, made_from)


def _other_folder(parts: Parts, source: str, progress: Callable[[str], None]) -> Path:
    folder = resolve(ModelConfig(source=source, char=parts.spec.model.char), progress=progress)
    if load_codec(folder).vocabulary_digest != parts.codec.vocabulary_digest:
        raise UserError(
            f"the critic ({source}) has another tokenizer than the policy: it would read other words than were written",
            where="critic.source",
            cure="give a model made from the policy's own, or leave critic.source out",
        )
    return folder
