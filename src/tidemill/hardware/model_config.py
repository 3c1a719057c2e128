"""Reads and validates a model's config.json and derives the model's shape. Loads no tensor library."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.hardware.model_shape import ModelShape

CONFIG = "config.json"
HUB_MODELS = Path(__file__).with_name("models.toml")
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SIZES = (*NEEDED, "num_key_value_heads", "max_position_embeddings")
"""Fields that must be positive integers if present."""
MOST = 10**12
"""Upper bound of any count in a configuration."""
_HINT = "give the config.json of a Hugging Face decoder"


class ConfigReader:
    """Reads integers of a configuration; null counts as absent. Methods raise UserError, with file and field.

    Args:
        config: the decoder's part of the configuration.
        source: file name for errors.
    """

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self._source = config, source

    def whole(self, name: str, default: int | None = None, *, least: int | None = None) -> int:
        """Return the integer `name` or `default`, at least `least` (by default 0, or 1 without a default)."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        least = least if least is not None else int(default is None)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            allowed = f"an integer from {least} to {MOST:.0e}"
            what = "is missing" if value is None else f"must be {allowed}, is {value!r:.60}"
            raise UserError(what, where=f"{self._source}: {name}", hint=_HINT)
        return value

    def up_to(self, most: int, name: str, default: int) -> int:
        """Like `whole`, from 1 to `most`."""
        value = self.whole(name, default, least=1)
        if value > most:
            raise UserError(f"must be 1 to {most}, is {value}", where=f"{self._source}: {name}", hint=_HINT)
        return value


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json and check its sizes. Raises UserError: names the file and the field."""
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=str(path), hint=_HINT) from error
    except ValueError as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        hint = "copy or download the file again"
        raise UserError("the model configuration is not valid JSON", where=where, hint=hint) from error
    if not isinstance(config, dict):
        raise UserError("is not a model configuration", where=str(path), hint=_HINT)
    reader = ConfigReader(decoder_part(config), str(path))
    for name in SIZES:
        if reader.config.get(name) is not None:
            reader.whole(name)
    heads, kv_heads = (reader.config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        what = f"is {kv_heads}, which does not divide num_attention_heads = {heads}"
        raise UserError(what, where=f"{path}: num_key_value_heads", hint=_HINT)
    return config


def decoder_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text decoder of a multimodal configuration, else the configuration itself."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
BIASED = ("qwen2", "qwen2_moe")  # query, key and value biases are implied
NORMED = ("qwen3", "qwen3_moe")  # queries and keys are normalised


def read_shape(path: Path) -> ModelShape:
    """Read the shape from a config.json or its folder. Raises UserError: names the file and the field."""
    file = path / CONFIG if path.is_dir() else path
    return shape_of_config(decoder_part(read_config(file)), source=str(file))


@cache
def _hub_models() -> dict[str, dict[str, Any]]:
    return tomllib.loads(HUB_MODELS.read_text(encoding="utf-8"))


def hub_shape(source: str) -> ModelShape | None:
    """The shape of a model of the hub that `models.toml` lists; None of others."""
    config = _hub_models().get(source)
    return None if config is None else shape_of_config(config, source=f"{HUB_MODELS}: {source}")


def shape_of_config(config: dict[str, Any], *, source: str) -> ModelShape:
    """Count every matrix of a Llama-like decoder, including experts and latent attention.

    Raises:
        UserError: names `source` and the field.
    """
    read = ConfigReader(config, source)
    hidden, layers, heads, vocab = (read.whole(name) for name in NEEDED)
    experts = next((read.whole(name) for name in EXPERTS if config.get(name)), 0)
    wide = read.whole("intermediate_size", 4 * hidden)
    narrow = read.whole("moe_intermediate_size", wide) if experts else wide
    dense_layers = read.whole("first_k_dense_replace", 0) if experts else layers
    latent = read.whole("kv_lora_rank", 0)
    head_dim = read.whole("head_dim", hidden // heads)
    matrices = 2 if str(config.get("hidden_act", "silu")).startswith("gelu") else 3  # a gated MLP has three
    per_expert = matrices * hidden * narrow
    shared = read.whole("n_shared_experts", 0) * per_expert
    shared += read.whole("shared_expert_intermediate_size", 0) * matrices * hidden
    expert_layers = layers - dense_layers
    kv_heads = read.up_to(heads, "num_key_value_heads", heads)
    tied = bool(config.get("tie_word_embeddings", False))
    parameters = (
        vocab * hidden * (1 if tied else 2)
        + layers * (_attention(read, hidden, heads, head_dim) + 2 * hidden)
        + dense_layers * matrices * hidden * wide
        + expert_layers * (experts * (per_expert + hidden) + shared)
        + hidden
    )
    return ModelShape(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=narrow,
        vocab=vocab,
        tied=tied,
        experts=experts,
        experts_per_token=read.up_to(experts, "num_experts_per_tok", 1) if experts else 0,
        dense_layers=dense_layers if experts else 0,
        expert_parameters=expert_layers * experts * per_expert,
        kv_values_per_layer=latent + read.whole("qk_rope_head_dim", 0) if latent else 0,
    )


def _attention(read: ConfigReader, hidden: int, heads: int, head_dim: int) -> int:
    """Parameters of one layer's attention."""
    if latent := read.whole("kv_lora_rank", 0):
        return _latent_attention(read, hidden, heads, latent)
    queries, keys = heads * head_dim, read.whole("num_key_value_heads", heads) * head_dim
    kind = read.config.get("model_type")
    biases = queries + 2 * keys if kind in BIASED or read.config.get("attention_bias") else 0
    norms = 2 * head_dim if kind in NORMED else 0
    return 2 * hidden * queries + 2 * hidden * keys + biases + norms


def _latent_attention(read: ConfigReader, hidden: int, heads: int, latent: int) -> int:
    """DeepSeek's multi-head latent attention (arXiv 2405.04434, section 2.1): low-rank queries, keys and values."""
    rope, nope = read.whole("qk_rope_head_dim", 0), read.whole("qk_nope_head_dim", 0)
    values, low_rank = read.whole("v_head_dim", nope), read.whole("q_lora_rank", 0)
    queries = heads * (nope + rope)
    query_weights = hidden * low_rank + low_rank + low_rank * queries if low_rank else hidden * queries
    key_weights = hidden * (latent + rope) + latent + latent * heads * (nope + values)
    return query_weights + key_weights + heads * values * hidden
