"""Opens an engine without weights: they come with the first version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from tidemill.config.schema import RunSpec
from tidemill.core.errors import UserError
from tidemill.core.protocols import Engine, EngineCapabilities
from tidemill.models.codec import load_codec
from tidemill.models.snapshots import DTYPES, stored_context_limit, stored_linear_layers, uninitialized_model
from tidemill.models.tree_forward import TreeForward
from tidemill.rollout.engines.vllm import check_version
from tidemill.rollout.sampling import NOISE, STREAM
from tidemill.rollout.weight_sources import EmptyModel, SnapshotUser, StreamUser
from tidemill.runtime.compute import choose_device
from tidemill.runtime.model_bundle import NO_VERSION, FrozenModels, ModelBundle, engine_context


class WeightUser(SnapshotUser, StreamUser, Protocol):
    """Takes versions in either form."""

    @property
    def device_type(self) -> str:
        """As in `torch.device`."""


Opened: TypeAlias = tuple[Engine, WeightUser]
Open: TypeAlias = Callable[[RunSpec, Path, int, str], Opened]


def open_engine(spec: RunSpec, folder: Path, *, prompt_tokens: int, dtype: str) -> Opened:
    """The engine that `engine.kind` names, and what takes its weights.

    Args:
        folder: configuration and tokenizer of the model; it must remain as long as the engine.
        dtype: of the published weights.

    Raises:
        UserError: this machine cannot run the configuration.
    """
    engine, user = ENGINES[spec.engine.kind](spec, folder, prompt_tokens, dtype)
    check_capabilities(engine.capabilities, spec)
    return engine, user


def _embedded(spec: RunSpec, folder: Path, prompt_tokens: int, dtype: str) -> Opened:
    device = choose_device(spec.trainer)
    model = uninitialized_model(folder, spec.model, device=device, dtype=DTYPES[dtype])
    bundle = ModelBundle(
        spec=spec,
        folder=folder,
        forward=TreeForward(model),
        rollout_model=model,
        frozen=FrozenModels(device),
        codec=load_codec(folder),
        device=device,
        autocast=None,
        threads=torch.get_num_threads(),
    )
    engine = bundle.engine_over(model, NO_VERSION, prompt_tokens=prompt_tokens)
    return engine, EmptyModel(model, drop_caches=engine.drop_caches)


def _vllm(spec: RunSpec, folder: Path, prompt_tokens: int, dtype: str) -> Opened:
    check_version()
    from tidemill.rollout.engines.vllm.adapters import AdapterSettings
    from tidemill.rollout.engines.vllm.engine import VllmEngine, VllmSettings

    lora, adapter = spec.model.lora, None
    if lora.enabled:
        adapter = AdapterSettings(
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets or stored_linear_layers(folder),
            in_place=spec.schedule.keeps_cache,
        )
    config, codec = spec.engine.vllm, load_codec(folder)
    settings = VllmSettings(
        model=str(folder) if config.load_format == "dummy" else spec.model.source,
        dtype=dtype,
        slots=spec.engine.slots,
        context=engine_context(spec, limit=stored_context_limit(folder), prompt_tokens=prompt_tokens),
        ranks=max(1, spec.engine.tensor_parallel),
        batch_invariant=spec.engine.batch_invariant,
        keep_cache=spec.schedule.keeps_cache,
        prefill_chunk_tokens=spec.engine.prefill_chunk_tokens,
        cache_gb=config.cache_gb,
        memory_fraction=config.memory_fraction,
        load_format=config.load_format,
        args=config.args,
        adapter=adapter,
        sleeps=spec.placement.engine == "colocated",
    )
    engine = VllmEngine(settings, decode=codec.decode, version=NO_VERSION)
    return engine, engine


ENGINES: dict[str, Open] = {"embedded": _embedded, "vllm": _vllm}


def check_capabilities(capabilities: EngineCapabilities, spec: RunSpec) -> None:
    """Check that an engine can keep what the configuration promises.

    Raises:
        UserError: names what it lacks.
    """
    hint = 'use engine.kind = "embedded"'
    if capabilities.draws not in (NOISE, STREAM) and not spec.fleet.inexact_migration:
        what = f"the engine draws other noise ({capabilities.draws}) than the reserved one ({NOISE})"
        raise UserError(what, where="engine.kind", hint=f"{hint}, or set fleet.inexact_migration = true")
    if capabilities.draws == STREAM:
        what = "the engine's random numbers depend on the order of its calls, so no sample could continue elsewhere"
        raise UserError(what, where="engine.kind", hint=hint)
    if spec.engine.batch_invariant and not capabilities.batch_invariant:
        raise UserError("the engine is not batch-invariant", where="engine.batch_invariant", hint=hint)
    if spec.model.lora.enabled and not capabilities.lora:
        raise UserError("the engine does not load adapters", where="model.lora", hint=hint)
