"""The parts of an in-process run, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.lora import LoraConfig
from tidemill.config.model import ModelConfig
from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion
from tidemill.envs.text.task import Task
from tidemill.models.adapter_folder import load_adapter, read_origin
from tidemill.models.catalog import resolve
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.folder import holds_adapter, refuse_reward_model
from tidemill.models.loading import context_limit, load_model
from tidemill.models.lora import learned_parameters, require_peft
from tidemill.models.snapshots import empty_twin, twin_on_base
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.runtime.frozen import FrozenModels
from tidemill.runtime.machine import choose_device, choose_precision, set_threads
from tidemill.runtime.task import engine_context, fitting_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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
        return twin_on_base(self.rollout_model, self.rollout_dtype)

    def reference(self) -> PreTrainedModel | None:
        """The initial model, frozen, where the loss needs it and no other process has it."""
        needed = self.spec.algorithm.kl_beta > 0 and self.spec.placement.reference == "trainer"
        return self.frozen.load(self.folder) if needed else None


def load_parts(spec: RunSpec, *, progress: Callable[[str], None], folder: Path | None = None) -> Parts:
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
    return Parts(
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
    copy = twin_on_base(model, dtype) if dtype == model.dtype else empty_twin(model, dtype)
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
            cure="turn it off for this model, or set its dropout to 0 in config.json",
        )
