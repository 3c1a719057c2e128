"""What training needs beside model states, in bytes on one GPU: activations, logits, gathered layers."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.sim.profiles.model_shape import ModelShape

ELEMENT = 2  # bf16
LOGITS_BYTES = 8
"""Of one token and one word: the logit and its gradient in fp32, all at once."""
GATHERED_LAYERS = 2
"""Fully sharded training holds the layer in use and the next one whole."""

Recompute: TypeAlias = Literal["full", "none"]


def layer_activation_bytes(shape: ModelShape) -> float:
    """What one layer keeps of one token for its backward pass, in bf16, attention being fused.

    Residual stream, two norms, inputs of the projections (5 widths), queries and output of attention (2 widths of it),
    keys and values, and three times the inner width of a gated MLP. With Llama 3's proportions 35.5 bytes per unit of
    width; Korthikanti et al. (arXiv 2205.05198, eq. 1 without the attention matrix) count 34.
    """
    keys = shape.kv_heads * shape.head_dim
    inner = shape.intermediate * max(shape.experts_per_token, 1)
    return ELEMENT * (5 * shape.hidden + 2 * shape.attention_width + 2 * keys + 3 * inner)


def kept_layers(shape: ModelShape, recompute: Recompute) -> tuple[float, float]:
    """(layers of which only the input is kept, layers of which everything is) at the worst moment of a backward pass.

    The first stage of a pipeline of p stages (1F1B, arXiv 2104.04473) holds p microbatches for a p-th of the layers:
    pipelining does not make this less.
    """
    return (shape.layers, 1) if recompute == "full" else (0, shape.layers)


def activation_bytes(shape: ModelShape, *, tokens: float, recompute: Recompute, tp: int) -> float:
    """Of a microbatch of `tokens` on one GPU; tensor parallelism with sequence parallelism divides all of it."""
    inputs, whole = kept_layers(shape, recompute)
    return tokens * (inputs * ELEMENT * shape.hidden + whole * layer_activation_bytes(shape)) / tp


def logits_bytes(shape: ModelShape, *, tokens: float, tp: int) -> float:
    """Of a microbatch of `tokens` on one GPU."""
    return tokens * shape.vocab * LOGITS_BYTES / tp


def layer_parts(shape: ModelShape) -> tuple[float, float]:
    """(parameters of a layer without its routed experts, those of the experts)"""
    experts = shape.expert_parameters / max(shape.layers - shape.dense_layers, 1)
    return max(shape.layer_parameters - experts, 0.0), experts


def gathered_bytes(shape: ModelShape, *, tp: int, ep: int) -> float:
    """Layers held whole on one GPU; expert parallelism leaves it its own experts only."""
    dense, experts = layer_parts(shape)
    return GATHERED_LAYERS * ELEMENT * (dense / tp + experts / ep)
