"""Qwen3 models with random weights, in the published sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 151_936


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 model (arXiv 2505.09388 and the configurations published with it)."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    tied: bool = True  # head and embedding are one matrix
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = VOCABULARY


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="0.6B", hidden=1024, layers=28, heads=16, intermediate=3072),
        Shape(name="1.7B", hidden=2048, layers=28, heads=16, intermediate=6144),
        Shape(name="4B", hidden=2560, layers=36, heads=32, intermediate=9728),
        Shape(name="8B", hidden=4096, layers=36, heads=32, intermediate=12288, tied=False),
    )
}
TINY = Shape(name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=512)


def config_fields(shape: Shape) -> dict[str, Any]:
    """Fields of config.json that determine the number of parameters."""
    return {
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights, made on the device."""
    config = Qwen3Config(**config_fields(shape), max_position_embeddings=32_768)
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = Qwen3ForCausalLM(config)
    cast_parameters(model, dtype)
    return model


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the weights, as loading in `dtype` does. `Module.to` would round the frequencies of RoPE, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def matrix_parameters(shape: Shape) -> int:
    """Parameters in matrix products: everything but the embedding and the norms."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    return shape.layers * layer + shape.hidden * shape.vocabulary


def recomputed_flops(shape: Shape, *, tokens: int, attended: int) -> float:
    """Of a second forward pass of all layers, without the output layer."""
    parameters = matrix_parameters(shape) - shape.hidden * shape.vocabulary
    return 2.0 * parameters * tokens + 4.0 * shape.layers * shape.heads * shape.head_dim * attended


def step_flops(shape: Shape, *, tokens: int, attended: int) -> float:
    """Of a forward and backward pass: 6 per parameter and token, 12 per head dimension and attended pair."""
    return 6.0 * matrix_parameters(shape) * tokens + 12.0 * shape.layers * shape.heads * shape.head_dim * attended
