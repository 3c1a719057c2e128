"""The arithmetic of the character-level model: its name in the cache and its size. Loads no tensor library."""

from __future__ import annotations

import hashlib
import json

from tidemill.config.model import CharModelConfig

PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = (PAD, EOS)
BUILDER_VERSION = 3  # raise when the same configuration would give other weights or another tokenizer


def content_key(config: CharModelConfig) -> str:
    """16 hex digits that name the model: equal configuration, equal bytes."""
    text = json.dumps([BUILDER_VERSION, config.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def intermediate_size(hidden_size: int) -> int:
    """Width of the gated MLP: 8/3 of the hidden size (as in Llama), rounded up to a multiple of 32."""
    return -(-8 * hidden_size // (3 * 32)) * 32


def parameter_count(config: CharModelConfig) -> int:
    """Parameters of the model, the shared embedding counted once."""
    hidden = config.hidden_size
    vocabulary = len(config.alphabet) + len(SPECIAL_TOKENS)
    per_layer = 4 * hidden * hidden + 3 * hidden * intermediate_size(hidden) + 2 * hidden
    return vocabulary * hidden + config.layers * per_layer + hidden
