"""The parts of an in-process run, put together from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.records import PolicyVersion
from tidemill.envs.text.task import Task
from tidemill.models.catalog import resolve
from tidemill.models.codec import TextCodec, load_codec
from tidemill.models.loading import context_limit, load_model
from tidemill.rollout.engines.embedded import EmbeddedEngine
from tidemill.runtime.machine import choose_device, choose_precision, set_threads
from tidemill.runtime.task import engine_context, fitting_task


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A model in memory, how it is computed, and what speaks its tokens."""

    spec: RunSpec
    folder: Path  # the Hugging Face folder the model came from
    model: PreTrainedModel
    codec: TextCodec
    device: torch.device
    autocast: torch.dtype | None
    threads: int

    def task(self) -> Task:
        """The configured task, checked against the model's context."""
        return fitting_task(self.spec, self.codec, limit=context_limit(self.model))

    def engine(self, version: PolicyVersion, *, prompt_tokens: int) -> EmbeddedEngine:
        """An engine over the model itself, or over a copy that follows it at every load: in the autocast dtype, or
        because samples are generated while the optimizer moves the weights."""
        model, refresh = self.model, None
        if self.autocast is not None or self.spec.schedule.max_policy_lag > 0:
            model = load_model(self.folder, device=self.device, dtype=self.rollout_dtype).requires_grad_(False)
            refresh = _follow(model, self.model)
        return self.engine_over(model, version, prompt_tokens=prompt_tokens, refresh=refresh)

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

    def reference(self) -> PreTrainedModel | None:
        """The initial model, frozen, where the loss needs it."""
        if self.spec.algorithm.kl_beta == 0:
            return None
        return load_model(self.folder, device=self.device).requires_grad_(False)


def _follow(copy: PreTrainedModel, original: PreTrainedModel) -> Callable[[], None]:
    @torch.no_grad()
    def refresh() -> None:
        for target, source in zip(copy.parameters(), original.parameters(), strict=True):
            target.copy_(source)

    return refresh


def load_parts(spec: RunSpec, *, progress: Callable[[str], None], folder: Path | None = None) -> Parts:
    """Choose device and threads, and load model and tokenizer.

    Args:
        progress: told, in words, what takes long.
        folder: a model or checkpoint folder instead of the configured source.

    Raises:
        UserError: the model, the device or the tokenizer cannot be had.
    """
    device = choose_device(spec.trainer)
    threads = set_threads(spec.trainer, device)
    if folder is not None:
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"source": str(folder)})})
    found = resolve(spec.model, progress=progress)
    model = load_model(found, device=device)
    if spec.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()  # the library recomputes layers in this mode only; dropout is refused below
        _refuse_dropout(model)
    return Parts(
        spec=spec,
        folder=found,
        model=model,
        codec=load_codec(found),
        device=device,
        autocast=choose_precision(spec.trainer, device),
        threads=threads,
    )


def _refuse_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    rates = {name: value for name, value in vars(config).items() if "dropout" in name and isinstance(value, float)}
    if any(rates.values()):
        raise UserError(
            f"the model has dropout ({', '.join(name for name, rate in rates.items() if rate)})",
            where="trainer.activation_checkpointing",
            cure="turn it off for this model, or set its dropout to 0 in config.json",
        )
