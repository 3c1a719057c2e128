"""The critic of a run, where its algorithm needs one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.models.catalog import resolve
from tidemill.models.codec import load_codec
from tidemill.models.heads import ScalarHead
from tidemill.models.loading import load_model
from tidemill.models.reward_model import hidden_size
from tidemill.runtime.parts import Parts
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic


def build_critic(parts: Parts, *, progress: Callable[[str], None]) -> Critic | None:
    """A network of its own, or a value head on the policy's hidden states; None where the algorithm needs neither.

    Its first values are 0 in either case: what an advantage is then measured from is the return itself.

    Raises:
        UserError: the critic's own model cannot be had, or has another tokenizer.
    """
    spec = parts.spec
    if not spec.algorithm.needs_critic:
        return None
    config, clip = spec.critic, spec.algorithm.value_clip
    if config.kind == "shared":
        head = ScalarHead(hidden_size(parts.model)).to(parts.device)
        coefficient = spec.algorithm.value_coefficient
        return TrunkCritic(
            parts.model, head, config, value_coefficient=coefficient, value_clip=clip, autocast=parts.autocast
        )
    folder = _folder(spec, parts, progress)
    model = load_model(folder, device=parts.device)
    if spec.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # as the policy, whose dropout was found to be 0
    head = ScalarHead(hidden_size(model)).to(parts.device)
    return ModelCritic(model, head, config, source=folder, value_clip=clip, autocast=parts.autocast)


def _folder(spec: RunSpec, parts: Parts, progress: Callable[[str], None]) -> Path:
    """The weights that the critic begins with; its ids must be the policy's."""
    if spec.critic.source is None:
        return parts.folder
    folder = resolve(ModelConfig(source=spec.critic.source), progress=progress)
    if load_codec(folder).vocabulary_digest != parts.codec.vocabulary_digest:
        raise UserError(
            "the critic has another tokenizer than the policy: it would value other words than were written",
            where="critic.source",
            cure="leave critic.source out to begin with the policy's own weights, or give a model made from them",
        )
    return folder
