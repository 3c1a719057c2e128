"""Tries packages as Tidemill uses them, and prints `["NAME", "ERROR"]` after each; an empty error if it works.

A process of its own: an import may crash, or not return.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable


def attach_to_a_small_model() -> None:
    """The versions that transformers and peft accept of each other are checked when an adapter is attached."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tidemill.config.model import LoraConfig, ModelConfig
    from tidemill.models.lora import attach_adapter

    shape = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    attach_adapter(LlamaForCausalLM(shape), ModelConfig(lora=LoraConfig(rank=1)))


def import_the_model_class() -> None:
    """`import transformers` alone imports next to nothing."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    assert LlamaForCausalLM is not None and PreTrainedTokenizerFast is not None


def import_the_writer() -> None:
    importlib.import_module("torch.utils.tensorboard")


TRIALS: dict[str, Callable[[], object]] = {
    "peft": attach_to_a_small_model,
    "tensorboard": import_the_writer,
    "transformers": import_the_model_class,
}
"""Of packages whose import says little about whether they work."""


def try_package(name: str) -> str:
    """Why a package does not work; empty if it does."""
    try:
        trial = TRIALS.get(name)
        if trial is None:
            importlib.import_module(name.lower().replace("-", "_"))
        else:
            trial()
    except Exception as error:  # noqa: BLE001 -- whatever a package raises is the answer
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {first_line}"
    return ""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # packages may print when they are imported
    for name in sys.argv[1:]:
        print(json.dumps([name, try_package(name)]), file=answers, flush=True)


if __name__ == "__main__":
    main()
