"""The model families that Tidemill is tested with, each as a tiny random model with windows of 8 tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tidemill.models.auto import quiet

VOCABULARY, CONTEXT, WINDOW = 128, 96, 8

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.2,  # large enough that probabilities are far from uniform
}
_WINDOWS = {"sliding_window": WINDOW}
_HALF_WINDOWS = {**_WINDOWS, "layer_types": ["sliding_attention", "full_attention"] * 2}
_QWEN_WINDOWS = {**_WINDOWS, "use_sliding_window": True, "max_window_layers": 2}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_GROUPS = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_PLAIN: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_HALF_WINDOWS, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "num_shared_experts": 1},
    "apertus": {},
    "arcee": {},
    "cwm": _HALF_WINDOWS,
    "deepseek_v2": {**_LATENT, **_GROUPS},
    "deepseek_v3": {**_LATENT, **_GROUPS},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_intermediate_size": 48, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": _HALF_WINDOWS,
    "gemma": {},
    "gemma3_text": {**_HALF_WINDOWS, "query_pre_attn_scalar": 16},
    "glm": {},
    "glm4": {},
    "glm4_moe": _GROUPS,
    "gpt2": _PLAIN,
    "gpt_neox": _PLAIN,
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {},
    "ministral": _HALF_WINDOWS,
    "mistral": _WINDOWS,
    "mixtral": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {},
    "olmo2": {},
    "olmo3": _HALF_WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {**_PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {"head_dim": None},
    "phi3": {**_WINDOWS, "head_dim": None},
    "qwen2": _QWEN_WINDOWS,
    "qwen2_moe": {**_QWEN_WINDOWS, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3": _QWEN_WINDOWS,
    "qwen3_moe": {**_WINDOWS, "use_sliding_window": True, **_EXPERTS, "num_experts": 4},
    "seed_oss": {},
    "smollm3": {**_WINDOWS, "use_sliding_window": True},
    "starcoder2": _WINDOWS,
}
"""Configuration fields by model_type."""

_LAYERS = {"hidden_size": 64, "num_hidden_layers": 4}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "layers of type 'conv'"),
    "granite 4 hybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        "layers of type 'linear_attention'",
    ),
    "recurrent gemma": ("recurrent_gemma", {"attention_window_size": WINDOW}, "layers of type '"),
    "minimax": ("minimax", {"num_local_experts": 2, "num_experts_per_tok": 1}, "layers of type 'linear_attention'"),
    "roberta": ("roberta", {"is_decoder": True, **_PLAIN}, "computes other logits when sequences are packed"),
    "bert": ("bert", {"is_decoder": True, **_PLAIN}, "computes other logits when sequences are packed"),
    "bert, not a decoder": ("bert", _PLAIN, "attends to later tokens"),
    "modernbert decoder": (
        "modernbert-decoder",
        {"local_attention": WINDOW},
        "computes other logits when sequences are packed",
    ),
    "gemma 3, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "llama 4": ("llama4_text", {"num_local_experts": 2, "attention_chunk_size": WINDOW}, "'chunked_attention'"),
    "nemotron": ("nemotron", {}, "does not forward keyword arguments to its attention"),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWS}, "soft-capping or sinks"),
    "cohere": ("cohere", {}, "logit_scale"),
    "diffllama": ("diffllama", {}, "attends more than once in layer 0"),
    "mamba": ("mamba", _PLAIN, "does not use transformers' attention interface"),
    "dynamic rotary frequencies": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'dynamic'",
    ),
}
"""By name: model_type, configuration fields, and a part of the error message."""


def build_family(model_type: str, fields: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model in float32 and eval mode, with transformers' attention; restores the random state."""
    given = {name: value for name, value in {**_DECODER, **fields}.items() if value is not None}
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        config = CONFIG_MAPPING[model_type](**given)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms start as the identity, which would hide a missing one
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    return model
