"""The shape of a decoder-only transformer: parameters, FLOPs per token, bytes per token and per parameter."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tidemill.core.records import Record

HEAD_DIM = 128
KV_HEADS = 8
VOCAB = 128_256
LAYERS_TO_WIDTH = 102
MLP_RATIO = 3.5
LAYER_SQUARES = 12.75
"""Parameters of a layer over width squared: 2.25 for attention, 3 * 3.5 for the MLP."""
TIED_BELOW = 4e9
BISECTIONS = 60


class ModelShape(Record):
    """The shape of a model. If `parameters` was given by hand, the other fields are assumed and need not match it."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # per expert in a mixture of experts
    vocab: int
    tied: bool = False  # output head and embedding share a matrix
    experts: int = 0  # per layer; 0: dense model
    experts_per_token: int = 0
    dense_layers: int = 0  # layers without experts, in a model with experts
    expert_parameters: float = 0.0  # of all routed experts
    kv_values_per_layer: int = 0  # per token if compressed (MLA); 0: kv_heads * head_dim keys and values
    assumed: bool = False  # derived from a number of parameters

    @property
    def embedding_parameters(self) -> float:
        """Parameters that are only looked up; 0 with tied weights, whose matrix is also the output head."""
        return 0.0 if self.tied else float(self.vocab * self.hidden)

    @property
    def active_parameters(self) -> float:
        """Parameters multiplied per token."""
        share = self.experts_per_token / self.experts if self.experts else 1.0
        return self.parameters - self.embedding_parameters - self.expert_parameters * (1 - share)

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        """Bytes of keys and values per cached token."""
        per_layer = self.kv_values_per_layer or 2 * self.kv_heads * self.head_dim
        return self.layers * per_layer * element_bytes


def shape_of_parameters(parameters: float) -> ModelShape:
    """A dense model of `parameters` with Llama 3's proportions (arXiv 2407.21783).

    Width 102 times the number of layers, rounded to heads of 128; eight key-value heads; MLP width 3.5 times the width;
    vocabulary 128,256. Small models tie embedding and output head, which would dominate them.
    """
    tied = parameters < TIED_BELOW
    embedding = VOCAB * (1 if tied else 2)
    low, width = 0.0, parameters
    for _ in range(BISECTIONS):
        middle = (low + width) / 2
        too_wide = LAYER_SQUARES * middle**3 / LAYERS_TO_WIDTH + embedding * middle - parameters > 0
        low, width = (low, middle) if too_wide else (middle, width)
    step = HEAD_DIM * KV_HEADS if width >= HEAD_DIM * KV_HEADS * 2 else HEAD_DIM
    hidden = max(round(width / step), 1) * step
    heads = hidden // HEAD_DIM
    kv_heads, intermediate = min(heads, KV_HEADS), round(MLP_RATIO * hidden)
    per_layer = 2 * hidden * (hidden + kv_heads * HEAD_DIM) + 3 * hidden * intermediate
    return ModelShape(
        parameters=parameters,
        layers=max(round((parameters - embedding * hidden) / per_layer), 1),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate=intermediate,
        vocab=VOCAB,
        tied=tied,
        assumed=True,
    )


def adapter_parameters(shape: ModelShape, rank: int) -> float:
    """LoRA parameters: two matrices per linear layer except the output head and experts."""
    attention, mlp, dense_layers = adapted_widths(shape)
    return rank * (shape.layers * attention + dense_layers * mlp)


def adapted_widths(shape: ModelShape) -> tuple[int, int, int]:
    """Return (sum of in and out widths of a layer's attention, of its MLP, layers with an adapted MLP)."""
    keys = shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + shape.attention_width) + 2 * (shape.hidden + keys)
    return attention, 3 * (shape.hidden + shape.intermediate), shape.dense_layers if shape.experts else shape.layers


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""Bytes of one stored or sent parameter."""

Optimizer: TypeAlias = Literal["adam", "adam-8bit"]


class StateBytes(Record):
    """Bytes of training state per parameter."""

    weights: float
    gradients: float
    moments: float
    master: float  # fp32 copy that receives the updates

    @property
    def optimizer(self) -> float:
        return self.moments + self.master

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


MIXED_PRECISION = "mixed precision: weights and gradients in bf16, moments and master in fp32 (ZeRO, arXiv 1910.02054)"
TRAINED: dict[Optimizer, StateBytes] = {
    "adam": StateBytes(weights=2, gradients=2, moments=4 + 4, master=4),
    "adam-8bit": StateBytes(weights=2, gradients=2, moments=1 + 1, master=4),  # arXiv 2110.02861, without block scales
}
FROZEN_BYTES = 2
"""Bytes of a frozen parameter, in bf16."""
