"""Parameters counted from configurations, against what the models are published to have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import UserError
from tidemill.hardware.model_config import read_shape, shape_of_config
from tidemill.hardware.model_shape import shape_of_parameters

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
LLAMA3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "parameters", "tolerance"),
    [
        (SMOLLM2, 134_515_008, 0),  # the checkpoint's own count
        (QWEN25_7B, 7_615_616_512, 0),
        (LLAMA3_70B, 70_553_706_496, 0),
        (MIXTRAL, 46.7e9, 1e-3),
        (DEEPSEEK_V3, 671e9, 1e-3),
    ],
)
def test_parameters(config: dict[str, Any], parameters: float, tolerance: float) -> None:
    assert shape_of_config(config, source="test").parameters == pytest.approx(parameters, rel=tolerance, abs=0)


def test_active_parameters_of_models_with_experts() -> None:
    # Mixtral is said to use 12.9e9 of its 46.7e9, the embedding (0.13e9) among them; DeepSeek-V3 37e9 of 671e9
    mixtral, deepseek = (shape_of_config(config, source="test") for config in (MIXTRAL, DEEPSEEK_V3))
    assert mixtral.active_parameters + mixtral.embedding_parameters == pytest.approx(12.9e9, rel=5e-3)
    assert deepseek.active_parameters + deepseek.embedding_parameters == pytest.approx(37e9, rel=0.02)


def test_keys_and_values_per_token() -> None:
    # 2 * 80 layers * 8 heads * 128 * 2 bytes; DeepSeek keeps 512 + 64 numbers a layer: 61 * 576 * 2
    assert shape_of_config(LLAMA3_70B, source="test").kv_bytes_per_token() == 327_680
    assert shape_of_config(DEEPSEEK_V3, source="test").kv_bytes_per_token() == 70_272
    assert shape_of_config(LLAMA3_70B, source="test").kv_bytes_per_token(1) == 163_840


def test_an_assumed_shape_is_close_to_published_ones() -> None:
    # Llama 3 8B has 32 layers of width 4096, the 70B 80 of 8192
    small, large = shape_of_parameters(8e9), shape_of_parameters(70e9)
    assert (small.layers, small.hidden, small.kv_heads, small.vocab) == (32, 4096, 8, 128_256)
    assert (large.layers, large.hidden) == (79, 8192)
    assert large.parameters == 70e9
    assert large.assumed
    assert not shape_of_config(SMOLLM2, source="test").assumed


def test_read_shape_from_a_folder_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": SMOLLM2}), encoding="utf-8")
    assert read_shape(tmp_path) == read_shape(path) == shape_of_config(SMOLLM2, source="test")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "is not a model configuration"),
        (json.dumps({"hidden_size": 4}), "config.json: num_hidden_layers: is missing"),
        (
            json.dumps({**SMOLLM2, "hidden_size": "wide"}),
            "hidden_size: must be an integer from 1",
        ),
        (
            json.dumps({**SMOLLM2, "hidden_size": 10**400}),
            "hidden_size: must be an integer from 1",
        ),
        ('{"hidden_size": ' + "1" * 5000 + "}", "not valid JSON"),
        (json.dumps({**SMOLLM2, "num_key_value_heads": -1}), "num_key_value_heads"),
        (
            json.dumps({**SMOLLM2, "num_key_value_heads": 0}),
            "num_key_value_heads: must be an integer from 1",
        ),
        (
            json.dumps({**SMOLLM2, "num_key_value_heads": 10}),
            "num_key_value_heads: is 10, which does not",
        ),
        (json.dumps({**MIXTRAL, "num_experts_per_tok": 9}), "num_experts_per_tok: must be 1 to 8, is 9"),
    ],
)
def test_a_configuration_error_names_the_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_shape(path)
    assert says in str(caught.value)


def test_a_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_shape(tmp_path)
