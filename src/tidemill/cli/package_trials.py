"""Which packages are installed, and whether they work: they are tried as Tidemill uses them.

As a program it tries the named packages, and prints `["NAME", "ERROR"]` after each. It is a process of its own, because
an import may crash, or not return.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from tidemill.core.packages import DEVELOPMENT, MODEL, requirements

PARTNERS = ("torch", "torchvision", "transformers", "peft", "huggingface_hub", "tokenizers", "numpy")
"""Packages that others are built for or check the version of."""
TRIAL_DEADLINE_S = 240.0  # of all packages together, which take some seconds on a quiet machine


def packages() -> list[dict[str, Any]]:
    """Each requirement: name, wanted versions, installed version (or None), extra, and why it does not work.

    `beside` names the versions of the installed packages that it works with, if it does not.
    """
    found: list[dict[str, Any]] = []
    for extra, wanted in requirements().items():
        for requirement in wanted if extra != DEVELOPMENT else ():
            limits = ",".join(sorted(map(str, requirement.specifier), reverse=True))
            version = installed(requirement.name)
            found.append({"name": requirement.name, "wanted": limits, "installed": version, "extra": extra})
    tried = dict.fromkeys(row["name"] for row in found if row["installed"] and row["extra"] != MODEL)
    errors = try_packages(list(tried))
    partners = {name: version for name in PARTNERS if (version := installed(name))}
    for row in found:
        row["error"] = errors.get(row["name"], "")
        beside = [f"{name} {version}" for name, version in partners.items() if name != row["name"]]
        row["beside"] = ", ".join(beside) if row["error"] else ""
    return found


def try_packages(names: Sequence[str], deadline_s: float = TRIAL_DEADLINE_S) -> dict[str, str]:
    """Why a package does not work, by name; empty if it does. One that ends the process or hangs is named, too."""
    errors: dict[str, str] = {}
    while waiting := [name for name in names if name not in errors]:
        command = [sys.executable, "-m", "tidemill.cli.package_trials", *waiting]
        try:
            done = subprocess.run(command, capture_output=True, timeout=deadline_s, check=False)
            answers, failure = done.stdout, f"the import ended the process with code {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            answers, failure = expired.stdout or b"", f"it was not imported within {deadline_s:g} s"
        errors |= dict(json.loads(line) for line in answers.splitlines())
        if stopped := next((name for name in waiting if name not in errors), None):
            errors[stopped] = failure
    return errors


def installed(name: str) -> str | None:
    """The installed version of a package, None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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


TRIALS: dict[str, Callable[[], object]] = {
    "peft": attach_to_a_small_model,
    "pyyaml": lambda: importlib.import_module("yaml"),
    "tensorboard": lambda: importlib.import_module("torch.utils.tensorboard"),
    "transformers": import_the_model_class,
}
"""Of packages whose import says little about whether they work."""


def try_package(name: str) -> str:
    """Why a package does not work; empty if it does."""
    try:
        TRIALS.get(name, lambda: importlib.import_module(name.lower().replace("-", "_")))()
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
