"""Small random-weight causal LMs in the shapes Tidemill supports, for any test that needs a real architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tidemill.models.attention import use_packed_attention
from tidemill.models.tree_forward import TreeForward

VOCABULARY = 128
HIDDEN = 64
CONTEXT = 256
WINDOW = 8  # short enough that a sliding-window error shows within a few tokens
PAD_ID, EOS_ID = 0, 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": PAD_ID,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "initializer_range": 0.2,  # large enough that logits are far from uniform
}


def llama(seed: int = 0, *, layers: int = 2) -> PreTrainedModel:
    """Grouped-query attention, tied embeddings (the shape of SmolLM2)."""
    config = LlamaConfig(**_COMMON, num_hidden_layers=layers, num_key_value_heads=2, tie_word_embeddings=True)
    return _built(lambda: LlamaForCausalLM(config), seed)


def qwen3(seed: int = 0, *, layers: int = 2) -> PreTrainedModel:
    """Query and key norms, a head size that is not hidden / heads, an untied output head."""
    config = Qwen3Config(
        **_COMMON, num_hidden_layers=layers, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False
    )
    return _built(lambda: Qwen3ForCausalLM(config), seed)


def gemma3(seed: int = 0, *, layers: int = 4) -> PreTrainedModel:
    """Sliding-window and full layers with separate rotary bases, scaled embeddings, one key-value head."""
    config = Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=layers,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        tie_word_embeddings=True,
    )
    return _built(lambda: Gemma3ForCausalLM(config), seed)


MODEL_SHAPES: dict[str, Callable[..., PreTrainedModel]] = {"llama": llama, "qwen3": qwen3, "gemma3": gemma3}


def _built(build: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """The model with weights of `seed`, in fp32 and eval mode; restores the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        model.to(dtype=torch.float32)  # type: ignore[call-arg, arg-type, unused-ignore]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms start as the identity, which would hide a missing one
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model


def forward_of(model: PreTrainedModel | None) -> TreeForward | None:
    """With packed attention; None without a model."""
    if model is None:
        return None
    use_packed_attention(model)
    return TreeForward(model)
