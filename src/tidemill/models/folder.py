"""A local Hugging Face folder: what must be in it before anything is loaded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tidemill.core.errors import UserError
from tidemill.models.config_file import CONFIG, read_config
from tidemill.models.safetensors_files import stored_tensors

ADAPTER_CONFIG = "adapter_config.json"
DESCRIPTION = "tidemill.json"  # of a folder with a head; see models.heads
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def holds_adapter(folder: Path) -> bool:
    """Whether it is an adapter's folder, as peft writes them, rather than a model's."""
    return (folder / ADAPTER_CONFIG).is_file()


def holds_reward_model(folder: Path) -> bool:
    """Whether it says so, as what trains reward models writes them; such a folder also loads as a language model."""
    try:
        described = json.loads((folder / DESCRIPTION).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("kind") == "reward_model"


def refuse_reward_model(source: str | Path) -> None:
    """For whatever is to write.

    Raises:
        UserError: the folder holds a reward model.
    """
    folder = Path(source).expanduser()
    if holds_reward_model(folder):
        raise UserError(
            "the folder holds a reward model, whose weights were trained to judge and not to write",
            where=str(folder),
            cure='give the model that it was made from; a reward model goes into scoring.rewards (kind = "model") or '
            "critic.source",
        )


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a configuration, complete safetensors weights and a tokenizer.

    Raises:
        UserError: naming the file at fault.
    """
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.exists() else "there is no such folder"
        cure = "give the folder that holds config.json and model.safetensors"
        raise UserError(what, where=str(folder), cure=cure)
    check_config(folder)
    if not stored_tensors(folder):
        raise _no_weights(folder)
    if holds_adapter(folder):  # transformers would put it into the model
        raise UserError(
            f"the folder holds a model and an adapter ({ADAPTER_CONFIG})",
            where=str(folder),
            cure="merge the adapter into its base model and save that, or remove the adapter's files",
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            "the folder has no tokenizer",
            where=str(folder),
            cure="copy the model's tokenizer files (tokenizer.json) there",
        )
    return folder


def check_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        UserError: it is missing or no model configuration; naming the field.
    """
    path = folder / CONFIG
    if not path.is_file():
        if holds_adapter(folder):
            raise _unmerged(folder)
        raise UserError("the folder has no config.json", where=str(folder), cure="give a Hugging Face model folder")
    config = read_config(path)
    if config.get("quantization_config") is not None:
        raise UserError(
            "the weights are quantized (quantization_config), and only unquantized weights are trained",
            where=str(path),
            cure="give the model in float32, bfloat16 or float16",
        )
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            "the model configuration names no model_type", where=str(path), cure="give a Hugging Face model folder"
        )
    return config


def _unmerged(folder: Path) -> UserError:
    return UserError(
        "the folder holds an adapter without its base model",
        where=str(folder),
        cure="merge the adapter into its base model and save that",
    )


def _no_weights(folder: Path) -> UserError:
    if holds_adapter(folder):
        return _unmerged(folder)
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        return UserError(
            f"the weights are in {pickles[0]}, a pickle, which can run code when opened; only safetensors are read",
            where=str(folder),
            cure="if you trust it, convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        return UserError(
            f"the weights are in {gguf[0].name}; only safetensors are read",
            where=str(folder),
            cure="use the safetensors version of the model",
        )
    return UserError(
        "the folder has no model.safetensors", where=str(folder), cure="copy or download the weights again"
    )
