"""The independent reference of the agreement checks: transformers' own eager attention, one sequence at a time.

The model has SmolLM2's shape and random weights, larger than at the start of training: its distributions are sharp, so
that errors show. In bf16 the limit is the library's own error: how far its bf16 forward pass is from fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.gpu.check_rows import Settings

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
OWN_ERROR = 2.0
"""Largest ratio of our error in bf16 to that of transformers in bf16, both against fp32."""


def sharp_model(settings: Settings, shape: dict[str, Any] | None = None) -> PreTrainedModel:
    """fp32, on the device, in eval mode; the same weights at every call."""
    torch.manual_seed(0)
    fields = shape or (SMALL if settings.tiny else SMOLLM2)
    config = LlamaConfig(**fields, tie_word_embeddings=True, max_position_embeddings=4096, initializer_range=0.06)
    model: PreTrainedModel = LlamaForCausalLM(config)
    nn.Module.to(model, settings.device)
    model.eval()
    return model


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy."""
    own = copy.deepcopy(model)
    nn.Module.to(own, dtype)
    return own


def reference(model: PreTrainedModel) -> PreTrainedModel:
    """The model with transformers' eager attention."""
    model.set_attn_implementation("eager")
    return model


def reference_logprobs(model: PreTrainedModel, sequence: Sequence[int], first: int) -> Tensor:
    """Logprobs float32 [T] of the tokens from position `first` on, with gradient if it is enabled."""
    ids = torch.tensor([list(sequence)], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(sequence) - first + 1).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[0, first:, None])[:, 0]
