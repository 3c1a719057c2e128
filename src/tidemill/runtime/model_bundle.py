"""Load the models of a process as the configuration says: policy, rollout copy, reference and critic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from tidemill.agents.run_agent import agent_prompts
from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion
from tidemill.data.build_task import configured_task
from tidemill.data.eval_sets import with_eval_sets
from tidemill.data.prompts import Task, check_fits
from tidemill.hardware.process_memory import TRAINS, Work
from tidemill.kernels.availability import missing
from tidemill.models.catalog import errors_at_key, resolve, resolve_shell
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import holds_reward_model, refuse_reward_model
from tidemill.models.forward_check import check_layers
from tidemill.models.loading import context_limit, load_model, unloaded_model
from tidemill.models.lora import attach_adapter, learned_parameters, require_peft
from tidemill.models.model_source import ModelSource, locate
from tidemill.models.ranks import ONE_RANK, Ranks
from tidemill.models.recomputation import keep_products_of_mlps
from tidemill.models.reward_model import ScalarHead, check_head_fits, hidden_size, load_head
from tidemill.models.saving import errors_of_base, load_adapter
from tidemill.models.snapshots import check_shardable, copy_on_base, empty_copy
from tidemill.models.tree_forward import TreeForward
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.runtime.compute import choose_device, choose_precision, set_threads
from tidemill.runtime.fit_memory import fitted
from tidemill.runtime.frozen_scorers import check_reward_models
from tidemill.runtime.memory_check import known_models
from tidemill.trainer.critic import Critic, ModelCritic, TrunkCritic
from tidemill.trainer.sharding import load_shards

NO_VERSION = PolicyVersion(number=-1, digest="")
"""Version of an engine before its first load; no request asks for it."""


class FrozenModels:
    """Frozen models by folder, on one device, each loaded once. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: dict[Path, PreTrainedModel] = {}

    def load(self, folder: Path) -> PreTrainedModel:
        """The frozen model of a folder, shared by all callers.

        Raises:
            UserError: it cannot be loaded.
        """
        folder = folder.resolve()
        if folder not in self._models:
            self._models[folder] = load_model(folder, device=self._device).requires_grad_(False)
        return self._models[folder]

    def with_adapter(self, folder: Path, config: ModelConfig) -> PreTrainedModel:
        """A model with a new adapter, whose base shares the parameters of the frozen model.

        Raises:
            UserError: it cannot be loaded, or the adapter does not fit it.
        """
        base = self.load(folder)
        model = empty_copy(base, base.dtype, shared=base.parameters())
        attach_adapter(model, config)
        return model


SERVED_CONTEXT = 2048
"""Default context of a served engine, if the model has it: the cache has a row of this length for each slot."""
SCAFFOLD_TOKENS = 32
"""Tokens of a chat template around an observation, at most."""


def fitting_task(
    spec: RunSpec, codec: TextCodec, *, limit: int, progress: Callable[[str], None] = lambda _: None
) -> Task:
    """Build the configured task and evaluation sets, and check that prompts and completions fit into the context.

    Args:
        limit: the model's maximum sequence length, in tokens.

    Raises:
        UserError: the task cannot be built, or does not fit.
    """
    agent = agent_prompts(spec, codec)
    task = configured_task(spec, codec=codec, progress=progress, agent=agent)
    task = with_eval_sets(task, spec, codec=codec, agent=agent)
    check_fits(task, longest_context(spec, limit), new_tokens(spec))
    return task


def engine_context(spec: RunSpec, *, limit: int, prompt_tokens: int) -> int:
    """Maximum length of prompt plus completion in an engine, in tokens."""
    turns = spec.gateway.session_turns if spec.gateway.sessions else spec.env.turns if spec.env.enabled else 0
    observed = turns * (spec.env.observation_tokens + SCAFFOLD_TOKENS)
    needed = SERVED_CONTEXT if spec.task.kind == "served" else prompt_tokens + new_tokens(spec) + observed
    return spec.engine.context_tokens or min(needed, longest_context(spec, limit))


def new_tokens(spec: RunSpec) -> int:
    """Maximum completion length of training and evaluation, in tokens; requests to a served model say their own."""
    return 1 if spec.task.kind == "served" else max(spec.sampling.max_new_tokens, spec.eval.max_new_tokens)


def longest_context(spec: RunSpec, limit: int) -> int:
    """Raises UserError: the configured context exceeds the model's."""
    wanted = spec.engine.context_tokens
    if wanted > limit:
        raise UserError(
            f"{wanted} tokens exceed the model's limit of {limit}",
            where="engine.context_tokens",
            hint=f"lower it to {limit}, or set it to 0 to use what the task needs",
        )
    return wanted or limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle:
    """A model with its device, precision and tokenizer. That of a rank has no weights until `load_shards`."""

    spec: RunSpec
    folder: Path  # Hugging Face folder of the model
    forward: TreeForward  # of `model`; policy and shared critic use the same
    rollout_model: PreTrainedModel  # used by engines: `model` itself, or a copy
    frozen: FrozenModels
    codec: TextCodec
    device: torch.device
    autocast: torch.dtype | None
    threads: int

    def task(self, progress: Callable[[str], None] = lambda _: None) -> Task:
        """The configured task, checked against the model's context."""
        return fitting_task(self.spec, self.codec, limit=context_limit(self.model), progress=progress)

    def engine(self, version: PolicyVersion, *, prompt_tokens: int) -> EmbeddedEngine:
        """The trainer's engine; if it uses a copy of the model, every load updates the copy."""
        model = self.rollout_model
        if model is self.model:
            return self.engine_over(model, version, prompt_tokens=prompt_tokens)
        targets, sources = learned_parameters(model).values(), learned_parameters(self.model).values()

        @torch.no_grad()
        def refresh() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return self.engine_over(model, version, prompt_tokens=prompt_tokens, refresh=refresh)

    def engine_over(
        self,
        model: PreTrainedModel,
        version: PolicyVersion,
        *,
        prompt_tokens: int,
        refresh: Callable[[], None] | None = None,
    ) -> EmbeddedEngine:
        """An engine with the configured settings over other weights of this model: equal weights, equal tokens."""
        spec = self.spec
        return EmbeddedEngine(
            model,
            decode=self.codec.decode,
            slots=spec.engine.slots,
            context=engine_context(spec, limit=context_limit(self.model), prompt_tokens=prompt_tokens),
            version=version,
            prefill_chunk_tokens=spec.engine.prefill_chunk_tokens,
            batch_invariant=spec.engine.batch_invariant,
            keep_cache=spec.schedule.keeps_cache,
            refresh=refresh,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.forward.model

    @property
    def device_info(self) -> dict[str, Any]:
        """For the event log."""
        return {
            "device": str(self.device),
            "threads": self.threads,
            "autocast": str(self.autocast),
            "microbatch_tokens": self.spec.batch.microbatch_tokens,
            "activation_checkpointing": self.spec.trainer.activation_checkpointing,
        }

    @property
    def rollout_dtype(self) -> torch.dtype:
        """Dtype of the weights that engines use."""
        return self.autocast or torch.float32

    def reference(self, ranks: Ranks = ONE_RANK) -> PreTrainedModel | None:
        """The frozen initial model, if the loss needs it and it is placed in this process. For one of several ranks
        without weights, in the dtype that a pass rounds them to anyway."""
        if self.spec.algorithm.kl_beta == 0 or self.spec.placement.reference != "trainer":
            return None
        if ranks.size == 1:
            return self.frozen.load(self.folder)
        return unloaded_model(self.folder, dtype=self.rollout_dtype).requires_grad_(False)

    def forward_of(self, model: PreTrainedModel | None) -> TreeForward | None:
        """The forward pass of a frozen model in the precision of the policy's."""
        return None if model is None else TreeForward(model, autocast=self.autocast, device=self.device)


def load_model_bundle(
    spec: RunSpec,
    *,
    progress: Callable[[str], None],
    model: ModelSource | None = None,
    generates: bool = True,
    work: Work = "generate",
) -> ModelBundle:
    """Choose device and threads, and load model and tokenizer.

    Args:
        model: replaces the configured model, including its adapter settings.
        generates: whether an engine uses the model, which may then need a copy. If not, and with `trainer.shards`, the
            model is a rank's: on the meta device, until the rank has joined the others and knows its rows.
        work: of this process. For training, automatic settings are chosen: `ModelBundle.spec` has them.

    Raises:
        UserError: the model, the device or the tokenizer cannot be used.
    """
    device = choose_device(spec.trainer)
    threads = set_threads(spec.trainer, device)
    if device.type == "cuda" and (reason := missing(device)) is not None:
        progress(f"{reason}: logprobs are computed without Triton kernels, which is slower")
    if model is not None:
        refuse_reward_model(model.source)
        spec = spec.model_copy(update={"model": model.config(spec.model)})
    refuse_reward_model(locate(spec.model.source).source)
    if spec.model.lora.enabled:
        require_peft()
    adapter = model.adapter if model is not None else None
    with nullcontext() if adapter is None else errors_of_base(adapter):
        found = resolve(spec.model, progress=progress)
    autocast = choose_precision(spec.trainer, device)
    if work in TRAINS:
        on_gpu = device.type == "cuda"
        share = min(1.0, spec.ray.trainer_gpus) if spec.runtime == "ray" else 1.0
        memory = share * torch.cuda.get_device_properties(device).total_memory if on_gpu else None
        spec = fitted(spec, known_models(spec, found, fetch=False), work, gpu_bytes=memory)
        if on_gpu:
            tokens = spec.supervised.microbatch_tokens if work == "supervised" else spec.batch.microbatch_tokens
            recomputed = str(spec.trainer.activation_checkpointing).lower()
            progress(f"microbatches of {tokens} tokens; activation_checkpointing: {recomputed}")
    frozen = FrozenModels(device)
    if spec.trainer.shards > 1 and not generates:
        policy = unloaded_model(found, spec.model)
    elif spec.model.lora.enabled:
        policy = frozen.with_adapter(found, spec.model)
    else:
        policy = load_model(found, device=device)
    if adapter is not None:
        load_adapter(adapter, policy)
    # Engines need a copy if their dtype differs, or if they generate while the optimizer changes the weights.
    separate = generates and (autocast is not None or spec.schedule.max_policy_lag > 0)
    rollout_model = _copy_of(policy, autocast or torch.float32) if separate else policy
    checkpoint_activations(policy, spec.trainer.recomputes(on_gpu=False))  # "auto" stands for nothing without training
    return ModelBundle(
        spec=spec,
        folder=found,
        forward=TreeForward(policy, autocast=autocast, device=device),
        rollout_model=rollout_model,
        frozen=frozen,
        codec=load_codec(found),
        device=device,
        autocast=autocast,
        threads=threads,
    )


def _copy_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model, rounded to `dtype`. If that is the model's own dtype, an adapter's base is shared."""
    copy = copy_on_base(model, dtype) if dtype == model.dtype else empty_copy(model, dtype)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            if target is not source:
                target.data = source.to(dtype, copy=True)
    return copy


def checkpoint_activations(model: PreTrainedModel, recomputes: bool | Literal["selective"]) -> None:
    """Raises UserError: all activations of a layer would be recomputed, and the model has dropout."""
    if recomputes == "selective":
        keep_products_of_mlps(model)
    elif recomputes:
        model.gradient_checkpointing_enable()
        model.train()  # transformers checkpoints activations in this mode only
        _refuse_dropout(model)


def _refuse_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    rates = {name: value for name, value in vars(config).items() if "dropout" in name and isinstance(value, float)}
    if any(rates.values()):
        raise UserError(
            f"the model has dropout ({', '.join(name for name, rate in rates.items() if rate)})",
            where="trainer.activation_checkpointing",
            hint="turn it off for this model, or set its dropout to 0 in config.json",
        )


def build_model_critic(
    spec: RunSpec,
    *,
    policy_folder: Path,
    frozen: FrozenModels,
    progress: Callable[[str], None],
    ranks: Ranks = ONE_RANK,
) -> ModelCritic:
    """A critic with a separate model, in the policy's process or another.

    Args:
        policy_folder: Hugging Face folder of the policy.

    Raises:
        UserError: as `reference_and_critic`.
    """
    device, source = choose_device(spec.trainer), spec.critic.source
    folder = policy_folder
    if source is not None:
        with errors_at_key("critic.source"):
            folder = resolve(ModelConfig(source=source, char=spec.model.char), progress=progress)
        check_critic_vocabulary(source, load_codec(folder), load_codec(policy_folder))
    base = spec.model.source if folder == policy_folder else str(folder)
    config = spec.model.model_copy(update={"source": base})
    if ranks.size > 1:
        model = unloaded_model(folder, config)
    elif spec.model.lora.enabled:
        model = frozen.with_adapter(folder, config)
    else:
        model = load_model(folder, device=device)
    head = ScalarHead(hidden_size(model)).to(device)
    if source is not None and (given := locate(source).folder) is not None and holds_reward_model(given):
        head, _ = load_head(given, "reward_model", device=device)
        check_head_fits(model, head, given)
        progress(f"the critic starts from the reward model {source}, including its head")
    checkpoint_activations(model, spec.trainer.recomputes(on_gpu=device.type == "cuda"))
    forward = TreeForward(model, autocast=choose_precision(spec.trainer, device), device=device)
    if ranks.size > 1:
        offload = spec.trainer.offload == "optimizer" and device.type == "cuda"
        load_shards(forward, folder, ranks, offload=offload)
    return ModelCritic(forward, head, spec.critic, source=folder, value_clip=spec.critic.value_clip, ranks=ranks)


def reference_and_critic(
    bundle: ModelBundle, ranks: Ranks = ONE_RANK, *, progress: Callable[[str], None], remote: bool = False
) -> tuple[TreeForward | None, Critic | None]:
    """The reference and the critic of a trainer, if it needs them. Of several ranks each loads its rows of these and,
    in place, of the policy.

    A shared critic reads the policy's hidden states; a separate one starts from the policy's weights unless
    `critic.source` is set. If the policy trains an adapter, so does a separate critic, and both share the base in
    memory. A new value head is initialised to output 0.

    Args:
        remote: the critic is in another process.

    Raises:
        UserError: the critic's model cannot be loaded, or its tokenizer differs from the policy's.
    """
    spec = bundle.spec
    if ranks.size > 1:
        load_shards(bundle.forward, bundle.folder, ranks, offload=spec.trainer.offload == "optimizer")
    reference = bundle.forward_of(bundle.reference(ranks))
    if reference is not None and ranks.size > 1:
        load_shards(reference, bundle.folder, ranks)
    critic: Critic | None = None
    if spec.algorithm.needs_critic and not remote:
        if spec.critic.kind == "own":
            critic = build_model_critic(
                spec, policy_folder=bundle.folder, frozen=bundle.frozen, progress=progress, ranks=ranks
            )
        else:
            head = ScalarHead(hidden_size(bundle.model)).to(bundle.device)
            coefficient, clip = spec.critic.value_coefficient, spec.critic.value_clip
            critic = TrunkCritic(
                bundle.forward, head, spec.critic, value_coefficient=coefficient, value_clip=clip, ranks=ranks
            )
    return reference, critic


def check_sharded_models(spec: RunSpec, folder: Path, progress: Callable[[str], None]) -> None:
    """Check once, where a run starts, what the ranks of its trainer do not: that its policy (in `folder`) and a critic
    that starts from another model can be sharded and computed packed.

    Raises:
        UserError: one of them cannot.
    """
    folders = [folder]
    if (source := own_source(spec)) is not None:
        with errors_at_key("critic.source"):
            folders.append(resolve(ModelConfig(source=source, char=spec.model.char), progress=progress))
    for each in folders:
        check_shardable(each)
        check_layers(each)


def own_source(spec: RunSpec) -> str | None:
    """`critic.source` of a separate critic that starts from another model than the policy; else None."""
    return spec.critic.source if spec.algorithm.needs_critic and spec.critic.kind == "own" else None


def check_critic_vocabulary(source: str, critic: TextCodec, policy: TextCodec) -> None:
    """Raises UserError: the critic's tokenizer differs from the policy's."""
    if critic.vocabulary_digest != policy.vocabulary_digest:
        raise UserError(
            f"the critic ({source}) has another tokenizer than the policy",
            where="critic.source",
            hint="name a model made from the policy's, or leave critic.source out",
        )


def check_vocabularies(spec: RunSpec) -> None:
    """Check that reward models and a separate critic share the policy's tokenizer, without loading or building models.

    A model that must first be built or merged is checked when it is loaded.

    Raises:
        UserError: naming the model whose tokenizer differs.
    """
    critic = own_source(spec)
    if critic is None and not any(reward.kind == "model" for reward in spec.scoring.rewards):
        return
    policy = resolve_shell(spec.model, progress=lambda _: None)
    if policy is None:
        return
    check_reward_models(spec, progress=lambda _: None, policy_folder=policy)
    if critic is not None:
        with errors_at_key("critic.source"):
            folder = resolve_shell(ModelConfig(source=critic, char=spec.model.char), progress=lambda _: None)
        if folder is not None:
            check_critic_vocabulary(critic, load_codec(folder), load_codec(policy))
