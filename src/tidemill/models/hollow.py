"""A model without weights, made from its configuration alone: what a worker that pulls its weights begins with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tidemill.config.model import ModelConfig
from tidemill.models.attention import use_packed_attention
from tidemill.models.auto import build_unloaded, configured_context, load_config
from tidemill.models.lora import attach_adapter
from tidemill.models.snapshots import empty_twin

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
LARGEST_FILE = 64 << 20
"""Configuration and tokenizer of a model; anything larger is not needed to generate."""


def shell_files(folder: Path) -> dict[str, bytes]:
    """What of a model folder a worker needs besides its weights, by file name."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in WEIGHTS]
    return {path.name: path.read_bytes() for path in files if path.stat().st_size <= LARGEST_FILE}


def stored_context_limit(folder: Path) -> int:
    """`loading.context_limit` of the model in a folder, which is not loaded."""
    return configured_context(load_config(folder))


def check_adapter(folder: Path, config: ModelConfig) -> None:
    """The adapter of `config` can be put into a folder's model. Takes no memory for it.

    Raises:
        UserError: as `hollow_model`.
    """
    with torch.device("meta"):
        attach_adapter(build_unloaded(folder, torch.float32), config)


def hollow_model(folder: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder's configuration: eval mode, Tidemill's attention, parameters of no elements until a
    snapshot is bound (see `snapshots`).

    Args:
        config: whether it has an adapter, and which.

    Raises:
        UserError: the configuration is of no causal language model, or the adapter cannot be had.
    """
    model = build_unloaded(folder, dtype)
    model.tie_weights()  # skipped with the initial values
    use_packed_attention(model)
    if config.lora.enabled:
        attach_adapter(model, config)
    twin = empty_twin(model, dtype)
    twin.to(device=device)  # type: ignore[call-arg]
    return twin
