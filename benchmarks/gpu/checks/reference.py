"""The independent reference of the agreement checks: transformers' own eager attention, one sequence at a time.

The model has SmolLM2's shape and random weights, larger than at the start of training: its distributions are sharp, so
that errors show. The limit is the library's own error: how far its forward pass in the same dtype is from float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.check_rows import Settings
from benchmarks.gpu.qwen_shapes import cast_parameters

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
NARROW = SMALL | {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Heads of width 8."""
FP32 = 1e-3
"""Largest difference of a logprob in fp32: 30 layers in another order of sums; 1e-5 was measured on a CPU."""
OWN_ERROR = {torch.float32: 10.0, torch.bfloat16: 2.0}
"""Largest ratio of our mean error to that of transformers in the same dtype, both against float64.

In fp32 other kernels may round several times as much; a step in bf16 or TF32 gives 100 and more.
"""
OWN = "transformers in the same dtype, against float64"


def sharp_model(settings: Settings, shape: dict[str, Any] | None = None, *, scale: float = 0.06) -> PreTrainedModel:
    """fp32, on the device, in eval mode; the same weights at every call.

    Args:
        scale: standard deviation of the weights.
    """
    torch.manual_seed(0)
    fields = shape or (SMALL if settings.tiny else SMOLLM2)
    config = LlamaConfig(**fields, tie_word_embeddings=True, max_position_embeddings=4096, initializer_range=scale)
    model: PreTrainedModel = LlamaForCausalLM(config)
    nn.Module.to(model, settings.device)
    model.eval()
    return model


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with weights of `dtype`."""
    own = copy.deepcopy(model)
    cast_parameters(own, dtype)
    return own


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """The model with transformers' eager attention."""
    model.set_attn_implementation("eager")
    return model


def reference_logprobs(model: PreTrainedModel, sequence: Sequence[int], first: int) -> Tensor:
    """Logprobs [T] of the tokens from position `first` on, float32 or the model's float64; with gradient if enabled."""
    ids = torch.tensor([list(sequence)], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(sequence) - first + 1).logits[0, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, first:, None])[:, 0]
