"""Small models with a trained adapter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tests.model_shapes import MODEL_SHAPES
from tidemill.config.model import ModelConfig
from tidemill.models.attention import use_packed_attention
from tidemill.models.lora import attach_adapter, learned_parameters

RANK = 4


def lora_config(**lora: Any) -> ModelConfig:
    return ModelConfig.model_validate({"source": "char", "lora": {"rank": RANK, "alpha": 8, **lora}})


def adapted(shape: str = "llama", *, learned: bool = True, **lora: Any) -> PreTrainedModel:
    """A model of `MODEL_SHAPES` with packed attention and an adapter."""
    model = MODEL_SHAPES[shape]()
    use_packed_attention(model)
    attach_adapter(model, lora_config(**lora))
    if learned:
        teach(model)
    return model


def teach(model: PreTrainedModel, seed: int = 0) -> None:
    """Change every element of the adapter noticeably, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learned_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
