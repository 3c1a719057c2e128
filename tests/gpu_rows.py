"""Result files of benchmarks.gpu.train_step and benchmarks.gpu.engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

H100 = "NVIDIA H100 80GB HBM3"
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Qwen3-1.7B."""
SAMPLES = {
    "status": "measured",
    "model": "1.7B",
    "config": QWEN3,
    "group_size": 8,
    "prompt_tokens": 512,
    "completion_tokens": 512,
}


def train_step_row(seconds: float, **changes: Any) -> dict[str, Any]:
    own = {"row": "train_step", "way": "shared", "lora": False, "microbatch_tokens": 16_384, "recomputes": True}
    return {**SAMPLES, **own, "samples": 32, "seconds": seconds, **changes}


def engine_row(seconds: float, **changes: Any) -> dict[str, Any]:
    own = {"row": "engine", "engine": "vllm", "slots": 256, "samples": 256, "tokens_per_s": 256 * 512 / seconds}
    return {**SAMPLES, **own, "seconds": seconds, **changes}


def write_rows(path: Path, *rows: dict[str, Any], device: str = H100) -> Path:
    path.write_text(json.dumps({"benchmark": path.stem, "device": device, "torch": "2.13.0", "rows": rows}))
    return path
