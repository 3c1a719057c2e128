"""The models of an in-process run, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.model import LoraConfig, ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion
from tidemill.envs.text.build_task import build_task
from tidemill.envs.text.text_task import Task, check_fits
from tidemill.models.catalog import asked_for_by, resolve, resolve_shell
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import holds_adapter, holds_reward_model, refuse_reward_model
from tidemill.models.loading import context_limit, load_model
from tidemill.models.lora import attach_adapter, learned_parameters, require_peft
from tidemill.models.reward_model import ScalarHead, check_head_fits, hidden_size, load_head
from tidemill.models.saving import load_adapter, read_origin
from tidemill.models.snapshots import copy_on_base, empty_copy
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.runtime.compute import choose_device, choose_precision, set_threads
from tidemill.runtime.readers import check_reward_models
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic


class FrozenModels:
    """By folder, on one device. Not for use from two threads at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[Path, PreTrainedModel] = {}

    def load(self, folder: Path) -> PreTrainedModel:
        """The model of a folder; the second to ask gets the same one.

        Raises:
            UserError: it cannot be loaded.
        """
        if folder.resolve() not in self._models:
            self._models[folder.resolve()] = load_model(folder, device=self._device).requires_grad_(False)
        return self._models[folder.resolve()]

    def with_adapter(self, folder: Path, config: ModelConfig) -> PreTrainedModel:
        """A model that learns in an adapter of its own: other modules over the very parameters of the frozen one.

        Raises:
            UserError: it cannot be loaded, or takes no such adapter.
        """
        base = self.load(folder)
        model = empty_copy(base, base.dtype, shared=base.parameters())
        attach_adapter(model, config)
        return model


def fitting_task(spec: RunSpec, codec: TextCodec, *, limit: int) -> Task:
    """
    Args:
        limit: the longest sequence the model was made for, in tokens.

    Raises:
        UserError: the task cannot be had, or its prompts and completions do not fit.
    """
    task = build_task(
        spec.task,
        codec=codec,
        batch_prompts=spec.batch.prompts,
        seed=spec.run.seed,
        chat_template=spec.model.chat_template,
    )
    check_fits(task, longest_context(spec, limit), new_tokens(spec))
    return task


def engine_context(spec: RunSpec, *, limit: int, prompt_tokens: int) -> int:
    """Longest prompt plus completion that an engine makes room for, in tokens."""
    return spec.engine.context_tokens or min(prompt_tokens + new_tokens(spec), longest_context(spec, limit))


def new_tokens(spec: RunSpec) -> int:
    """The longest completion that training or evaluation may ask for."""
    return max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)


def longest_context(spec: RunSpec, limit: int) -> int:
    """Raises UserError: more is configured than the model was made for."""
    wanted = spec.engine.context_tokens
    if wanted > limit:
        raise UserError(
            f"{wanted} tokens are more than the model's own limit of {limit}",
            where="engine.context_tokens",
            hint=f"lower it to {limit}, or set it to 0 to take what the task needs",
        )
    return wanted or limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle:
    """A model in memory, how it is computed, and what speaks its tokens."""

    spec: RunSpec
    folder: Path  # the Hugging Face folder the model came from
    model: PreTrainedModel
    rollout_model: PreTrainedModel  # what engines compute with: `model` itself, or a copy
    frozen: FrozenModels
    codec: TextCodec
    device: torch.device
    autocast: torch.dtype | None
    threads: int

    def task(self) -> Task:
        """The configured task, checked against the model's context."""
        return fitting_task(self.spec, self.codec, limit=context_limit(self.model))

    def engine(self, version: PolicyVersion, *, prompt_tokens: int) -> EmbeddedEngine:
        """An engine over the model itself, or over a copy that follows it at every load."""
        refresh = None if self.rollout_model is self.model else _follow(self.rollout_model, self.model)
        return self.engine_over(self.rollout_model, version, prompt_tokens=prompt_tokens, refresh=refresh)

    def engine_over(
        self,
        model: PreTrainedModel,
        version: PolicyVersion,
        *,
        prompt_tokens: int,
        refresh: Callable[[], None] | None = None,
    ) -> EmbeddedEngine:
        """An engine with the configured settings over any weights of this model: equal weights, equal tokens."""
        spec = self.spec
        context = engine_context(spec, limit=context_limit(self.model), prompt_tokens=prompt_tokens)
        return EmbeddedEngine(
            model,
            decode=self.codec.decode,
            slots=spec.engine.slots,
            context=context,
            version=version,
            prefill_chunk_tokens=spec.engine.prefill_chunk_tokens,
            batch_invariant=spec.engine.batch_invariant,
            refresh=refresh,
        )

    @property
    def rollout_dtype(self) -> torch.dtype:
        """Of the weights that engines compute with."""
        return self.autocast or torch.float32

    def rollout_twin(self) -> PreTrainedModel:
        """A model for one more engine, without what training changes: that comes as a snapshot."""
        return copy_on_base(self.rollout_model, self.rollout_dtype)

    def reference(self) -> PreTrainedModel | None:
        """The initial model, frozen, where the loss needs it and no other process has it."""
        needed = self.spec.algorithm.kl_beta > 0 and self.spec.placement.reference == "trainer"
        return self.frozen.load(self.folder) if needed else None


def load_model_bundle(spec: RunSpec, *, progress: Callable[[str], None], folder: Path | None = None) -> ModelBundle:
    """Choose device and threads, and load model and tokenizer.

    Args:
        progress: told, in words, what takes long.
        folder: a model or checkpoint folder instead of the configured source; it stands for itself, with the adapter
            it holds or with none.

    Raises:
        UserError: the model, the device or the tokenizer cannot be had.
    """
    device = choose_device(spec.trainer)
    threads = set_threads(spec.trainer, device)
    refuse_reward_model(folder or spec.model.source)
    if folder is not None:
        spec = spec.model_copy(update={"model": _stored_model(folder, spec.model)})
    if spec.model.lora.enabled:
        require_peft()
    found, autocast = resolve(spec.model, progress=progress), choose_precision(spec.trainer, device)
    frozen = FrozenModels(device)
    adapts = spec.model.lora.enabled
    model = frozen.with_adapter(found, spec.model) if adapts else load_model(found, device=device)
    if folder is not None and holds_adapter(folder):
        load_adapter(folder, model)
    # A copy where engines have a dtype of their own, or generate while the optimizer moves the weights.
    separate = autocast is not None or spec.schedule.max_policy_lag > 0
    rollout_model = _copy_of(model, autocast or torch.float32) if separate else model
    if spec.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # the library recomputes layers in this mode only; dropout is refused below
        _refuse_dropout(model)
    return ModelBundle(
        spec=spec,
        folder=found,
        model=model,
        rollout_model=rollout_model,
        frozen=frozen,
        codec=load_codec(found),
        device=device,
        autocast=autocast,
        threads=threads,
    )


def _stored_model(folder: Path, config: ModelConfig) -> ModelConfig:
    """What to load for a folder given instead of the configured model."""
    if not holds_adapter(folder):
        return config.model_copy(update={"source": str(folder), "revision": None, "lora": LoraConfig()})
    stored = read_origin(folder).model
    return stored.model_copy(update={"chat_template": config.chat_template})


def _copy_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A second model, equal to the first as far as `dtype` can say; of the same dtype, it shares a base with it."""
    copy = copy_on_base(model, dtype) if dtype == model.dtype else empty_copy(model, dtype)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            if target is not source:
                target.data = source.to(dtype, copy=True)
    return copy


def _follow(copy: PreTrainedModel, original: PreTrainedModel) -> Callable[[], None]:
    targets, sources = learned_parameters(copy).values(), learned_parameters(original).values()

    @torch.no_grad()
    def refresh() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return refresh


def _refuse_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    rates = {name: value for name, value in vars(config).items() if "dropout" in name and isinstance(value, float)}
    if any(rates.values()):
        raise UserError(
            f"the model has dropout ({', '.join(name for name, rate in rates.items() if rate)})",
            where="trainer.activation_checkpointing",
            hint="turn it off for this model, or set its dropout to 0 in config.json",
        )


def build_critic(bundle: ModelBundle, *, progress: Callable[[str], None]) -> Critic | None:
    """None where the algorithm needs none. A new value head says 0 of everything.

    Args:
        bundle: of the policy; a shared critic reads its hidden states, one of its own begins as the same weights
            unless `critic.source` says otherwise. Where the policy learns in an adapter, so does the critic, in one of
            its own, and what lies under both is in memory once.
        progress: told, in words, what takes long.

    Raises:
        UserError: the critic's model cannot be had, or has another tokenizer than the policy.
    """
    algorithm, config = bundle.spec.algorithm, bundle.spec.critic
    if not algorithm.needs_critic:
        return None
    if config.kind == "own":
        return build_model_critic(
            bundle.spec,
            policy_folder=bundle.folder,
            frozen=bundle.frozen,
            device=bundle.device,
            autocast=bundle.autocast,
            progress=progress,
        )
    return TrunkCritic(
        bundle.model,
        ScalarHead(hidden_size(bundle.model)).to(bundle.device),
        config,
        value_coefficient=config.value_coefficient,
        value_clip=config.value_clip,
        autocast=bundle.autocast,
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
        value_clip=spec.critic.value_clip,
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
            hint="give a model made from the policy's own, or leave critic.source out",
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
