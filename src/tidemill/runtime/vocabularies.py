"""Whether the models of a run read the same words in the same token ids, known before it has a directory."""

from __future__ import annotations

from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.models.catalog import asked_for_by, resolve_shell
from tidemill.models.codec import load_codec
from tidemill.runtime.critic import check_critic_vocabulary, own_source
from tidemill.runtime.rewards import check_reward_models


def check_vocabularies(spec: RunSpec) -> None:
    """Reward models and a critic of its own have the policy's tokenizer, as far as that is known before a model is
    built or merged; a run looks again when they are.

    Raises:
        UserError: naming the model at fault.
    """
    critic = own_source(spec)
    if critic is None and not any(reward.kind == "model" for reward in spec.scoring.rewards):
        return
    policy = resolve_shell(spec.model, progress=_silent)
    if policy is None:
        return
    check_reward_models(spec, progress=_silent, policy_folder=policy)
    if critic is not None:
        with asked_for_by("critic.source"):
            folder = resolve_shell(ModelConfig(source=critic, char=spec.model.char), progress=_silent)
        if folder is not None:
            check_critic_vocabulary(critic, load_codec(folder), load_codec(policy))


def _silent(_: str) -> None:
    """It takes no time that anybody would ask about."""
