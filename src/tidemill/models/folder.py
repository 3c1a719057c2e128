"""Checks a local Hugging Face folder and lists the tensors of its safetensors files. Loads no tensor library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tidemill.core.errors import UserError
from tidemill.hardware.model_config import CONFIG, read_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
RUN = "config.toml"  # in a run directory
DESCRIPTION = "tidemill.json"  # describes the head of a reward or value model; see models.reward_model
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
OTHER_FAMILY = "choose a model of a tested family, such as Llama, Qwen 3, Gemma 3 or GPT-2"
"""The hint for an architecture that is not supported."""
LFS_BYTES = 1000  # a pointer is smaller
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def damaged(what: str, path: Path | str) -> UserError:
    """The error for a file that must be replaced."""
    return UserError(what, where=str(path), hint="copy or download it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor on disk."""

    file: Path
    dtype: str  # as in safetensors: F32, BF16, ...
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one file, the shards of its index (which may be missing), or none.

    Raises:
        UserError: the index is damaged.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / shard for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged("the index of the weight files is not readable", index) from error
    if outside := [file for file in files if file.parent != folder]:
        raise damaged(f"the index names a file outside its folder: {outside[0]}", index)
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weights by name; reads the headers only.

    Raises:
        UserError: a file is missing or damaged.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    return tensors


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file by name; reads the header only.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        with safe_open(file, "np") as stored:
            tensors = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: StoredTensor(file=file, dtype=tensor.get_dtype(), shape=tuple(tensor.get_shape()))
                for name, tensor in tensors.items()
            }
    except FileNotFoundError as error:
        raise damaged("the weight file is missing", file) from error
    except SafetensorError as error:
        if file.stat().st_size < LFS_BYTES and file.read_bytes().startswith(b"version https://git-lfs"):
            hint = "run `git lfs pull` in its folder, or download the file"
            raise UserError("is a pointer of Git LFS, not the weights", where=str(file), hint=hint) from error
        raise damaged(f"the weight file is damaged ({error})", file) from error
    except OSError as error:
        raise UserError(f"the weight file cannot be read ({error})", where=str(file)) from error


def is_local(source: str) -> bool:
    """Whether a model source is a path: by its spelling, or because it exists."""
    return source.startswith(("/", "./", "../", "~")) or source.count("/") > 1 or Path(source).exists()


def holds_adapter(folder: Path) -> bool:
    """Whether the folder holds a peft adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def holds_reward_model(folder: Path) -> bool:
    """Whether the folder describes itself as a reward model. (Such a folder also loads as a language model.)"""
    try:
        description = json.loads((folder / DESCRIPTION).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(description, dict) and description.get("kind") == "reward_model"


def refuse_reward_model(source: str | Path) -> None:
    """Raises UserError: the model that is to generate is a reward model."""
    folder = Path(source).expanduser()
    if holds_reward_model(folder):
        raise UserError(
            "the folder holds a reward model, whose weights were trained to score and not to generate",
            where=str(folder),
            hint='give the model it was trained from; a reward model belongs in scoring.rewards (kind = "model") or '
            "critic.source",
        )


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a configuration, complete safetensors weights and a tokenizer.

    Raises:
        UserError: names the missing or damaged file.
    """
    refuse_other_folder(folder)
    check_config(folder)
    if not stored_tensors(folder):
        raise _missing_weights(folder)
    if holds_adapter(folder):  # transformers would load it into the model
        raise UserError(
            f"the folder holds a model and an adapter ({ADAPTER_CONFIG})",
            where=str(folder),
            hint="merge the adapter into its base model and save that, or remove the adapter's files",
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            "the folder has no tokenizer",
            where=str(folder),
            hint="copy the model's tokenizer files (tokenizer.json) into it",
        )
    return folder


def refuse_other_folder(folder: Path) -> None:
    """Raises UserError: it is no folder, or holds neither a model nor an adapter."""
    if not folder.is_dir():
        what = "is a file, not a model folder" if folder.exists() else "there is no such folder"
        hint = "give the folder that holds config.json and model.safetensors"
        if folder.suffix == ".gguf":
            hint = "GGUF files are not read; give the model's safetensors version"
        raise UserError(what, where=str(folder), hint=hint)
    if (folder / CONFIG).is_file() or holds_adapter(folder):
        return
    if any(folder.glob("*.gguf")):
        what, hint = "the folder has GGUF files and no config.json", "give the model's safetensors version"
        raise UserError(what, where=str(folder), hint=hint)
    what = "the folder has no config.json" if any(folder.iterdir()) else "the folder is empty"
    hint = "give a Hugging Face model folder, or the directory of a run"
    models = [each.name for each in sorted(folder.iterdir()) if (each / CONFIG).is_file() or (each / RUN).is_file()]
    if models:
        hint = f"name one of the folders in it, such as {folder / models[0]}"
    raise UserError(what, where=str(folder), hint=hint)


def check_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        UserError: it is missing, quantized or not a model configuration; names the field.
    """
    path = folder / CONFIG
    if not path.is_file():
        refuse_other_folder(folder)
        raise _adapter_without_base(folder)
    config = read_config(path)
    if config.get("quantization_config") is not None:
        raise UserError(
            "the weights are quantized (quantization_config); only unquantized weights can be trained",
            where=str(path),
            hint="give the model in float32, bfloat16 or float16",
        )
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            "the model configuration has no model_type", where=str(path), hint="give a Hugging Face model folder"
        )
    return config


def _adapter_without_base(folder: Path) -> UserError:
    return UserError(
        "the folder holds an adapter without its base model",
        where=str(folder),
        hint="merge the adapter into its base model and save that",
    )


def _missing_weights(folder: Path) -> UserError:
    if holds_adapter(folder):
        return _adapter_without_base(folder)
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        return UserError(
            f"the weights are in {pickles[0]}, a pickle, which can run code when opened; only safetensors are read",
            where=str(folder),
            hint="if you trust it, convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    if gguf := sorted(folder.glob("*.gguf")):
        return UserError(
            f"the weights are in {gguf[0].name}; only safetensors are read",
            where=str(folder),
            hint="use the safetensors version of the model",
        )
    return damaged("the folder has no model.safetensors", folder)
